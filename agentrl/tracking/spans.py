"""Spans: what an attempt waited for, with times, as parts of its trace. OpenTelemetry is not needed here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.terminal_text import visible
from agentrl.tracking.conversation_text import shortened

Attribute = str | int | float | bool

ATTEMPT, REQUEST, PAUSE = "attempt", "request", "publish pause"
GROUP_REWARD, BATCH_REWARD = "group reward", "batch reward"
"""Names of the spans that are no scopes."""
MAX_TEXT_CHARS = 200
MAX_CONTENT_CHARS = 8_000
"""Of a conversation or an error's text, only with `tracking.spans.contents`."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace. Times are in nanoseconds since the epoch.

    parent_id: None for the root of the trace, such as the attempt itself. error: why it failed, None if it
        did not.
    """

    trace_id: int
    span_id: int
    parent_id: int | None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None


class TracedBlock:
    """A context manager whose block becomes a trace of one span. It is offered when the block ends."""

    def __init__(
        self, name: str, attributes: Mapping[str, Attribute], offer: Callable[[Sequence[Span]], None]
    ) -> None:
        self._name = name
        self._attributes = attributes
        self._offer = offer

    def __enter__(self) -> None:
        self._start_ns, self._started = time.time_ns(), time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end_ns = self._start_ns + round((time.monotonic() - self._started) * 1e9)
        error = None if kind is None else kind.__name__
        ids = new_trace_id(), new_span_id(), None
        self._offer([Span(*ids, self._name, self._start_ns, end_ns, self._attributes, error)])


def new_trace_id() -> int:
    return secrets.randbits(128) or 1


def new_span_id() -> int:
    return secrets.randbits(64) or 1


def bounded(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Return the text as a span may carry it: short, in UTF-8, without control characters."""
    return shortened(visible(shortened(text, max_chars).encode(errors="replace").decode()), max_chars)
