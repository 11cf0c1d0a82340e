"""Sends spans to a collector by OTLP over HTTP, from a thread of its own. It neither blocks nor fails."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.errors import ConfigError
from agentrl.tracking.spans import Span

MAX_BATCH = 512
"""Spans per request."""
GATHER_S = 1.0
"""Longest wait for a full batch."""
CLOSE_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 2.0
"""Time that a send has to give up when it is told to."""
_PATH = "/v1/traces"
_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Spans so far. sent: the collector took them. lost: it did not. left_out: the queue was full.

    problem: why spans were lost most recently; "" if none were.
    """

    sent: int
    lost: int
    left_out: int
    problem: str = ""


class Sender(Protocol):
    """Sends spans."""

    def send(self, spans: Sequence[Span]) -> str:
        """Return "" when they were taken, else why not."""

    def stop(self) -> None:
        """End a `send` that waits before it tries again."""


class SpanExport:
    """A bounded queue of spans, and the thread that empties it."""

    def __init__(self, sender: Sender, *, max_queue: int) -> None:
        self._sender = sender
        self._max_queue = max_queue
        self._waiting: deque[Span] = deque()
        self._filled = threading.Condition()
        self._is_closing = False
        self._sent = self._lost = self._left_out = 0
        self._problem = ""
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    def offer(self, spans: Sequence[Span]) -> None:
        """Queue all of `spans`, or none if the queue has no room for them. Returns at once."""
        with self._filled:
            if len(self._waiting) + len(spans) > self._max_queue:
                self._left_out += len(spans)
                return
            self._waiting.extend(spans)
            if len(self._waiting) >= MAX_BATCH:
                self._filled.notify()

    @property
    def counts(self) -> SpanCounts:
        """Thread-safe."""
        with self._filled:
            return SpanCounts(self._sent, self._lost, self._left_out, self._problem)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is queued, within `timeout_s`."""
        with self._filled:
            self._is_closing = True
            self._filled.notify()
        self._thread.join(timeout_s)
        with self._filled:
            self._lost += len(self._waiting)
            self._waiting.clear()
        self._sender.stop()
        self._thread.join(STOP_TIMEOUT_S)  # what was being sent is counted, too

    def _work(self) -> None:
        while batch := self._next_batch():
            problem = self._sender.send(batch)
            with self._filled:
                if problem:
                    self._lost += len(batch)
                    self._problem = problem
                else:
                    self._sent += len(batch)

    def _next_batch(self) -> list[Span]:
        """Wait for a batch that is full or has waited long enough; [] when all is sent at the end."""
        with self._filled:
            while not self._is_closing and len(self._waiting) < MAX_BATCH:
                if not self._filled.wait(GATHER_S) and self._waiting:
                    break
            return [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]


def open_export(endpoint: str, *, run: str, max_queue: int) -> SpanExport:
    """Return an export to the collector at `endpoint`. Nothing is sent yet, so the collector may be down.

    Raises:
        ConfigError: the packages of OpenTelemetry are not installed.
    """
    return SpanExport(OTLPSender(endpoint, run=run), max_queue=max_queue)


def check_opentelemetry() -> None:
    """Raise ConfigError if the packages of OpenTelemetry are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as missing:
        raise ConfigError(
            f"tracking.spans.endpoint needs OpenTelemetry ({missing}): pip install 'agentrl[otel]'"
        ) from missing


class OTLPSender:
    """OpenTelemetry's own exporter. Headers, such as a key, come from OTEL_EXPORTER_OTLP_HEADERS.

    The exporter tries again for OTEL_EXPORTER_OTLP_TIMEOUT (10 s) if a collector is busy or not there.
    """

    def __init__(self, endpoint: str, *, run: str) -> None:
        check_opentelemetry()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        from agentrl.extras.tracing.span_objects import SpanObjects

        url = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._said = _FirstMessage()
        logging.getLogger(_LOGGER).addFilter(self._said)
        self._objects = SpanObjects(Resource.create({"service.name": "agentrl", "agentrl.run": run}))

    def send(self, spans: Sequence[Span]) -> str:
        self._said.text = ""
        try:
            result = self._exporter.export([self._objects.of(span) for span in spans])
        except Exception as error:  # noqa: BLE001 - boundary: a third party's client may raise anything
            return f"{type(error).__name__}: {error}"
        return "" if result.name == "SUCCESS" else self._said.text or "the collector did not take them"

    def stop(self) -> None:
        self._exporter.shutdown()
        logging.getLogger(_LOGGER).removeFilter(self._said)


class _FirstMessage(logging.Filter):
    """Keeps what the exporter would log first: its later messages say only that it gave up."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage().partition("\n")[0].partition(" encountered while exporting")[0]
        self.text = self.text or said[:300]
        return False
