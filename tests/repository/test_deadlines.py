"""Every wait ends: a lint over all calls that wait for threads, processes, queues and Ray without saying how
long.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WAITS = {"wait", "join", "result", "communicate", "acquire", "get", "wait_for"}
"""Methods that wait for ever where no timeout is given (`get` of a queue: without any argument)."""
FUNCTIONS = {
    "ray.get",
    "ray.wait",
    *(f"subprocess.{name}" for name in ("run", "check_call", "check_output", "call")),
}
"""Functions that wait for ever without `timeout=`."""
COROUTINE_TAKERS = {"asyncio.wait_for", "asyncio.create_task"}
"""What they are given would be awaited otherwise."""

NAMES = WAITS | {function.partition(".")[2] for function in FUNCTIONS}

ALLOWED = {
    "agentrl/extras/mcp/tools.py:mcp_tools": "opening, listing and closing each have a deadline, by "
    "start_timeout_s",
    "agentrl/extras/storage/upload.py:RunUpload._send_checkpoint": "a thread of its own; requests have "
    "deadlines",
    "agentrl/cluster/recorder.py:Recorder._run": "a daemon thread that waits for work",
    "agentrl/plugins/last_words.py:note": "context variables: they wait for nothing",
    "agentrl/rollout/asyncio_host.py:_tell_left": "a context variable: it waits for nothing",
    "agentrl/extras/tracing/traces.py:current_scope": "a context variable: it waits for nothing",
    "agentrl/extras/tracing/traces.py:TracedScope.__enter__": "a context variable: it waits for nothing",
    "agentrl/extras/trackers/background.py:BackgroundTracker._work": "a daemon thread that waits for work",
    "agentrl/controller/assess.py:begin_critic_updates": "a Handle: CallDeadlines bounds it",
    "agentrl/extras/research/compare_corrections.py:_console": "rich's capture: it waits for nothing",
    "agentrl/controller/saving.py:CheckpointWriter.finish": "the ranks' calls in it are bounded by "
    "CallDeadlines",
    "agentrl/controller/train.py:learn": "a Handle: CallDeadlines bounds it",
    "agentrl/learner/buckets.py:BucketSender._settle": "the process group has a time-out",
    "agentrl/learner/buckets.py:_exchange": "the process group has a time-out",
    "agentrl/rewards/worker.py:main": "a worker's whole life: it ends with the pipe to its parent",
    "agentrl/extras/sandbox/launcher/main.py:Inside._run_program": "the launcher outside kills it at the "
    "program's deadline",
    "agentrl/servers/supervisor.py:Supervisor._wait_until_it_ends": "a server's whole life, which `stop` "
    "ends",
    "agentrl/extras/sandbox/process.py:LauncherPair.run": "the launcher that it waits for was stopped in the "
    "line before",
    "agentrl/servers/process_group.py:Broadcast.wait": "the process group has a time-out",
    "agentrl/cluster/actors.py:_limiter": "a variable of trio's: it waits for nothing",
    "agentrl/cluster/workers.py:Workers.run": "a Handle: CallDeadlines bounds it",
}
"""File and function -> what bounds the wait instead."""


def waits(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, function, call) of every call of a source that waits without a deadline; what is awaited
    is a scope's matter.
    """
    tree = ast.parse(text)
    awaited: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Await):
            awaited.add(node.value)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func) in COROUTINE_TAKERS
        ):
            awaited.update(node.args)
    has_futures = (
        "concurrent.futures" in text
    )  # elsewhere `result` is a result, or that of an asyncio task that has ended
    yield from (wait for wait in _waits(tree, (), awaited) if has_futures or not wait[2].endswith(".result"))


def _waits(node: ast.AST, names: tuple[str, ...], awaited: set[ast.expr]) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        names = (*names, node.name)
    if isinstance(node, ast.Call) and node not in awaited and _is_endless(node):
        yield node.lineno, ".".join(names), ast.unparse(node.func)
    for child in ast.iter_child_nodes(node):
        yield from _waits(child, names, awaited)


def _is_endless(call: ast.Call) -> bool:
    """Whether nothing bounds it.

    `x.wait()` of any object counts; `", ".join(words)` and `queue.get(timeout=1)` do not.
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in NAMES:
        return False
    name = ast.unparse(call.func)
    has_timeout = any(
        keyword.arg in ("timeout", "timeout_s") and not _is_none(keyword.value) for keyword in call.keywords
    )
    if name in FUNCTIONS:
        return not has_timeout
    if call.func.attr not in WAITS:
        return False
    if call.func.attr == "wait_for":  # of a condition: the second argument is the deadline
        return not has_timeout and len(call.args) < 2 and not name.startswith("asyncio.")
    return not has_timeout and (not call.args or _is_none(call.args[0]))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


@functools.cache
def found() -> dict[str, list[str]]:
    """Return where the package waits without a deadline: `file:Class.function` -> the calls."""
    places: dict[str, list[str]] = {}
    for folder in ("agentrl", "agents", "interactions", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, function, call in waits(path.read_text(encoding="utf-8")):
                places.setdefault(f"{path.relative_to(ROOT)}:{function}", []).append(f"line {line}: {call}()")
    return places


def test_every_wait_has_a_deadline():
    new = {place: calls for place, calls in found().items() if place not in ALLOWED}
    assert not new, "give these waits a timeout, or name in ALLOWED what bounds them"


def test_the_list_of_exceptions_is_short_and_true():
    assert set(ALLOWED) <= set(found()), "these wait no more: strike them"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ray.get(ref)", True),
        ("ray.get(ref, timeout=None)", True),
        ("ray.get(ref, timeout=3)", False),
        ("ray.wait([ref], num_returns=1)", True),
        ("event.wait()", True),
        ("event.wait(None)", True),
        ("event.wait(3)", False),
        ("thread.join()", True),
        ("', '.join(words)", False),
        ("from concurrent.futures import Future\nfuture.result()", True),
        ("names.get('a')", False),
        ("queue.get()", True),
        ("lock.acquire()", True),
        ("condition.wait_for(ready)", True),
        ("condition.wait_for(ready, 3)", False),
        ("subprocess.run(['a'])", True),
        ("subprocess.run(['a'], timeout=3)", False),
        ("async def f():\n    await event.wait()", False),
        ("async def f():\n    await asyncio.wait_for(event.wait(), 3)", False),
        ("number.result()", False),
    ],
)
def test_the_lint_finds_what_it_is_for(source, expected):
    assert bool(list(waits(source))) == expected
