"""The rollout stack of one process with a scripted model, for tests of the core.

Template, parser, session, tools and rewards are real. `agentrl.testing` is the same for users, an extra.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import trio
from trio.abc import Clock

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.parsing import call_id
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.errors import RequestRefused
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
from agentrl.servers.protocol import Pulse, ServerLoad
from agentrl.servers.router import Router
from agentrl.servers.server import Client
from agentrl.servers.streamed import StreamedTokens
from agentrl.types import Generation, Lease, Message, SamplingParams, Task, ToolCall, Trajectory

T = TypeVar("T")

STREAMED_TOKENS = 4
"""Tokens that a streamed turn tells at a time."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a scripted turn."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class Says:
    """One scripted turn: text, then calls.

    `reasoning` comes before both if the template supports thinking.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Raw:
    """The exact text of one scripted turn, for malformed calls and incomplete markup."""

    text: str


ScriptedTurn = str | Call | Says | Raw | Sequence[Call]
"""A text, a call, several calls at once, a combination of text and calls (`Says`), or an exact text (`Raw`).
"""

Script = Sequence[ScriptedTurn] | Callable[[int, str], ScriptedTurn]
"""The turns in order, or a function of the turn's index (from 0) and the prompt as text."""


def call(name: str, /, **arguments: object) -> Call:
    """Return a tool call for a script: `call("calculator", expression="6*7")`."""
    return Call(name, arguments)


class ScriptedModel:
    """Replaces a server's client. Each attempt plays the script from its beginning.

    A turn beyond the end of the script is refused, and the attempt fails with a message that says so.

    Args:
        version: policy version that the sampled tokens carry.
        latency_s: how long each turn takes; `math.inf` never answers.

    Attributes:
        requests: (prompt ids, generation) of each request, in the order of the answers.
        params: sampling parameters of each request, in the same order.
    """

    def __init__(self, chat: Chat, script: Script, *, version: int = 0, latency_s: float = 0.0) -> None:
        self.chat, self.version, self.latency_s = chat, version, latency_s
        self._script = script
        self._num_turns: Counter[str] = Counter()
        self.requests: list[tuple[list[int], Generation]] = []
        self.params: list[SamplingParams] = []
        self.running = 0
        self._num_pulses = 0

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation:
        """Return the next turn of the attempt that `rid` names, cut at `params.max_new_tokens`.

        Raises:
            RequestRefused: the script has no further turn.
        """
        trajectory = rid.rpartition("-")[0]
        turn = self._num_turns[trajectory]
        self._num_turns[trajectory] += 1
        self.running += 1
        try:
            whole = written(self.chat, await self.next_turn(turn, self.chat.decode(input_ids)))
            await trio.sleep(self.latency_s)
        finally:
            self.running -= 1
        ids = np.array(whole[: params.max_new_tokens], np.int32)
        # The values are arbitrary but distinct, so that tests notice a misplaced one.
        logprobs = -np.linspace(0.1, 2.0, len(ids), dtype=np.float32) - np.float32(len(input_ids) / 1000)
        versions = np.full(len(ids), self.version, np.int32)
        generation = Generation(ids, logprobs, versions, "stop" if len(ids) == len(whole) else "length")
        self.requests.append((list(input_ids), generation))
        self.params.append(params)
        return generation

    async def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str, into: StreamedTokens
    ) -> Generation:
        """Return the next turn as `generate` does, and tell `into` its tokens, a few at a time."""
        generation = await self.generate(input_ids, params, rid=rid)
        for end in range(STREAMED_TOKENS, len(generation.token_ids), STREAMED_TOKENS):
            into.arrived(generation.token_ids[:end].tolist(), partial(_cut_off, generation, end))
            await trio.lowlevel.checkpoint()
        return generation

    async def abort(self, rid: str) -> None:
        """Do nothing: a running turn ends by itself."""

    async def settle_aborts(self) -> None:
        return

    async def serves(self, version: int) -> bool:
        return self.version >= version

    async def pulse(self) -> Pulse:
        """Report changing load, so that the model never counts as hanging: a person, or `latency_s`, may take
        any time.
        """
        self._num_pulses += 1
        return Pulse(is_paused=False, load=ServerLoad(self.running, 0, self._num_pulses, self._num_pulses))

    async def aclose(self) -> None:
        return

    async def next_turn(self, index: int, prompt: str) -> ScriptedTurn:
        """Return turn `index` (from 0) of an attempt. `prompt` is its current prompt as text.

        Raises:
            RequestRefused: the script has no such turn.
        """
        if callable(self._script):
            return self._script(index, prompt)
        if index >= len(self._script):
            raise RequestRefused(
                f"the script has {len(self._script)} turn(s), and the agent asked for turn {index + 1}"
            )
        return self._script[index]


def _cut_off(generation: Generation, end: int) -> Generation:
    """Return the first `end` tokens of a generation, as an aborted one."""
    facts = (generation.token_ids[:end], generation.logprobs[:end], generation.versions[:end])
    return Generation(*facts, "abort")


def written(chat: Chat, turn: ScriptedTurn) -> list[int]:
    """Return the tokens that the model samples for `turn`, including the end of the turn."""
    if isinstance(turn, Raw):
        return [*chat.encode(turn.text), chat.eos_token_ids[0]]
    said = _as_says(turn)
    calls = tuple(
        ToolCall(call_id(0, index), call.name, call.arguments) for index, call in enumerate(said.calls)
    )
    message = Message("assistant", said.text, tool_calls=calls, reasoning=said.reasoning)
    shown = chat.render_training([Message("user", "?"), message], [])
    return [int(id) for id in shown.token_ids[shown.mask]]


def _as_says(turn: ScriptedTurn) -> Says:
    if isinstance(turn, str):
        return Says(turn)
    if isinstance(turn, Call):
        return Says(calls=(turn,))
    if isinstance(turn, Says):
        return turn
    assert not isinstance(turn, Raw)
    return Says(calls=tuple(turn))


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
