"""Spans as objects of OpenTelemetry, with the ids that they already have."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from agentrl.tracking.spans import REQUEST, Span


class SpanObjects:
    """Makes OpenTelemetry's spans. For one thread."""

    def __init__(self, resource: Resource) -> None:
        self._ids = _GivenIds()
        # Which attempts have a trace is decided already: the environment must not drop parts of them.
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._tracer = provider.get_tracer("agentrl")

    def of(self, span: Span) -> ReadableSpan:
        """Return the span, ended, as the exporter takes it."""
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        made = self._tracer.start_span(
            span.name,
            context=_context_of(span),
            kind=SpanKind.CLIENT if span.name == REQUEST else SpanKind.INTERNAL,
            start_time=span.start_ns,
            attributes=dict(span.attributes),
            record_exception=False,
        )
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(span.end_ns)
        assert isinstance(made, ReadableSpan), "every span is sampled"
        return made


class _GivenIds(IdGenerator):
    """Returns the ids of the span that is made."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


def _context_of(span: Span) -> Context:
    """Return a context in which the parent is the current span; an empty one for a root."""
    if span.parent_id is None:
        return Context()
    parent = SpanContext(
        span.trace_id, span.parent_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())
