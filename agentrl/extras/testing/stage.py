"""The rollout stack of one process with a scripted model.

Template, parser, session, tools and rewards are real.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import trio
from trio.abc import Clock

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.extras.testing.script import Script, ScriptedModel
from agentrl.plugins import AgentLoop, Environment, Interaction, Plugins, Registry, Tool
from agentrl.plugins.rewards import AnyReward
from agentrl.rewards.select import Unscored
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.manager import AgentLoopManager
from agentrl.rollout.opponents import connect_frozen
from agentrl.rollout.player_stack import PlayerParts, Validating
from agentrl.rollout.sampling import Sampling
from agentrl.rollout.tracing import AttemptTracing
from agentrl.servers.router import Router
from agentrl.servers.server import Client
from agentrl.types import Lease, Message, Task, Trajectory

T = TypeVar("T")

DATA_SOURCE = "testing"
MAX_PROMPT_TOKENS = 8192
AGENT_DEFAULTS: Mapping[str, Any] = {"max_response_tokens": 8192}
"""Default budgets. They are large, because a byte-level tokenizer needs many tokens."""


@functools.cache
def tiny_chat() -> Chat:
    """Return the chat of the quickstart's byte-level tokenizer, which can encode any text."""
    with tempfile.TemporaryDirectory(prefix="agentrl-testing-") as folder:
        write_tiny_tokenizer(Path(folder))
        return Chat.load(folder)


class Stage:
    """Plays tasks with a scripted model."""

    def __init__(
        self,
        model: ScriptedModel,
        *,
        plugins: Plugins,
        agent: AgentConfig,
        rollout: RolloutConfig,
        reward: RewardConfig,
        prompt: PromptLimits,
        context_tokens: int | None = None,
        attempts_per_group: int | None = None,
        validation: Validating | None = None,
        tracer: AttemptTracing | None = None,
        opponents: Mapping[str, ScriptedModel] | None = None,
    ) -> None:
        """opponents: the models behind the URLs of `agent.opponents`; None: its URLs are servers."""
        self._tracer = tracer
        self._opponents = opponents
        self._attempts_per_group = attempts_per_group
        self._validation = validation
        self.model, self.chat, self.plugins = model, model.chat, plugins
        self.agent, self.rollout, self.reward, self.prompt = agent, rollout, reward, prompt
        self.router = Router(
            lambda url: model, vocab_size=model.chat.vocab_size, context_tokens=context_tokens
        )

    def run(self, main: Callable[[AgentLoopManager], Awaitable[T]], *, clock: Clock | None = None) -> T:
        """Run `main(manager)` under trio.

        A mock clock ignores threads, so do not use it with asyncio plugins or with finite deadlines of
        rewards.
        """

        async def wrapped() -> T:
            self.router.set_servers(["http://scripted"], version=self.model.version)
            with AsyncioHost() as host:
                manager = AgentLoopManager(
                    self.agent,
                    self.rollout,
                    self.reward,
                    self.router,
                    PlayerParts(self.plugins, self.chat, host, self.prompt, self._connect),
                    attempts_per_group=self._attempts_per_group,
                    validation=self._validation,
                    tracer=self._tracer,
                )
                async with aclosing(manager):
                    return await main(manager)

        return trio.run(wrapped, clock=clock)

    def _connect(self, url: str, key: str | None) -> Client:
        return connect_frozen(url, key) if self._opponents is None else self._opponents[url]

    def play(
        self, *tasks: Task, n: int = 1, sampling: Sampling | None = None, clock: Clock | None = None
    ) -> list[Trajectory]:
        """Play each task `n` times and return the trajectories, ordered by task and member."""
        leases = self.leases(tasks, n)
        return self.run(
            lambda manager: manager.play(leases, sampling or EvalConfig(temperature=1.0)), clock=clock
        )

    @staticmethod
    def leases(tasks: Sequence[Task], n: int) -> list[Lease]:
        return [Lease(index, task, n, 0) for index, task in enumerate(tasks)]


def play(
    turns: Script,
    *,
    agent: type[AgentLoop] | str = "tool_agent",
    tools: Sequence[type[Tool] | Callable[..., Any] | str] = (),
    interaction: type[Interaction] | str | None = None,
    interaction_kwargs: Mapping[str, Any] | None = None,
    environment: type[Environment] | str | None = None,
    environment_kwargs: Mapping[str, Any] | None = None,
    reward: type[AnyReward] | str = Unscored,
    prompt: str | Sequence[Message] = "What is the answer?",
    ground_truth: Any = None,
    extra_info: Mapping[str, Any] | None = None,
    tools_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    chat: Chat | None = None,
    latency_s: float = 0.0,
    reward_config: Mapping[str, Any] | None = None,
    opponents: Mapping[str, Script] | None = None,
    **settings: Any,
) -> Trajectory:
    """Play one attempt in which the model says `turns` and return its trajectory.

    Args:
        agent, tools, interaction, environment, reward: classes (or typed functions, for tools), registered
            names, or `file.py:Class`.
        interaction_kwargs, environment_kwargs, ground_truth, extra_info, tools_kwargs: fields of the dataset
            row.
        chat: tokenizer and template; None: the byte-level ones of the quickstart.
        latency_s: seconds that the model takes for each turn.
        reward_config: further keys of the config section `reward`.
        opponents: name -> what that frozen model says, as `turns`.
        settings: keys of the config section `agent`: max_turns=3, tool_config={...}, ...
    """
    plugins = open_plugins(AgentConfig(**settings))
    tool_names = tuple(registered(plugins.tools, tool) for tool in tools)
    partner = (
        None
        if interaction is None
        else {**(interaction_kwargs or {}), "name": registered(plugins.interactions, interaction)}
    )
    world = (
        None
        if environment is None
        else {**(environment_kwargs or {}), "name": registered(plugins.environments, environment)}
    )
    task = Task(
        task_id="testing:0",
        data_source=DATA_SOURCE,
        messages=(Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt),
        agent_name=plugins.agents.resolve(registered(plugins.agents, agent)),
        ground_truth=ground_truth,
        extra_info=dict(extra_info or {}),
        tools_kwargs=dict(tools_kwargs or {}),
        interaction_kwargs=partner,
        environment_kwargs=world,
    )
    chat = chat or tiny_chat()
    urls = {name: f"http://127.0.0.1/{name}" for name in opponents or {}}
    stage = Stage(
        ScriptedModel(chat, turns, latency_s=latency_s),
        plugins=plugins,
        agent=AgentConfig(
            **{
                "tools": tool_names,
                "opponents": {name: {"urls": [url]} for name, url in urls.items()},
                **AGENT_DEFAULTS,
                **settings,
            }
        ),
        rollout=RolloutConfig(group_size=1),
        reward=RewardConfig(
            sources={DATA_SOURCE: registered(plugins.rewards, reward)}, **(reward_config or {})
        ),
        prompt=PromptLimits(MAX_PROMPT_TOKENS, "error"),
        opponents={urls[name]: ScriptedModel(chat, said) for name, said in (opponents or {}).items()},
    )
    (trajectory,) = stage.play(task)
    return trajectory


def registered(registry: Registry[Any], plugin: Any) -> str:
    """Return the name of a plugin given as class, function or name.

    A class or function is registered first.
    """
    return plugin if isinstance(plugin, str) else registry.add(plugin).name
