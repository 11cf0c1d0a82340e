"""Traces of attempts: trees of spans that obey their laws, say what happened, and carry no text unasked."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.tracking import SpansConfig
from agentrl.extras.tracing import traces
from agentrl.extras.tracing.traced_client import RequestTracer
from agentrl.extras.tracing.traces import AttemptTracer, TracedAttempt
from agentrl.plugins import GroupReward, RewardResult, Tool, ToolResult
from agentrl.rollout.scopes import GENERATE, Scope
from agentrl.servers.router import Router
from agentrl.tracking.spans import ATTEMPT, GROUP_REWARD, MAX_CONTENT_CHARS, PAUSE, REQUEST
from agentrl.types import Outcome, ServerPause
from parts.span_trees import check_tree, overlaps

SECRET = "the-answer-is-secret"


class Sink:
    """Keeps finished traces."""

    def __init__(self) -> None:
        self.spans = []

    def offer(self, spans) -> None:
        self.spans += spans

    @property
    def traces(self) -> list[list]:
        by_trace = {}
        for span in self.spans:
            by_trace.setdefault(span.trace_id, []).append(span)
        return list(by_trace.values())


class Ask(Tool):
    """Answers, or is broken, as its argument says."""

    runtime = "trio"
    name = "ask"
    description = "Asks."
    parameters = {  # noqa: RUF012
        "type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"],
    }  # fmt: skip

    async def call(self, arguments):
        if arguments["what"] == "break":
            raise KeyError(SECRET)
        return ToolResult("42")


def traced(stage, script, *, share=1.0, contents=False, **options):
    """Return a world whose attempts have traces, and where they go."""
    sink = Sink()
    config = SpansConfig(endpoint="http://unused:1", share=share, contents=contents)
    world = stage.World(script, plugins=[Ask], tracer=AttemptTracer(sink, config), **options)
    world.requests = RequestTracer()
    world.router = Router(lambda url: world.requests.client(url, world.client), context_tokens=1024)
    return world, sink


def calls(*arguments: str) -> str:
    return "".join(
        f'<tool_call>{{"name": "ask", "arguments": {{"what": "{what}"}}}}</tool_call>' for what in arguments
    )


AGENT = {"tools": ("ask",), "max_tool_calls_per_turn": 3}


def test_the_trace_of_an_attempt_says_what_it_waited_for(stage):
    world, sink = traced(stage, lambda turn, _: (calls("a"), calls("b", "c"), "#### 42")[turn], agent=AGENT)
    played = world.play(stage.task(), stage.task(), n=2)
    assert len(sink.traces) == len(played) == 4
    for trajectory, spans in zip(played, sorted(sink.traces, key=_place), strict=True):
        root = check_tree(spans)
        assert root.name == ATTEMPT
        counts = Counter(span.name for span in spans)
        assert counts == {
            ATTEMPT: 1, GENERATE: 3, REQUEST: 3, "tool ask": 3, "reward": 1, **_optional(counts)
        }  # fmt: skip
        assert root.error is None
        said = root.attributes
        assert said["agentrl.outcome"] == trajectory.outcome.value == "completed"
        assert said["agentrl.reward"] == trajectory.reward
        assert (said["agentrl.turns"], said["agentrl.try"], said["agentrl.kind"]) == (3, 1, "validation")
        assert said["gen_ai.usage.output_tokens"] == trajectory.num_action_tokens
        generated = [span.attributes for span in spans if span.name == GENERATE]
        assert [one["agentrl.turn"] for one in generated] == [0, 1, 2]
        assert sum(one["gen_ai.usage.output_tokens"] for one in generated) == trajectory.num_action_tokens
        requests = [span for span in spans if span.name == REQUEST]
        inside = [span.span_id for span in spans if span.name == GENERATE]
        assert [request.parent_id for request in requests] == inside
        assert [r.attributes["gen_ai.usage.output_tokens"] for r in requests] == [
            one["gen_ai.usage.output_tokens"] for one in generated
        ]


def _place(spans) -> tuple[int, int]:
    said = next(span for span in spans if span.parent_id is None).attributes
    return said["agentrl.group"], said["agentrl.member"]


def _optional(counts) -> dict[str, int]:
    return {name: counts[name] for name in ("queue for a slot", "close tools and partner") if name in counts}


@pytest.mark.parametrize("contents", [False, True])
def test_no_text_of_a_conversation_or_an_error_leaves_unless_asked_for(stage, contents):
    script = [calls("break"), "unreached"]
    world, sink = traced(stage, lambda turn, _: script[turn], agent=AGENT, contents=contents)
    long = SECRET + "x" * 2 * MAX_CONTENT_CHARS
    task = stage.task("What? " + SECRET)
    (played,) = world.play(task)
    assert played.outcome is Outcome.TOOL_ERROR
    (spans,) = sink.traces
    root = check_tree(spans)
    assert (root.error, root.attributes["error.type"]) == ("tool_error", "KeyError")
    assert root.attributes["agentrl.failed_plugin"] == "tool ask"
    assert [span.error for span in spans if span.name == "tool ask"] == ["ToolError"]
    text = repr(spans)
    assert (SECRET in text) == contents
    if contents:
        assert SECRET in root.attributes["agentrl.conversation"]
        assert SECRET in root.attributes["agentrl.failure"]
        message = SimpleNamespace(role="user", content=long, reasoning="", tool_calls=())
        said = traces.attributes_of(played.replace(messages=(message,)), with_contents=True)
        assert len(said["agentrl.conversation"]) <= MAX_CONTENT_CHARS


class Best(GroupReward):
    """Compares the members of a group, or cannot."""

    name = "best"
    runs_in = "inline"

    def score(self, attempts):
        if attempts[0].task.ground_truth == "none":
            raise KeyError(SECRET)
        return [RewardResult(float(place == 0)) for place, _ in enumerate(attempts)]


@pytest.mark.parametrize(("truth", "error"), [("42", None), ("none", "RewardError")])
def test_rewards_that_compare_a_group_are_a_trace_of_their_own(stage, truth, error):
    sink = Sink()
    tracer = AttemptTracer(sink, SpansConfig(endpoint="http://unused:1"))
    world = stage.World(
        lambda *_: "#### 42", plugins=[Best], tracer=tracer, reward={"sources": {"sums": "best"}}
    )
    world.play(stage.task(truth=truth), n=3)
    [span] = [span for span in sink.spans if span.name == GROUP_REWARD]
    assert (span.parent_id, span.error) == (None, error)
    said = {name: span.attributes[f"agentrl.{name}"] for name in ("kind", "group", "members", "data_source")}
    assert said == {"kind": "validation", "group": 0, "members": 3, "data_source": "sums"}
    assert SECRET not in repr(span)
    assert sum(root.name == ATTEMPT for root in map(check_tree, sink.traces)) == 3


def test_a_retried_attempt_has_a_trace_per_try(stage):
    world, sink = traced(
        stage,
        lambda *_: calls("break"),
        agent=AGENT,
        rollout={"on_outcome": {"tool_error": "retry"}, "max_retries": 2},
    )
    source = SimpleNamespace(leases=world.leases([stage.task()], 1))

    async def main(manager):
        async def lease(limit):
            if not source.leases:
                await trio.sleep_forever()
            taken, source.leases = source.leases, []
            return taken

        async def drop_group(group_id, reason):
            nursery.cancel_scope.cancel()

        source.lease, source.withdrawn = lease, lambda: trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.run, source, SimpleNamespace(drop_group=drop_group))

    world.run(main)
    roots = [check_tree(spans) for spans in sink.traces]
    assert [root.attributes["agentrl.try"] for root in roots] == [1, 2, 3]
    assert [root.attributes.get("agentrl.became") for root in roots] == ["retried", "retried", None]
    assert {root.attributes["agentrl.kind"] for root in roots} == {"training"}


def test_an_attempt_that_is_cancelled_still_has_its_trace(stage):
    world, sink = traced(stage, lambda *_: "never", latency_s=float("inf"))

    async def main(manager):
        return await manager.play(world.leases([stage.task()], 1), world.rollout, timeout_s=5)

    (late,) = world.run(main)
    assert late.outcome is Outcome.TIMEOUT
    (spans,) = sink.traces
    root = check_tree(spans)
    assert (root.attributes["agentrl.outcome"], root.error) == ("cancelled", "Cancelled")
    assert {span.name for span in spans} == {ATTEMPT, GENERATE, REQUEST}
    assert {span.error for span in spans if span.name == REQUEST} == {"cancelled"}


def test_without_a_collector_attempts_have_plain_scopes(stage, monkeypatch):
    made = []
    monkeypatch.setattr(Scope, "attach", _noting(made, Scope.attach))
    world = stage.World(lambda *_: "#### 42")
    world.play(stage.task())
    assert [type(scope) for scope in made] == [Scope]


def _noting(made, attach):
    def noted(self, *arguments, **options):
        made.append(self)
        return attach(self, *arguments, **options)

    return noted


def test_a_share_of_the_attempts_has_traces(stage):
    draws = itertools.cycle([0.1, 0.9])
    sink = Sink()
    tracer = AttemptTracer(sink, SpansConfig(share=0.5), draw=lambda: next(draws))
    world = stage.World(lambda *_: "#### 42", tracer=tracer)
    world.play(stage.task(), n=6)
    assert sorted(map(_place, sink.traces)) == [(0, 0), (0, 2), (0, 4)]


# ------------------------------------------------------------------------------------------------------- laws

PARTS = st.recursive(
    st.floats(0, 10), lambda inner: st.lists(inner, max_size=4), max_leaves=12
)  # a wait in seconds, or a scope with parts


@given(st.lists(st.lists(PARTS, max_size=4), min_size=1, max_size=4), st.floats(0, 1e6))
def test_parts_lie_inside_the_attempt_and_do_not_exceed_it(tries, began):
    """Parts that follow each other: their sum is at most the whole, to the nanosecond."""
    now = [began]
    sink, root = Sink(), Scope(clock=lambda: now[0])
    attempt = TracedAttempt(sink)

    def enter(scope, parts) -> None:
        for part in parts:
            if isinstance(part, float):
                now[0] += part
            else:
                with scope.open("part") as inner:
                    enter(inner, part)

    for number, parts in enumerate(tries, start=1):
        with attempt.attach(root, "title", key="k"):
            enter(attempt, parts)
        now[0] += 1.0
        attempt.finish({"number": number}, error=None)
    assert len(sink.traces) == len(tries)
    for number, spans in enumerate(sink.traces, start=1):
        whole = check_tree(spans)
        assert whole.attributes["number"] == whole.attributes["agentrl.try"] == number
        for parent in spans:
            inner = [span for span in spans if span.parent_id == parent.span_id]
            assert not overlaps(inner)
            assert sum(one.end_ns - one.start_ns for one in inner) <= parent.end_ns - parent.start_ns
    assert traces.current_scope() is None


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=6))
def test_parts_side_by_side_lie_inside_too(times):
    """Tools of one turn run at once: (start, duration) of each."""
    now = [0.0]
    sink, root = Sink(), Scope(clock=lambda: now[0])
    attempt = TracedAttempt(sink)
    with attempt.attach(root, "title", key="k"):
        events = sorted(
            [(start, 0, n) for n, (start, _) in enumerate(times)]
            + [(start + length, 1, n) for n, (start, length) in enumerate(times)]
        )
        scopes = {}
        for at, is_end, n in events:
            now[0] = at
            if is_end:
                scopes[n].__exit__(None, None, None)
            else:
                scopes[n] = attempt.open(f"tool {n}").__enter__()
    attempt.finish({}, error=None)
    (spans,) = sink.traces
    check_tree(spans)
    assert len(spans) == len(times) + 1


SECONDS = st.integers(0, 80).map(lambda quarters: quarters / 4)
QUARTER = 250_000_000


@given(
    st.lists(st.tuples(st.sampled_from("ab"), SECONDS, SECONDS), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from("ab"), SECONDS, SECONDS), max_size=4),
)
def test_a_pause_lies_in_the_generations_of_its_server_that_it_held_up(requests, pauses):
    """(server, seconds before the request, its duration); (server, start, duration) of the pauses."""
    epoch, now = int(time.time()) - 1000, [0.0]
    sink, root = Sink(), Scope(clock=lambda: now[0])
    attempt, tracer = TracedAttempt(sink), RequestTracer()
    made = []
    with attempt.attach(root, "title", key="k"):
        attempt.trace._began_ns = epoch * 1_000_000_000
        for server, pause_s, length in requests:
            now[0] += pause_s
            with attempt.open(GENERATE) as scope:
                request, start = tracer.begin(server, scope), now[0]
                now[0] += length
                tracer.end(request, scope)
                made.append((server, scope.span_id, start, now[0]))
    attempt.finish({}, error=None)
    tracer.paused(
        ServerPause(server, round((epoch + start) * 4) * QUARTER, round((epoch + start + s) * 4) * QUARTER)
        for server, start, s in pauses
    )
    (spans,) = sink.traces
    check_tree(spans)
    held = [
        (span_id, (min(end, paused_at + length) - max(start, paused_at)) * 1_000_000_000)
        for server, span_id, start, end in made
        for url, paused_at, length in pauses
        if url == server
    ]
    found = sorted((span.parent_id, span.end_ns - span.start_ns) for span in spans if span.name == PAUSE)
    assert found == sorted((span_id, ns) for span_id, ns in held if ns > 0)


def test_an_attempt_with_very_many_parts_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(traces, "MAX_SPANS", 5)
    sink, root = Sink(), Scope()
    attempt = TracedAttempt(sink)
    with attempt.attach(root, "title", key="k"):
        for _ in range(8):
            with attempt.open("tool x"):
                pass
    attempt.finish({}, error=None)
    (spans,) = sink.traces
    assert len(spans) == 6
    assert (
        check_tree(spans, is_root=lambda span: span.parent_id is None).attributes["agentrl.spans_left_out"]
        == 3
    )
