"""Spans: what an attempt waited for, with times, as parts of its trace. OpenTelemetry is not needed here."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.terminal_text import visible
from agentrl.tracking.conversation_text import shortened

Attribute = str | int | float | bool

ATTEMPT, REQUEST, PAUSE = "attempt", "request", "publish pause"
"""Names of the spans that are no scopes."""
MAX_TEXT_CHARS = 200
MAX_CONTENT_CHARS = 8_000
"""Of a conversation or an error's text, only with `tracking.spans.contents`."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace. Times are in nanoseconds since the epoch.

    parent_id: None for the attempt itself, the root of its trace. error: why it failed, None if it did not.
    """

    trace_id: int
    span_id: int
    parent_id: int | None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None


def new_trace_id() -> int:
    return secrets.randbits(128) or 1


def new_span_id() -> int:
    return secrets.randbits(64) or 1


def bounded(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Return the text as a span may carry it: short, in UTF-8, without control characters."""
    return shortened(visible(shortened(text, max_chars).encode(errors="replace").decode()), max_chars)
