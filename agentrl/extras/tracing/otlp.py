"""What a process needs to make traces: one export, and who makes spans of attempts and of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from agentrl.config.tracking import SpansConfig
from agentrl.extras.tracing.span_export import check_opentelemetry, open_export
from agentrl.extras.tracing.traced_client import RequestTracer
from agentrl.extras.tracing.traces import AttemptTracer
from agentrl.servers.server import Client
from agentrl.tracking.spans import Span
from agentrl.types import ServerPause


class OtlpTracing:
    """`agentrl.rollout.tracing.ProcessTracing`: spans go to `config.endpoint`.

    Raises:
        ConfigError: the packages of OpenTelemetry are not installed.
    """

    def __init__(self, config: SpansConfig, *, run: str) -> None:
        assert config.endpoint is not None, "nothing is traced without a collector"
        self.export = open_export(config.endpoint, run=run, max_queue=config.max_queue)
        self.attempts = AttemptTracer(self.export, config)
        self.requests = RequestTracer()

    check = staticmethod(check_opentelemetry)

    def connecting(self, connect: Callable[[str], Client]) -> Callable[[str], Client]:
        """Return a function that connects to servers with clients that record their requests."""
        return lambda url: self.requests.client(url, connect(url))

    def counters(self) -> dict[str, float]:
        """Return the spans sent, lost and left out so far. Thread-safe."""
        counts = self.export.counts
        return {
            "spans_sent": float(counts.sent),
            "spans_lost": float(counts.lost),
            "spans_left_out": float(counts.left_out),
        }

    def paused(self, pauses: Iterable[ServerPause]) -> None:
        self.requests.paused(pauses)

    def offer(self, spans: Sequence[Span]) -> None:
        self.export.offer(spans)

    def problem(self) -> str:
        return self.export.counts.problem

    def close(self) -> None:
        self.export.close()
