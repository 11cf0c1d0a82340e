"""Spans on their way to a collector: a real one gets all; one that is not there costs a run nothing."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema import Config
from agentrl.config.tracking import SpansConfig
from agentrl.errors import ConfigError
from agentrl.extras.tracing.span_export import MAX_BATCH, SpanExport, check_opentelemetry, open_export
from agentrl.extras.tracing.span_loss import SpanLoss
from agentrl.ports import ReservedPort
from agentrl.tracking.spans import MAX_TEXT_CHARS, Span, bounded, new_span_id, new_trace_id
from parts.collector import Collector
from parts.span_trees import check_tree

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND


def trace(num_parts: int = 2) -> list[Span]:
    """An attempt of `num_parts` seconds, its parts first."""
    trace_id, root_id = new_trace_id(), new_span_id()
    parts = [
        Span(
            trace_id, new_span_id(), root_id, f"tool {n}", NOW + n * SECOND, NOW + (n + 1) * SECOND, {"n": n}
        )
        for n in range(num_parts)
    ]
    attributes = {"reward": 0.5, "outcome": "timeout", "is_greedy": True}
    return [
        *parts,
        Span(trace_id, root_id, None, "attempt", NOW, NOW + num_parts * SECOND, attributes, "timeout"),
    ]


@pytest.fixture
def collector():
    with Collector() as running:
        yield running


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")


def test_a_collector_receives_every_span_as_it_was(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=open-sesame")
    export = open_export(collector.url + "/", run="p/e", max_queue=10_000)
    made = [trace(3) for _ in range(200)]
    for one in made:
        export.offer(one)
    export.close(timeout_s=30)
    assert (export.counts.sent, export.counts.lost, export.counts.left_out) == (800, 0, 0)
    assert collector.traces.keys() == {f"{one[0].trace_id:032x}" for one in made}
    assert all(headers["x-key"] == "open-sesame" for headers in collector.headers)
    for one in made:
        received = {span.span_id: span for span in collector.traces[f"{one[0].trace_id:032x}"]}
        check_tree(received.values())
        for span in one:
            got = received[f"{span.span_id:016x}"]
            assert got.parent_id == ("" if span.parent_id is None else f"{span.parent_id:016x}")
            assert (got.name, got.start_ns, got.end_ns) == (span.name, span.start_ns, span.end_ns)
            assert (got.attributes, got.error) == (span.attributes, span.error)
            assert got.resource["service.name"] == "agentrl"
            assert got.resource["agentrl.run"] == "p/e"


@pytest.mark.parametrize("status", [400, 401, 404, 503])
def test_spans_that_a_collector_refuses_are_counted_with_the_reason(collector, status, caplog):
    collector.status = status
    export = open_export(collector.url, run="p/e", max_queue=100)
    export.offer(trace())
    export.close(timeout_s=30)
    counts = export.counts
    assert (counts.sent, counts.lost, counts.left_out) == (0, 3, 0)
    assert counts.problem
    assert collector.headers, "it was asked"
    assert not caplog.records, "the run says it, once"


def test_a_collector_that_is_not_there_costs_nothing_but_its_spans(caplog):
    with ReservedPort() as port:
        export = open_export(f"http://127.0.0.1:{port.number}", run="p/e", max_queue=100)
        for _ in range(5):
            export.offer(trace())
        export.close(timeout_s=30)
    assert (export.counts.sent, export.counts.lost) == (0, 15)
    assert export.counts.problem
    assert not caplog.records


class Slow:
    """A sender that holds every batch until `go` is set, and then accepts it, or not."""

    def __init__(self, answers: list[str]) -> None:
        self.go, self.answers = threading.Event(), answers
        self.batches: list[int] = []

    def send(self, spans) -> str:
        self.go.wait()
        self.batches.append(len(spans))
        return self.answers.pop() if self.answers else ""

    def stop(self) -> None:
        self.go.set()


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 700), max_size=8),
    st.integers(1, 1500),
    st.lists(st.sampled_from(["", "refused"]), max_size=6),
)
def test_every_span_is_sent_lost_or_left_out_and_the_queue_is_bounded(sizes, max_queue, answers):
    sender = Slow(answers)
    export = SpanExport(sender, max_queue=max_queue)
    span = trace()[0]
    for size in sizes:
        export.offer([span] * size)
        assert len(export._waiting) <= max_queue
    sender.go.set()
    export.close(timeout_s=30)
    counts = export.counts
    assert counts.sent + counts.lost + counts.left_out == sum(sizes)
    assert counts.sent + counts.lost == sum(sender.batches)
    assert all(batch <= MAX_BATCH for batch in sender.batches)
    assert (counts.problem == "refused") == (counts.lost > 0)


def test_a_collector_that_hangs_does_not_hold_the_end():
    sender = Slow([])
    export = SpanExport(sender, max_queue=10_000)
    for _ in range(3):
        export.offer([trace()[0]] * MAX_BATCH)
    export.close(timeout_s=0.0)
    assert sender.go.is_set(), "its request was ended"
    export._thread.join(30)
    counts = export.counts
    assert counts.sent + counts.lost == 3 * MAX_BATCH


def test_without_opentelemetry_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracking.spans.endpoint needs OpenTelemetry .*agentrl\[otel\]"):
        check_opentelemetry()


@pytest.mark.parametrize(
    ("endpoint", "line"),
    [
        ("localhost:4318", "is not the URL of an HTTP service; write http://HOST:PORT"),
        ("grpc://host:4317", "'grpc://host:4317' is not the URL of an HTTP service"),
        ("http://me:pass@host:4318", r"'http://\*\*\*@host:4318' contains credentials"),
    ],
)
def test_a_wrong_endpoint_is_the_users_mistake(endpoint, line):
    with pytest.raises(ValueError, match=line) as found:
        Config.model_validate({"tracking": {"spans": {"endpoint": endpoint}}})
    assert "pass@" not in str(found.value).partition("input_value")[0]


def test_the_run_says_once_that_spans_are_lost():
    said: list[str] = []
    watch = SpanLoss(SpansConfig(endpoint="http://c:1"), problem=lambda: "refused", say=said.append)
    for stats in ({}, {"spans_sent": 5.0, "spans_lost": 0.0}, {"spans_lost": 3.0}, {"spans_lost": 9.0}):
        watch.look(stats)
    assert said == [
        "spans: 3 did not reach http://c:1 (refused); the run goes on, and spans/lost and spans/left_out "
        "count them"
    ]
    full = SpanLoss(SpansConfig(endpoint="http://c:1", max_queue=7), problem=lambda: "", say=said.append)
    full.look({"spans_left_out": 2.0})
    assert "2 did not reach http://c:1 (tracking.spans.max_queue=7 spans waited)" in said[1]


@given(st.text(st.characters(), max_size=2_000))
def test_texts_of_spans_are_short_and_can_be_sent(text):
    short = bounded(text)
    assert len(short) <= MAX_TEXT_CHARS
    short.encode()
