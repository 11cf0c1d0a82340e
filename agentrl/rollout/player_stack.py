"""The wiring of what plays attempts: one place for training, validation, evaluation, `agentrl play` and
tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from agentrl.chat.chat import Chat
from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.frozen_servers import StartedKeys
from agentrl.rollout.group_player import AttemptPlayer, GroupScorer
from agentrl.rollout.message_model import MessageModel
from agentrl.rollout.message_session import MessageSession
from agentrl.rollout.openai_door import Door, open_gateway
from agentrl.rollout.opponents import Connect, Opponents, connect_frozen
from agentrl.rollout.player import OpenSession, Player
from agentrl.rollout.scoring import Scorer
from agentrl.rollout.session import TrajectorySession
from agentrl.rollout.shared_tools import SharedTools
from agentrl.rollout.shown_images import ShownImages
from agentrl.rollout.teacher import Teacher
from agentrl.servers.router import Router


@dataclass(frozen=True, slots=True)
class Validating:
    """The tools and rewards of validation, if they differ from training."""

    tools: tuple[str, ...]
    reward: RewardConfig


@dataclass(frozen=True, slots=True, eq=False)
class PlayerParts:
    """What all players of a process share. prompt: limits of the first prompt. connect: makes the clients of
    opponents' servers. frozen_patience_s: how long an opponent's turn waits for the restart of a server that
    was started for it. adapters: name of a conversation with a LoRA adapter of its own -> that adapter.
    teacher: scores the attempts of training; None: there is none on servers. images: takes the images of
    tools and partners; None: notes stand for them.
    """

    plugins: Plugins
    chat: Chat
    host: AsyncioHost
    prompt: PromptLimits
    connect: Connect = connect_frozen
    frozen_patience_s: float = 0.0
    adapters: Mapping[str, str] = field(default_factory=dict)
    teacher: Teacher | None = None
    images: ShownImages | None = None

    def open_tools(self, agent: AgentConfig) -> SharedTools:
        """Return the state of the tools that all players of the process share."""
        return SharedTools(self.plugins.tools, agent, host=self.host, codec=self.chat)

    def open_opponents(self, agent: AgentConfig) -> Opponents:
        """Return the opponents that all players of the process share."""
        return Opponents(agent.opponents, self.connect, patience_s=self.frozen_patience_s)

    def open_stacks(
        self, agent: AgentConfig, reward: RewardConfig, turns: Router, validation: Validating | None
    ) -> PlayerStacks:
        """Return what plays training and validation. `validation` None: the same plays both."""
        shared: dict[str, Any] = {
            "tools": self.open_tools(agent),
            "gateway": open_gateway(agent.gateway),
            "opponents": self.open_opponents(agent),
        }
        training = validating = open_stack(agent, reward, turns, self, **shared, teacher=self.teacher)
        if validation is None and self.teacher is not None:
            validating = open_stack(agent, reward, turns, self, **shared)
        if validation is not None:
            own = agent.model_copy(update={"tools": validation.tools})
            validating = open_stack(own, validation.reward, turns, self, **shared)
        return PlayerStacks(training, validating, shared["tools"])


class StackScorer(GroupScorer, Protocol):
    """Scores attempts, in processes of its own."""

    async def aclose(self) -> None:
        """Stop the processes in which rewards run."""


class BreakerCount(Protocol):
    """Counts tools that were closed for a while because they failed."""

    @property
    def num_breaker_openings(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class PlayerStack:
    """A player, its scorer, and the opponents that it plays against."""

    player: AttemptPlayer
    scorer: StackScorer
    opponents: Opponents = field(default_factory=lambda: Opponents({}))
    teacher: Teacher | None = None

    def set_frozen_servers(self, started: StartedKeys) -> None:
        """Use these servers for the opponents and the teacher that servers are started for."""
        self.opponents.set_servers(started)
        if self.teacher is not None:
            self.teacher.set_servers(started)

    async def aclose(self) -> None:
        """Stop the processes in which rewards run, and close the connections to opponents and teacher."""
        await self.scorer.aclose()
        await self.opponents.aclose()
        if self.teacher is not None:
            await self.teacher.aclose()


@dataclass(frozen=True, slots=True, eq=False)
class PlayerStacks:
    """What plays training and validation, and the tools that both share."""

    training: PlayerStack
    validation: PlayerStack
    tools: BreakerCount


class StackParts(Protocol):
    """Opens the players of a process: `PlayerParts`, or simulated ones."""

    def open_stacks(
        self, agent: AgentConfig, reward: RewardConfig, turns: Router, validation: Validating | None
    ) -> PlayerStacks: ...


def open_stack(
    agent: AgentConfig,
    reward: RewardConfig,
    turns: Router | MessageModel,
    parts: PlayerParts,
    *,
    tools: SharedTools | None = None,
    gateway: Door | None = None,
    opponents: Opponents | None = None,
    teacher: Teacher | None = None,
) -> PlayerStack:
    """Return a player whose turns come from `turns`, and its scorer.

    `tools`, `gateway`, `opponents`: shared with other stacks; None: its own. `teacher`: see PlayerParts.

    Raises:
        UserError: a reward is unknown or refuses its config, or the gateway cannot listen as configured.
    """
    opponents = parts.open_opponents(agent) if opponents is None else opponents
    open_session: OpenSession
    if isinstance(turns, MessageModel):
        open_session = partial(MessageSession, model=turns)
    else:
        open_session = partial(
            TrajectorySession,
            chat=parts.chat,
            generator=turns,
            prompt=parts.prompt,
            gateway=open_gateway(agent.gateway) if gateway is None else gateway,
            opponents=opponents,
            adapters=parts.adapters,
            images=parts.images,
        )
    scorer = Scorer(
        reward,
        RewardTable(reward, parts.plugins),
        host=parts.host,
        max_response_tokens=agent.max_response_tokens,
        chat=parts.chat,
    )
    tools = parts.open_tools(agent) if tools is None else tools
    player = Player(
        agent,
        parts.plugins,
        scorer,
        tools=tools,
        host=parts.host,
        open_session=open_session,
        forget=turns.forget,
        teacher=teacher,
    )
    return PlayerStack(player, scorer, opponents, teacher)
