"""Calls of one trajectory and the limits that all trajectories share: who waits, who tries again, who is told
what.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from agentrl.config.agent import AgentConfig
from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Tool, ToolResult, WrongCall, load_plugins
from agentrl.plugins.blame import failure_of
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.shared_tools import FIRST_RETRY_PAUSE_S, SharedTools
from agentrl.rollout.toolbox import Toolbox
from agentrl.types import Outcome, ToolCall

SLOW_S = 10.0


class Service(Tool):
    """Does what the call says, else what its row says, one deed per call: an answer, or one of those
    below.
    """

    name: ClassVar[str] = "service"
    description: ClassVar[str] = "does as it is told"
    parameters: ClassVar = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "do": {"type": "string"}},
    }
    runtime = "trio"
    calls: ClassVar[int]
    running: ClassVar[int]
    most_running: ClassVar[int]
    starts: ClassVar[int]
    closes: ClassVar[int]

    async def start(self, *, deeds: tuple[str, ...] = (), start: str = "") -> None:
        type(self).starts += 1
        self.deeds = list(deeds)
        await self._do(start)

    async def call(self, arguments) -> ToolResult:
        cls = type(self)
        cls.calls += 1
        cls.running += 1
        cls.most_running = max(cls.most_running, cls.running)
        try:
            return await self._do(arguments.get("do") or (self.deeds.pop(0) if self.deeds else "ok"))
        finally:
            cls.running -= 1

    async def close(self) -> None:
        type(self).closes += 1

    async def _do(self, deed: str) -> Any:
        match deed:
            case "down":
                raise ConnectionError("no route to /home/somebody")
            case "hang":
                await trio.sleep_forever()
            case "wrong":
                raise WrongCall("there is no such page; pages: 1 to 9")
            case "slow":
                await trio.sleep(SLOW_S)
            case "nonsense":
                return 3
        return ToolResult(deed)


class Patient(Service):
    """The same, and a call may simply be made again."""

    name: ClassVar[str] = "patient"
    is_idempotent = True


@pytest.fixture(autouse=True)
def _forget_calls():
    for cls in (Service, Patient):
        cls.calls = cls.running = cls.most_running = cls.starts = cls.closes = 0


class Bench:
    """Tools of one process, and trajectories that use them."""

    def __init__(self, stage, host: AsyncioHost, **agent: Any) -> None:
        registry = load_plugins().tools
        registry.add(Service)
        registry.add(Patient)
        self.shared = SharedTools(registry, AgentConfig(**agent), host=host, codec=stage.chat)

    def toolbox(self, *deeds: str, start: str = "") -> Toolbox:
        kwargs = {"create_kwargs": {"deeds": deeds, "start": start}}
        return Toolbox(
            ("service", "patient", "calculator"),
            self.shared,
            tools_kwargs={"service": kwargs, "patient": kwargs},
            key="t",
        )


def on_bench(stage, main: Callable, **agent: Any) -> Any:
    async def wrapped() -> Any:
        with AsyncioHost() as host:
            return await main(Bench(stage, host, **agent))

    return trio.run(wrapped, clock=MockClock(autojump_threshold=0))


def call(name: str = "service", **arguments: Any) -> ToolCall:
    return ToolCall("id", name, arguments)


def limits(**of: Any) -> dict[str, Any]:
    return {"tool_limits": {"service": of, "patient": of}}


# ---------------------------------------------------------------------------------------------------- answers


def test_every_call_is_answered_in_order(stage):
    unreadable = ToolCall("id", "service", None, "the arguments are not valid JSON: {oops")

    async def main(bench):
        started = trio.current_time()
        box = bench.toolbox()
        calls = [
            call(do="slow"),
            call("calculator", expression="6*7"),
            unreadable,
            call("nope"),
            call(n="x"),
            call(do="slow"),
            call(),
        ]
        results = await box.answer(calls)
        assert trio.current_time() == pytest.approx(started + SLOW_S)
        return [(result.text, result.is_error) for result in results]

    schema = json.dumps(Service.parameters, separators=(",", ":"))
    assert on_bench(stage, main, max_tool_calls_per_turn=6) == [
        ("slow", False),
        ("42", False),
        (f"not run: the arguments are not valid JSON: {{oops; expected arguments: {schema}", True),
        ("not run: unknown tool 'nope'; tools: service, patient, calculator", True),
        (f'not run: n: "x" is not of type "integer"; expected arguments: {schema}', True),
        ("slow", False),
        ("not run: at most 6 tool calls per turn", True),
    ]


@settings(max_examples=60, deadline=None)
@given(num_calls=st.integers(0, 6), limit=st.integers(1, 4))
def test_as_many_answers_as_calls_whatever_the_limit(stage, num_calls, limit):
    async def main(bench):
        return await bench.toolbox().answer([call()] * num_calls)

    results = on_bench(stage, main, max_tool_calls_per_turn=limit)
    assert [result.text for result in results] == ["ok"] * min(num_calls, limit) + [
        f"not run: at most {limit} tool calls per turn"
    ] * (num_calls - limit)


def test_a_tool_says_that_it_was_called_wrongly(stage):
    async def main(bench):
        (result,) = await bench.toolbox("wrong").answer([call()])
        return result

    assert on_bench(stage, main) == ToolResult("error: there is no such page; pages: 1 to 9", is_error=True)


def test_schemas_are_made_once_per_process(stage):
    async def main(bench):
        return bench.toolbox().schemas, bench.toolbox().schemas

    first, second = on_bench(stage, main)
    assert first is second
    assert [schema["function"]["name"] for schema in first] == ["service", "patient", "calculator"]


def test_an_unknown_tool_of_a_row_is_no_tool_of_the_process(stage):
    async def main(bench):
        with pytest.raises(PluginError, match="unknown tool 'nope'"):
            Toolbox(("service", "nope"), bench.shared, tools_kwargs={}, key="t")

    on_bench(stage, main)


@pytest.mark.parametrize("keep", ["head", "tail", "ends"])
def test_each_tool_has_its_output_budget(stage, keep):
    long = "begin " + "x" * 500 + " end"

    async def main(bench):
        box = bench.toolbox(long, long)
        results = await box.answer([call(), call("patient")])
        return [result.text for result in results], dict(box.metrics)

    agent = {
        "tool_limits": {"service": {"max_output_tokens": 60, "keep": keep}},
        "max_tool_output_tokens": 600,
    }
    (cut, whole), metrics = on_bench(stage, main, **agent)
    assert len(stage.chat.encode(cut)) <= 60
    assert (cut.startswith("begin"), cut.endswith("end"), "tokens cut ...]" in cut) == (
        keep != "tail",
        keep != "head",
        True,
    )
    assert whole == long
    assert metrics == {"num_cut_outputs": 1}


# --------------------------------------------------------------------------------------------------- failures


def test_a_broken_tool_ends_the_trajectory_and_its_other_calls(stage):
    async def main(bench):
        box = bench.toolbox()
        with pytest.raises(ToolError, match="tool 'service' raised in `call`: ConnectionError"):
            await box.answer([call(do="slow"), call("patient", do="hang"), call(do="down")])
        assert Service.running == Patient.running == 0
        await box.close()
        assert (Service.closes, Patient.closes) == (1, 1)
        return dict(box.metrics)

    assert on_bench(stage, main) == {"num_tool_failures": 1}


def test_or_the_model_is_told_and_nothing_of_the_host(stage):
    async def main(bench):
        box = bench.toolbox("down", "ok")
        return [(await box.answer([call()]))[0] for _ in range(2)]

    assert on_bench(stage, main, **limits(on_failure="tell")) == [
        ToolResult("tool 'service' is not available", is_error=True),
        ToolResult("ok"),
    ]


def test_what_is_no_result_is_a_broken_tool(stage):
    async def main(bench):
        with pytest.raises(ToolError, match="tool 'service' returned int 3; return "):
            await bench.toolbox("nonsense").answer([call()])

    on_bench(stage, main)


@pytest.mark.parametrize("num_failures", range(5))
def test_calls_of_idempotent_tools_are_made_again(stage, num_failures):
    async def main(bench):
        box = bench.toolbox(*["down"] * num_failures)
        started = trio.current_time()
        result = None
        with contextlib.suppress(ToolError):
            (result,) = await box.answer([call("patient")])
        return result, dict(box.metrics), trio.current_time() - started

    result, metrics, seconds = on_bench(stage, main, **limits(max_retries=3))
    retries = min(num_failures, 3)
    assert (result == ToolResult("ok")) == (num_failures <= 3)
    assert Patient.calls == 1 + retries
    assert metrics == {
        name: n
        for name, n in {"num_tool_retries": retries, "num_tool_failures": num_failures // 4}.items()
        if n
    }
    least = FIRST_RETRY_PAUSE_S / 2 * (2**retries - 1)  # pauses double; each is spread over its upper half
    assert least <= seconds <= 2 * least


def test_no_other_call_is_made_again(stage):
    async def main(bench):
        with pytest.raises(ToolError):
            await bench.toolbox("down").answer([call("service")])
        assert (await bench.toolbox("wrong").answer([call("patient")]))[0].is_error
        assert (await bench.toolbox("hang").answer([call("patient")]))[0].is_error

    on_bench(stage, main, **limits(max_retries=5))
    assert (Service.calls, Patient.calls) == (1, 2)


def test_deadlines_are_the_tool_s_own(stage):
    async def main(bench):
        box = bench.toolbox("hang", "hang")
        started = trio.current_time()
        texts = [(await box.answer([call(name)]))[0].text for name in ("service", "patient")]
        return texts, trio.current_time() - started, dict(box.metrics)

    agent = {"tool_timeout_s": 7.0, "tool_limits": {"service": {"timeout_s": 2.5}}}
    texts, seconds, metrics = on_bench(stage, main, **agent)
    assert texts == ["timed out after 2.5 s", "timed out after 7 s"]
    assert seconds == pytest.approx(9.5)
    assert metrics == {"num_tool_timeouts": 2}


@pytest.mark.parametrize("start", ["down", "hang", "wrong"])
def test_a_start_that_fails_is_closed_and_may_be_made_again(stage, start):
    async def main(bench):
        box = bench.toolbox(start=start)
        texts = [(await box.answer([call()]))[0].text for _ in range(2)]
        await box.close()
        return texts

    assert on_bench(stage, main, **limits(on_failure="tell")) == ["tool 'service' is not available"] * 2
    assert (Service.starts, Service.closes, Service.calls) == (2, 2, 0)


# --------------------------------------------------------------------------------- shared by all trajectories


@pytest.mark.parametrize("most", [1, 3, None])
def test_calls_at_once_over_all_trajectories(stage, most):
    async def main(bench):
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(bench.toolbox("slow", "slow").answer, [call()])
        return trio.current_time() - started

    # Waiting is no part of a call's deadline, which one call in a row of six would pass.
    assert on_bench(stage, main, **limits(max_concurrent=most, timeout_s=SLOW_S + 1)) == pytest.approx(
        SLOW_S * 6 / (most or 6)
    )
    assert Service.most_running == (most or 6)


def test_a_tool_that_is_down_is_left_alone_for_a_while(stage):
    async def main(bench):
        async def texts(*deeds: str, n: int = 1) -> list[str]:
            return [(await bench.toolbox(*deeds).answer([call()]))[0].text for _ in range(n)]

        down = "tool 'service' is not available"
        assert await texts("down", n=3) == [down] * 3
        assert Service.calls == 3
        assert await texts("ok", n=20) == [down] * 20
        assert Service.calls == 3  # refused without being tried
        await trio.sleep(60.0)
        assert await texts("down") == [down]
        assert Service.calls == 4  # the probe
        assert await texts("ok") == [down]
        await trio.sleep(60.0)
        assert await texts("ok", n=5) == ["ok"] * 5
        return bench.shared.num_breaker_openings

    assert on_bench(stage, main, **limits(on_failure="tell", breaker_failures=3, breaker_pause_s=60.0)) == 2


def test_a_refused_call_ends_the_trajectory_with_a_reason(stage):
    async def main(bench):
        with pytest.raises(ToolError, match="ConnectionError"):
            await bench.toolbox("down").answer([call()])
        with pytest.raises(ToolError, match="tool 'service' is not available") as refused:
            await bench.toolbox().answer([call()])
        failure = failure_of(refused.value)  # the breaker quotes what it opened for, with its line
        assert "it failed repeatedly: tool 'service' raised in `call`: ConnectionError" in failure.text
        assert failure.error == "ConnectionError"
        assert "test_toolbox.py" in failure.place
        (result,) = await bench.toolbox().answer([call("patient")])  # each tool has a breaker of its own
        return result

    assert on_bench(stage, main, **limits(breaker_failures=1)) == ToolResult("ok")


def test_retries_stop_when_the_breaker_opens(stage):
    async def main(bench):
        with pytest.raises(ToolError):
            await bench.toolbox(*["down"] * 9).answer([call("patient")])

    on_bench(stage, main, **limits(max_retries=8, breaker_failures=2, breaker_pause_s=1e6))
    assert Patient.calls == 2


def test_what_the_model_does_wrong_opens_no_breaker(stage):
    async def main(bench):
        box = bench.toolbox("wrong", "hang", "wrong", "hang")
        for _ in range(4):
            assert (await box.answer([call()]))[0].is_error
        return bench.shared.num_breaker_openings, (await box.answer([call()]))[0].text

    assert on_bench(stage, main, **limits(breaker_failures=1)) == (0, "ok")


def test_a_cancelled_probe_leaves_no_breaker_stuck(stage):
    async def main(bench):
        await bench.toolbox("down").answer([call()])
        await trio.sleep(30.0)
        with trio.move_on_after(1.0) as scope:
            await bench.toolbox("slow").answer([call()])
        assert scope.cancelled_caught
        return (await bench.toolbox("ok").answer([call()]))[0].text

    assert (
        on_bench(stage, main, **limits(on_failure="tell", breaker_failures=1, breaker_pause_s=30.0)) == "ok"
    )


# -------------------------------------------------------------------------------------- in a whole trajectory


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_finish_ends_the_trajectory_also_in_its_last_turn(stage, turn):
    finish = stage.call("finish", '{"answer": "#### 42"}')
    world = stage.World(
        lambda number, _: (finish + stage.call()) if number == turn else stage.call(),
        agent={"tools": ("calculator", "finish"), "max_turns": 3},
    )
    (trajectory,) = world.play(stage.task())
    assert (trajectory.outcome, trajectory.metrics["num_turns"]) == (Outcome.COMPLETED, turn + 1)
    assert trajectory.metrics["num_tool_calls"] == turn + 2  # both calls of the last turn were run
    assert trajectory.messages[-1].role == "assistant"  # nobody reads the answers to them
    assert trajectory.reward == 1.0


def test_a_wrong_finish_is_no_end(stage):
    world = stage.World(
        lambda number, _: [stage.call("finish", "{}"), "#### 42"][number],
        agent={"tools": ("finish",)},
    )
    (trajectory,) = world.play(stage.task())
    assert '"answer" is a required property; expected arguments: {' in trajectory.messages[2].content
    assert (trajectory.outcome, trajectory.metrics["num_turns"], trajectory.reward) == (
        Outcome.COMPLETED,
        2,
        1.0,
    )


def test_calls_of_the_last_turn_are_run(stage):
    world = stage.World(
        lambda *_: stage.call("service"),
        agent={"tools": ("service",), "max_turns": 2},
        plugins=[Service],
        reward={"tool_reward_weight": 1.0},
    )
    (trajectory,) = world.play(stage.task())
    assert (trajectory.outcome, Service.calls) == (Outcome.TURN_LIMIT, 2)


def test_what_tools_did_is_counted(stage):
    agent = {
        "tools": ("patient",),
        "max_tool_output_tokens": 60,
        "tool_timeout_s": 3.0,
        **limits(on_failure="tell", max_retries=1),
    }
    world = stage.World(
        lambda turn, _: stage.call("patient", "{}") if turn < 4 else "#### 42", agent=agent, plugins=[Patient]
    )
    deeds = ("down", "x" * 100, "hang", "down", "down", "ok")
    (trajectory,) = world.play(stage.task(tools_kwargs={"patient": {"create_kwargs": {"deeds": deeds}}}))
    counts = {
        name: trajectory.metrics[name]
        for name in ("num_tool_retries", "num_tool_timeouts", "num_tool_failures", "num_cut_outputs")
    }
    assert counts == {
        "num_tool_retries": 2,
        "num_tool_timeouts": 1,
        "num_tool_failures": 1,
        "num_cut_outputs": 1,
    }
    assert trajectory.metrics["num_tool_calls"] == 4
    assert "/home" not in stage.chat.decode(trajectory.token_ids.tolist())
