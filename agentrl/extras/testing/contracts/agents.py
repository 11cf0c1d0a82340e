"""The contract of agent loops."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import trio

from agentrl.errors import ToolError
from agentrl.extras.testing.contracts.running import check_name, plugin_class
from agentrl.extras.testing.script import Script, ScriptedTurn
from agentrl.extras.testing.stage import play
from agentrl.plugins import AgentLoop, Interaction, Tool, ToolResult, load_plugins
from agentrl.rollout.session import TrajectoryEnd
from agentrl.types import SCORED_OUTCOMES, JsonObject, Message, Outcome, Task, Trajectory


class AgentContract:
    """Subclass it as `class TestMyAgent(AgentContract)`, with at least `agent` and `turns`.

    agent: a class, a registered name, or `file.py:Class`.
    turns: the model's turns in a complete, typical attempt.
    never_done: a turn that the model can repeat forever without ending the attempt.
    config: the agent's options, as in `agent.agent_config`.
    tools, interaction, interaction_kwargs, settings: as in `agentrl.testing.play`, for the typical attempt.
    tool_turn: a turn that calls the tool `probe` (no arguments) in the agent's format; None: the agent calls
        no tools.
    """

    agent: ClassVar[type[AgentLoop] | str]
    turns: ClassVar[Sequence[ScriptedTurn]]
    never_done: ClassVar[ScriptedTurn] = "hm"
    tool_turn: ClassVar[ScriptedTurn | None] = None
    config: ClassVar[Mapping[str, Any]] = {}
    tools: ClassVar[Sequence[Any]] = ()
    interaction: ClassVar[type[Interaction] | str | None] = None
    interaction_kwargs: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}

    def test_name(self) -> None:
        registry = load_plugins().agents
        cls = plugin_class(registry, self.agent)
        check_name(registry, cls)

    def test_run_is_async(self) -> None:
        assert inspect.iscoroutinefunction(self._class().run), "`run` must be `async def`"

    def test_prompt_depends_on_nothing_else(self) -> None:
        """Prompt lengths are measured before the run, so the prompt must be deterministic."""
        task = Task("testing:0", "testing", (Message("user", "What is the answer?"),), "x")
        first, second = ([*self._class()(dict(self.config)).prompt(task, [])] for _ in range(2))
        assert first == second
        assert first, "the prompt is empty"
        assert all(isinstance(message, Message) for message in first)

    def test_a_typical_attempt_ends_well(self) -> None:
        trajectory, watch = self._play(list(self.turns))
        assert trajectory.outcome in SCORED_OUTCOMES, trajectory.failure
        assert trajectory.num_action_tokens > 0
        watch.check()

    def test_it_ends_at_the_turn_limit(self) -> None:
        trajectory, watch = self._play(lambda turn, prompt: self.never_done, max_turns=2)
        assert trajectory.outcome in SCORED_OUTCOMES, trajectory.failure
        assert trajectory.metrics["num_turns"] <= 2
        watch.check()

    def test_it_ends_at_the_token_limit(self) -> None:
        trajectory, watch = self._play(
            lambda turn, prompt: self.never_done, max_response_tokens=3, max_turns=50
        )
        assert trajectory.outcome in SCORED_OUTCOMES, trajectory.failure
        assert trajectory.num_action_tokens <= 3
        watch.check()

    def test_it_ends_at_the_deadline(self) -> None:
        trajectory, watch = self._play(
            lambda turn, prompt: self.never_done, latency_s=math.inf, trajectory_timeout_s=0.3
        )
        assert trajectory.outcome is Outcome.TIMEOUT, f"{trajectory.outcome}: {trajectory.failure}"
        watch.check()

    def test_it_ends_when_no_server_answers(self) -> None:
        trajectory, watch = self._play([])
        assert trajectory.outcome is Outcome.MODEL_ERROR, f"{trajectory.outcome}: {trajectory.failure}"
        watch.check()

    def test_it_ends_when_a_tool_breaks(self) -> None:
        if self.tool_turn is None:
            return
        broken = probe_tool(ToolError("broken on purpose"))
        trajectory, watch = self._play([self.tool_turn, *self.turns], tools=[*self.tools, broken])
        assert trajectory.outcome is Outcome.TOOL_ERROR, f"{trajectory.outcome}: {trajectory.failure}"
        watch.check()

    def test_it_ends_when_a_tool_says_so(self) -> None:
        if self.tool_turn is None:
            return
        final = probe_tool(ToolResult("that is all", is_final=True))
        trajectory, watch = self._play([self.tool_turn], tools=[*self.tools, final])
        assert trajectory.outcome is Outcome.COMPLETED, f"{trajectory.outcome}: {trajectory.failure}"
        watch.check()

    # ------------------------------------------------------------------------------------------------- inside

    def _class(self) -> type[AgentLoop]:
        return plugin_class(load_plugins().agents, self.agent)

    def _play(
        self, script: Script, *, tools: Sequence[Any] | None = None, latency_s: float = 0.0, **settings: Any
    ) -> tuple[Trajectory, SessionWatch]:
        watch = SessionWatch()
        agent = watched(self._class(), watch)
        offered = self.tools if tools is None else tools
        if not offered and self.tool_turn is not None:  # without tools, a call is text
            offered = [probe_tool(ToolResult("probed"))]
        trajectory = play(
            script,
            agent=agent,
            tools=offered,
            interaction=self.interaction,
            interaction_kwargs=dict(self.interaction_kwargs),
            latency_s=latency_s,
            **{"agent_config": {agent.name: dict(self.config)}, **self.settings, **settings},
        )
        return trajectory, watch


class SessionWatch:
    """Records how an agent loop used its session and how it ended."""

    def __init__(self) -> None:
        self.ended = False  # the session raised TrajectoryEnd
        self.num_calls_after_end = 0
        self.let_end_out = True
        self.num_open_nurseries = 0

    def check(self) -> None:
        """Assert that the agent let TrajectoryEnd pass and left no task running."""
        assert self.num_calls_after_end == 0, "the agent caught TrajectoryEnd and went on: let it pass"
        assert self.let_end_out, (
            "the agent swallowed TrajectoryEnd: let it pass, the session knows the outcome"
        )
        assert self.num_open_nurseries == 0, "the agent left a nursery open: tasks of it may still run"


class WatchedSession:
    """A session that counts calls after its end."""

    def __init__(self, session: Any, watch: SessionWatch) -> None:
        self._session, self._watch = session, watch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        return self._counted(value) if inspect.iscoroutinefunction(value) else value

    def _counted(self, method: Any) -> Any:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self._watch.num_calls_after_end += self._watch.ended
            if self._watch.num_calls_after_end > 100:
                raise AssertionError("the agent caught TrajectoryEnd a hundred times")
            try:
                return await method(*args, **kwargs)
            except TrajectoryEnd:
                self._watch.ended = True
                raise

        return counted


def watched(agent: type[AgentLoop], watch: SessionWatch) -> type[AgentLoop]:
    """Return a subclass of the agent whose `run` is watched."""

    async def run(self: Any, task: Task, session: Any) -> None:
        nurseries = len(trio.lowlevel.current_task().child_nurseries)
        try:
            await agent.run(self, task, WatchedSession(session, watch))  # type: ignore[arg-type]
            watch.let_end_out = not watch.ended
        finally:
            watch.num_open_nurseries = len(trio.lowlevel.current_task().child_nurseries) - nurseries

    return type(agent.__name__, (agent,), {"run": run, "__module__": agent.__module__})


def probe_tool(answer: ToolResult | Exception) -> type[Tool]:
    """Return the tool `probe`, whose calls return `answer`, or raise it if it is an exception."""

    class Probe(Tool):
        name: ClassVar[str] = "probe"
        description: ClassVar[str] = "Look what happens."
        parameters: ClassVar[JsonObject] = {"type": "object", "properties": {}}
        runtime = "trio"

        async def call(self, arguments: JsonObject) -> ToolResult:
            if isinstance(answer, Exception):
                raise answer
            return answer

    return Probe
