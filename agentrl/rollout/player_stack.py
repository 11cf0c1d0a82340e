"""Pairs of player and scorer: one for training, and one for validation if its tools or rewards differ."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.chat.chat import Chat
from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.player import Player
from agentrl.rollout.router import Router
from agentrl.rollout.scoring import Scorer
from agentrl.rollout.session import PromptLimits
from agentrl.rollout.shared_tools import SharedTools


@dataclass(frozen=True, slots=True)
class Validating:
    """The tools and rewards of validation, if they differ from training."""

    tools: tuple[str, ...]
    reward: RewardConfig


@dataclass(frozen=True, slots=True, eq=False)
class PlayerStack:
    """A player and its scorer."""

    player: Player
    scorer: Scorer


def open_stacks(
    agent: AgentConfig,
    reward: RewardConfig,
    validation: Validating | None,
    *,
    plugins: Plugins,
    chat: Chat,
    router: Router,
    host: AsyncioHost,
    prompt: PromptLimits,
    tools: SharedTools,
) -> tuple[PlayerStack, PlayerStack]:
    """Return the stacks of training and validation. They are the same if `validation` is None. Both share
    `tools`.

    Raises:
        UserError: a reward is unknown or refuses its config.
    """

    def stack(agent: AgentConfig, reward: RewardConfig) -> PlayerStack:
        scorer = Scorer(reward, RewardTable(reward, plugins), host=host, max_response_tokens=agent.max_response_tokens)
        player = Player(agent, plugins=plugins, chat=chat, router=router, host=host, scorer=scorer, prompt=prompt, tools=tools)
        return PlayerStack(player, scorer)

    training = stack(agent, reward)
    if validation is None:
        return training, training
    return training, stack(agent.model_copy(update={"tools": validation.tools}), validation.reward)
