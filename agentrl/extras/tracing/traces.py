"""Traces: the scopes of an attempt, recorded as spans when they close. Nothing here runs without
`tracking.spans.endpoint`: attempts then have plain scopes.

```
attempt                        outcome, reward, tokens, versions
├─ queue for a slot
├─ generate                    turn, its tokens and versions
│  ├─ request                  one to a server: URL, tokens, why it ended
│  └─ publish pause            its server was paused for new weights
├─ tool search
├─ interaction gsm8k
├─ close tools and partner
└─ reward
```

Rewards that compare a group are a trace of their own: `group reward`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Protocol

import numpy as np

from agentrl.config.tracking import SpansConfig
from agentrl.rollout.group_player import PlayLog
from agentrl.rollout.outcomes import Retry
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.scopes import GENERATE, Scope
from agentrl.tracking.attempts import Became
from agentrl.tracking.conversation_text import message_lines
from agentrl.tracking.spans import (
    ATTEMPT,
    GROUP_REWARD,
    MAX_CONTENT_CHARS,
    Attribute,
    Span,
    TracedBlock,
    bounded,
    new_span_id,
    new_trace_id,
)
from agentrl.types import SCORED_OUTCOMES, Lease, Trajectory

MAX_SPANS = 2_000
"""Per attempt. Further ones are counted in the attempt's span."""

_current: ContextVar[TracedScope | None] = ContextVar("agentrl_traced_scope", default=None)


class SpanSink(Protocol):
    """Takes finished spans, and never blocks: `agentrl.extras.tracing.span_export.SpanExport`."""

    def offer(self, spans: Sequence[Span]) -> None: ...


def current_scope() -> TracedScope | None:
    """Return the innermost open scope of this task if its attempt has a trace."""
    return _current.get()


class Trace:
    """The spans of one attempt, until it is over."""

    def __init__(self, sink: SpanSink, *, now: float) -> None:
        self.trace_id = new_trace_id()
        self.spans: list[Span] = []
        self._sink = sink
        self._num_left_out = 0
        self._is_over = False
        # One reading for the whole trace: a clock that is set meanwhile does not tear its parts apart.
        self._began_ns = time.time_ns()
        self._began = now

    def ns(self, time_s: float) -> int:
        """Return a time of the scopes' clock as nanoseconds since the epoch."""
        return self._began_ns + round((time_s - self._began) * 1e9)

    def add(self, span: Span) -> None:
        """Add a part. It goes with the whole trace, or at once if that has gone."""
        if self._is_over:
            self._sink.offer([span])
        elif len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self._num_left_out += 1

    def finish(self, root: Span) -> None:
        """Hand over the trace with its root."""
        self._is_over = True
        left_out = {"agentrl.spans_left_out": self._num_left_out} if self._num_left_out else {}
        whole = replace(root, attributes={**root.attributes, **left_out})
        self._sink.offer([*self.spans, whole])
        self.spans = []


class TracedScope(Scope):
    """A scope of an attempt with a trace: it becomes a span when it closes."""

    __slots__ = ("_before", "span_id", "trace")

    trace: Trace

    def open(self, name: str, *, doing: str = "", key: str = "") -> TracedScope:
        inner = TracedScope(name, outer=self, doing=doing, key=key, clock=self._clock)
        inner.trace = self.trace
        return inner

    def __enter__(self) -> TracedScope:
        super().__enter__()
        self.span_id = new_span_id()
        self._before = _current.get()
        _current.set(self)
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        _current.set(self._before)
        assert isinstance(self._outer, TracedScope), "a part of an attempt"
        self.record(
            bounded(self.name),
            self.since,
            parent_id=self._outer.span_id,
            span_id=self.span_id,
            attributes=_tool_attributes(self.name),
            error=_kind_of(raised),
        )

    def record(
        self,
        name: str,
        since: float,
        *,
        parent_id: int | None = None,
        span_id: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        error: str | None = None,
    ) -> None:
        """Add a span from `since` until now to the trace; by default inside this scope."""
        trace = self.trace
        trace.add(
            Span(
                trace.trace_id,
                new_span_id() if span_id is None else span_id,
                self.span_id if parent_id is None else parent_id,
                name,
                trace.ns(since),
                trace.ns(self._clock()),
                attributes or {},
                error,
            )
        )

    def now(self) -> float:
        """Return the time on the clock of the scopes."""
        return self._clock()


class TracedAttempt(TracedScope):
    """The scope of an attempt. Each time that it is attached, for a retry, it begins another trace."""

    __slots__ = ("_end", "_sink", "_tries")

    def __init__(self, sink: SpanSink) -> None:
        super().__init__()
        self._sink = sink
        self._tries = 0

    def attach(self, outer: Scope, name: str, *, doing: str = "", key: str = "") -> Scope:
        super().attach(outer, name, doing=doing, key=key)
        self.trace = Trace(self._sink, now=self.since)
        self._tries += 1
        return self

    def __exit__(self, *raised: object) -> None:
        Scope.__exit__(self)
        _current.set(self._before)
        self._end = self._clock()
        # Its group was dropped or withdrawn, or the run ends: nobody will tell the outcome.
        if (kind := _kind_of(raised)) is not None:
            self.finish({"agentrl.outcome": "cancelled"}, error=kind)

    def finish(self, attributes: Mapping[str, Attribute], *, error: str | None) -> None:
        """Hand over the trace of the attempt, which is over."""
        trace = self.trace
        own = {**attributes, "agentrl.try": self._tries}
        start_ns, end_ns = trace.ns(self.since), trace.ns(self._end)
        trace.finish(Span(trace.trace_id, self.span_id, None, ATTEMPT, start_ns, end_ns, own, error))


