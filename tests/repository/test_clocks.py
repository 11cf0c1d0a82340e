"""Durations are measured by the monotonic clock alone: the wall clock jumps, and is read only to tell people
(or a protocol) a time.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("agentrl", "agents", "interactions", "tools")

WALL_CLOCKS = {
    *(
        f"time.{name}"
        for name in (
            "time",
            "time_ns",
            "localtime",
            "gmtime",
            "strftime",
            "ctime",
            "asctime",
            "CLOCK_REALTIME",
        )
    ),
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
    "datetime.date.today",
    "os.path.getmtime",
}
FILE_TIMES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "st_atime", "st_atime_ns"}
PASSING_ON = {"abs", "float", "int", "max", "min", "round"}

ALLOWED = {
    "agentrl/extras/doctor/clock.py:wall_clock": "the clock is what is examined, and compared between nodes",
    "agentrl/extras/doctor/clock.py:judge_clock": "the time, for people",
    "agentrl/extras/doctor/clock.py:diagnose": "the time of a file is compared with the clock",
    "agentrl/extras/storage/uploaded.py:UploadIndex.now": "when an upload was written, for people",
    "agentrl/extras/storage/upload.py:RunUpload._send_files": "whether a file is the one that was sent",
    "agentrl/buffer/journal.py:Journal.append": "the time of an event, for people",
    "agentrl/buffer/journal.py:Journal.replace_events": "the time of an event, for people",
    "agentrl/chat/template.py:_environment": "the date that a template writes",
    "agentrl/extras/verl/importing/shell.py:_printed": "what `date` would print in a script",
    "agentrl/cluster/control.py:ask": "requests are served in the order of their names; nothing hangs on it",
    "agentrl/cluster/control.py:ControlDesk.show": "when the table was written",
    "agentrl/controller/run_dir.py:RunDir.journal_version": "when a version was published, for people",
    "agentrl/cli/evaluation.py:_evaluated": "the day in a report",
    "agentrl/extras/gateway/chat_completions.py:_head": "OpenAI's field `created`",
    "agentrl/extras/gateway/responses_writer.py:ResponseWriter.__init__": "OpenAI's field `created_at`",
    "agentrl/extras/gateway/self_signed.py:write_self_signed": "how long a certificate is valid",
    "agentrl/extras/sandbox/probe.py:changes": "is it the same file? Only equality",
    "agentrl/extras/embedded/app.py:App.loads": "SGLang's field `timestamp`",
    "agentrl/cluster/rollouts.py:RolloutFleet._read_last_words": "when an attempt failed, for people",
    "agentrl/tracking/attempts.py:FailedAttempt.of": "when an attempt failed, for people",
    "agentrl/extras/trackers/tensorboard_tracker.py:TensorboardTracker.go_back": "TensorBoard's axis of time",
    "agentrl/extras/trackers/tensorboard_tracker.py:TensorboardTracker._add": "TensorBoard's axis of time",
    "agentrl/extras/trackers/mlflow_tracker.py:MlflowTracker.log": "MLflow's axis of time, for people",
    "agentrl/extras/tracing/traces.py:Trace.__init__": "OpenTelemetry's axis of time",
    "agentrl/tracking/spans.py:TracedBlock.__enter__": "OpenTelemetry's axis of time",
    "agentrl/extras/tracing/traced_client.py:RequestTracer.paused": "a pause is known by the driver's clock",
    "agentrl/weights/publish.py:Publisher._held": "when a server was paused, for other processes",
    "agentrl/extras/view/sources.py:signature_of": "is it the same file? A key of a cache",
    "agentrl/extras/view/changes.py:_stamp": "is it the same file? Only equality",
    "agentrl/extras/search/search.py:open_index": "is it the same file? A key of a cache",
}
"""File and function (or class) -> why it may look at the wall clock, or at a file's time."""


def readings(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, function, whether it is calculated with or ordered by in place) of every use of a wall
    clock in a source.
    """
    tree = ast.parse(text)
    names = _imported(tree)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (
            _full_name(node, names) in WALL_CLOCKS or _is_file_time(node)
        ):
            above = [node, *_above(node, parents)]
            functions = [
                n.name
                for n in reversed(above)
                if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            yield node.lineno, ".".join(functions), _is_calculated_with(above)


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _is_calculated_with(above: list[ast.AST]) -> bool:
    """Climb from a clock's name through what passes its value on; `{"time": clock()}` or `f(clock())` ends
    the way.
    """
    for below, node in itertools.pairwise(above):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            return True
        if isinstance(node, ast.Compare):
            return any(isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for operator in node.ops)
        if isinstance(node, ast.Call) and node.func is not below and ast.unparse(node.func) not in PASSING_ON:
            return False
        if not isinstance(node, ast.Call | ast.Attribute | ast.UnaryOp):
            return False
    return False


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return what the names that a source imports stand for: {"now": "time.time"} of `from time import time
    as now`.
    """
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    return f"{_full_name(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _is_file_time(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in FILE_TIMES


@functools.cache
def found() -> dict[str, list[tuple[int, bool]]]:
    """Return all uses by file and function."""
    uses: dict[str, list[tuple[int, bool]]] = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for line, function, is_calculated in readings(path.read_text(encoding="utf-8")):
            uses.setdefault(f"{path.relative_to(ROOT)}:{function}", []).append((line, is_calculated))
    return uses


def test_the_wall_clock_is_read_only_where_a_time_is_told():
    uses = found()
    assert set(uses) - set(ALLOWED) == set(), (
        "measure a duration by time.monotonic(); to tell a time, name the place in ALLOWED"
    )
    assert set(ALLOWED) - set(uses) == set(), "these no longer look at the wall clock"


def test_nothing_is_calculated_from_it():
    assert [
        (place, line) for place, lines in found().items() for line, is_calculated in lines if is_calculated
    ] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import time\ndef f():\n    return time.monotonic() - time.perf_counter()", []),
        ("import time\ndef f(x):\n    return {'at': time.time()}", [("f", False)]),
        ("import time as t\nclass A:\n    def f(self, x):\n        return t.time() - x", [("A.f", True)]),
        ("from time import time as now\ndef f(x):\n    return max(0.0, x - now())", [("f", True)]),
        (
            "from dataclasses import field\nimport time\nclass A:\n    at: float = "
            "field(default_factory=time.time)",
            [("A", False)],
        ),
        ("import datetime\ndef f(x):\n    if datetime.datetime.now() > x: ...", [("f", True)]),
        ("from datetime import datetime\ndef f(x):\n    return (datetime.now() - x).seconds", [("f", True)]),
        ("def f(path, x):\n    return path.stat().st_mtime < x", [("f", True)]),
        ("import time\ndef f(x):\n    x += time.time_ns()", [("f", True)]),
        ("import time\ndef f(x):\n    return int(time.time()) // 60", [("f", True)]),
        ("import json, time\ndef f(x):\n    return json.dumps({'at': time.time()}) + '.'", [("f", False)]),
        (
            "def f(a, b):\n    return (a.st_mode, a.st_mtime_ns) == (b.st_mode, b.st_mtime_ns)",
            [("f", False), ("f", False)],
        ),
        ("import time\ntime.clock_gettime(time.CLOCK_REALTIME)", [("", False)]),
    ],
)
def test_the_lint_sees_them(text, expected):
    assert [(function, is_calculated) for _, function, is_calculated in readings(text)] == expected
