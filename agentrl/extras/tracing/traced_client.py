"""Requests to servers as spans, and the pauses of their servers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.config.storage_urls import shown
from agentrl.errors import ServerError
from agentrl.extras.tracing.traces import Trace, TracedScope, current_scope
from agentrl.servers.protocol import Pulse
from agentrl.servers.server import Client
from agentrl.tracking.spans import PAUSE, REQUEST, Attribute, Span, bounded, new_span_id
from agentrl.types import Generation, SamplingParams, ServerPause

KEPT_REQUESTS = 4_096
"""Ended requests that a pause, which is known only when it is over, can still be added to."""


@dataclass(eq=False, slots=True)
class _Request:
    """A request to a server, in nanoseconds since the epoch; `end_ns` None: it runs."""

    url: str
    trace: Trace
    parent_id: int
    start_ns: int
    end_ns: int | None = None


class RequestTracer:
    """Knows the traced requests of a process, running and recent ones."""

    def __init__(self) -> None:
        self._running: dict[_Request, None] = {}
        self._ended: deque[_Request] = deque(maxlen=KEPT_REQUESTS)

    def client(self, url: str, inner: Client) -> Client:
        """Return a client that records each request of an attempt with a trace."""
        return _TracedClient(url.rstrip("/"), inner, self)

    def paused(self, pauses: Iterable[ServerPause]) -> None:
        """Add to each generation during which its server was paused a span of that time."""
        requests = [*self._ended, *self._running]
        now_ns = time.time_ns()
        for pause in pauses:
            inside: dict[int, tuple[Trace, int, int]] = {}  # by the generation
            for request in requests:
                start = max(request.start_ns, pause.start_ns)
                end = min(request.end_ns or now_ns, pause.end_ns)
                if request.url == pause.url.rstrip("/") and start < end:
                    _, first, last = inside.get(request.parent_id, (None, start, end))
                    inside[request.parent_id] = (request.trace, min(first, start), max(last, end))
            for parent_id, (trace, start, end) in inside.items():
                trace.add(Span(trace.trace_id, new_span_id(), parent_id, PAUSE, start, end))

    def begin(self, url: str, scope: TracedScope) -> _Request:
        request = _Request(url, scope.trace, scope.span_id, scope.trace.ns(scope.now()))
        self._running[request] = None
        return request

    def end(self, request: _Request, scope: TracedScope) -> None:
        request.end_ns = scope.trace.ns(scope.now())
        del self._running[request]
        self._ended.append(request)


class _TracedClient:
    def __init__(self, url: str, inner: Client, tracer: RequestTracer) -> None:
        self._url = url
        self._inner = inner
        self._tracer = tracer

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation:
        scope = current_scope()
        if scope is None:  # a probe, or an attempt without a trace
            return await self._inner.generate(input_ids, params, rid=rid)
        attributes: dict[str, Attribute] = {
            "url.full": bounded(shown(self._url)),
            "gen_ai.usage.input_tokens": len(input_ids),
        }
        since, request = scope.now(), self._tracer.begin(self._url, scope)
        error: str | None = "cancelled"
        try:
            generation = await self._inner.generate(input_ids, params, rid=rid)
            attributes |= _sampled(generation)
            error = None
            return generation
        except ServerError as failure:
            error = type(failure).__name__
            raise
        finally:
            self._tracer.end(request, scope)
            scope.record(REQUEST, since, attributes=attributes, error=error)

    async def abort(self, rid: str) -> None:
        await self._inner.abort(rid)

    async def settle_aborts(self) -> None:
        await self._inner.settle_aborts()

    async def serves(self, version: int) -> bool:
        return await self._inner.serves(version)

    async def pulse(self) -> Pulse:
        return await self._inner.pulse()

    async def aclose(self) -> None:
        await self._inner.aclose()


def _sampled(generation: Generation) -> dict[str, Attribute]:
    return {
        "gen_ai.usage.output_tokens": len(generation.token_ids),
        "gen_ai.response.finish_reason": generation.finish_reason,
        "agentrl.cached_tokens": generation.num_cached_tokens,
        "agentrl.retractions": generation.num_retractions,
    }