class AttemptTracer:
    """Decides which attempts have a trace, and completes the traces of those that ended."""

    def __init__(
        self, sink: SpanSink, config: SpansConfig, *, draw: Callable[[], float] = random.random
    ) -> None:
        self._sink = sink
        self._config = config
        self._draw = draw

    def of(self, kind: str) -> GroupTracing:
        """Return what traces groups of a kind: `training`, `validation` or `evaluation`."""
        return GroupTracing(self._sink, kind, lambda: self._draw() < self._config.share)

    def log(self, inner: PlayLog, kind: str) -> PlayLog:
        """Return a log that also completes traces. kind: as of `of`."""
        return _TracingLog(inner, kind, with_contents=self._config.contents)


class GroupTracing:
    """Implements `agentrl.rollout.group_player.Tracing`. is_drawn: decides about each trace."""

    def __init__(self, sink: SpanSink, kind: str, is_drawn: Callable[[], bool]) -> None:
        self._sink = sink
        self._kind = kind
        self._is_drawn = is_drawn

    def scope(self) -> Scope:
        return TracedAttempt(self._sink) if self._is_drawn() else Scope()

    def scoring(self, lease: Lease, num_members: int) -> AbstractContextManager[object]:
        if not self._is_drawn():
            return nullcontext()
        attributes: dict[str, Attribute] = {
            "agentrl.kind": self._kind,
            "agentrl.group": lease.group_id,
            "agentrl.task": bounded(lease.task.task_id),
            "agentrl.data_source": bounded(lease.task.data_source),
            "agentrl.members": num_members,
        }
        return TracedBlock(GROUP_REWARD, attributes, self._sink.offer)


class _TracingLog:
    def __init__(self, inner: PlayLog, kind: str, *, with_contents: bool) -> None:
        self._inner = inner
        self._kind = kind
        self._with_contents = with_contents

    def tried(self, lease: Lease, attempt: Attempt, trajectory: Trajectory, retry: Retry | None) -> None:
        if isinstance(scope := attempt.scope, TracedAttempt):
            scope.trace.spans[:] = _with_turns(scope.trace.spans, trajectory)
            attributes = {
                "agentrl.kind": self._kind,
                "agentrl.policy_version": lease.version,
                **({} if retry is None else {"agentrl.became": retry.how}),
                **attributes_of(trajectory, with_contents=self._with_contents),
            }
            is_scored = trajectory.outcome in SCORED_OUTCOMES
            scope.finish(attributes, error=None if is_scored else trajectory.outcome.value)
        self._inner.tried(lease, attempt, trajectory, retry)

    def ended(self, lease: Lease, trajectory: Trajectory, became: Became | None) -> None:
        self._inner.ended(lease, trajectory, became)


def attributes_of(trajectory: Trajectory, *, with_contents: bool) -> dict[str, Attribute]:
    """Return what the span of an attempt says of it: names and numbers, and with contents also texts."""
    t = trajectory
    found: dict[str, Attribute] = {
        "agentrl.group": t.group_id,
        "agentrl.member": t.member,
        "agentrl.task": bounded(t.task_id),
        "agentrl.data_source": bounded(t.data_source),
        "agentrl.agent": bounded(t.agent_name),
        "agentrl.outcome": t.outcome.value,
        "agentrl.is_greedy": t.is_greedy,
        "agentrl.tokens": t.num_tokens,
        "gen_ai.usage.output_tokens": t.num_action_tokens,
        "agentrl.turns": int(t.turn_ids.max(initial=-1)) + 1,
        **_versions(t.versions[t.action_mask]),
    }
    if t.outcome in SCORED_OUTCOMES:
        found["agentrl.reward"] = float(t.reward)
    if t.failure is not None:
        plugin = t.failure.plugin
        found["error.type"] = bounded(t.failure.error or t.outcome.value)
        found["agentrl.failed_plugin"] = "" if plugin is None else bounded(f"{plugin.kind} {plugin.name}")
    if with_contents:
        conversation = "\n".join(line for message in t.messages for line in message_lines(message))
        found["agentrl.conversation"] = bounded(conversation, MAX_CONTENT_CHARS)
        if t.failure is not None:
            found["agentrl.failure"] = bounded(t.failure.text, MAX_CONTENT_CHARS)
    return found


def _with_turns(spans: Sequence[Span], trajectory: Trajectory) -> Iterator[Span]:
    """Yield the spans; each generation also says which turn it sampled, its tokens and their versions.

    A turn is recorded right before its scope closes, so generations that succeeded are in the order of turns.
    """
    turns = iter(range(int(trajectory.turn_ids.max(initial=-1)) + 1))
    for span in spans:
        turn = next(turns, None) if span.name == GENERATE and span.error is None else None
        if turn is None:
            yield span
            continue
        sampled = trajectory.turn_ids == turn
        own = {
            "agentrl.turn": turn,
            "gen_ai.usage.output_tokens": int(sampled.sum()),
            **_versions(trajectory.versions[sampled]),
        }
        yield replace(span, attributes=own)


def _kind_of(raised: Sequence[object]) -> str | None:
    """Return the name of the exception that left a block, from the arguments of `__exit__`."""
    kind = raised[0] if raised else None
    return kind.__name__ if isinstance(kind, type) else None


def _versions(versions: np.ndarray) -> dict[str, Attribute]:
    if not len(versions):
        return {}
    return {"agentrl.min_version": int(versions.min()), "agentrl.max_version": int(versions.max())}


def _tool_attributes(name: str) -> Mapping[str, Attribute]:
    kind, _, plugin = name.partition(" ")
    return {"gen_ai.tool.name": bounded(plugin)} if kind == "tool" else {}
