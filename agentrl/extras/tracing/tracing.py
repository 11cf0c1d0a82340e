"""What a process needs to make traces: one export, and who makes spans of attempts and of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.config.tracking import SpansConfig
from agentrl.extras.tracing.span_export import SpanExport, open_export
from agentrl.extras.tracing.traced_client import RequestTracer
from agentrl.extras.tracing.traces import AttemptTracer
from agentrl.servers.server import Client


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTracing:
    """The tracing of a process in which attempts are played."""

    export: SpanExport
    attempts: AttemptTracer
    requests: RequestTracer

    @classmethod
    def of(cls, config: SpansConfig, *, run: str) -> WorkerTracing | None:
        """Return None if `config` names no collector.

        Raises:
            ConfigError: the packages of OpenTelemetry are not installed.
        """
        if config.endpoint is None:
            return None
        export = open_export(config.endpoint, run=run, max_queue=config.max_queue)
        return cls(export, AttemptTracer(export, config), RequestTracer())

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
