"""A collector of OpenTelemetry's spans: it reads the real protobuf of OTLP over HTTP."""

import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class Received:
    """A span as it arrived; ids are hex, an empty `parent_id` means a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict
    resource: dict
    error: str | None


class Collector:
    """A receiver on this machine. Answers `status`; what arrived with another status than 200 is not kept."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []
        self._arrived = threading.Condition()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"collector": self})
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def traces(self) -> dict[str, list[Received]]:
        """The spans by their trace."""
        found = defaultdict(list)
        for span in self.spans:
            found[span.trace_id].append(span)
        return dict(found)

    def wait_for(self, count: int, timeout_s: float = 30) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.spans) >= count, timeout_s), len(self.spans)

    def receive(self, body: bytes, headers) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._arrived:
            self.headers.append(dict(headers))
            if self.status == 200:
                self.spans += [
                    _received(span, _values(batch.resource.attributes))
                    for batch in request.resource_spans
                    for scope in batch.scope_spans
                    for span in scope.spans
                ]
            self._arrived.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    collector: Collector

    def log_message(self, *args) -> None:
        return

    def do_POST(self) -> None:
        assert self.path == "/v1/traces", self.path
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.collector.receive(body, self.headers)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(self.collector.status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def _received(span, resource: dict) -> Received:
    return Received(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        resource,
        span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
    )


def _values(attributes: list[KeyValue]) -> dict:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue):
    return getattr(value, value.WhichOneof("value"))
