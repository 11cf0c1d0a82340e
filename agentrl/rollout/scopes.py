"""Live scopes: a tree of the operations in flight in a process, with their ages. It shows what a stuck run
waits for.

group 17 member 1 (tool_agent), 125.0 s
    tool search, 124.2 s
ship 3 trajectories, 0.1 s

A scope costs a few microseconds and a few hundred bytes, so 10,000 attempts can each have one. Scopes are
opened and closed in one thread. Any other thread can read them without a lock, even while the first one is
blocked, which is when they are needed most.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from agentrl.rollout.loop_gaps import LoopGaps

GENERATE = "generate"
"""Name of a scope that waits for a server. The router knows which one, by the `key` of the outer scope."""
MAX_FRAMES = 6
_WAITS_FOR_EVENTS = (" get_events", " select")
"""Functions in which trio and asyncio wait for events. A loop in one of them is idle, not blocked."""

_LIBRARIES = ("<frozen", *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).parents[1])

Clock = Callable[[], float]


class Scope:
    """A context manager that is part of the tree while it is entered.

    doing: what happens in it while no inner scope is open. key: key of its attempt in the router.
    """

    __slots__ = ("_clock", "_inner", "_outer", "doing", "key", "name", "since")

    def __init__(
        self,
        name: str = "",
        *,
        outer: Scope | None = None,
        doing: str = "",
        key: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.doing = doing
        self.key = key
        self._clock = clock
        self._outer = outer
        self._inner: dict[Scope, None] | None = None
        self.since = clock()

    def open(self, name: str, *, doing: str = "", key: str = "") -> Scope:
        """Return an inner scope. Enter it immediately: `with scope.open("tool search"): ...`."""
        return Scope(name, outer=self, doing=doing, key=key, clock=self._clock)

    def attach(self, outer: Scope, name: str, *, doing: str = "", key: str = "") -> Scope:
        """Move this scope into `outer` and return it; enter it immediately.

        For scopes created before their place is known.
        """
        self._outer, self.name, self.doing, self.key, self._clock = outer, name, doing, key, outer._clock
        self.since = self._clock()
        return self

    def __enter__(self) -> Scope:
        if self._outer is not None:
            if self._outer._inner is None:
                self._outer._inner = {}
            self._outer._inner[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is not None and self._outer._inner is not None:
            self._outer._inner.pop(self, None)

    @property
    def inner(self) -> list[Scope]:
        """The open inner scopes, in the order in which they were opened.

        `list` of a dict is atomic under the GIL, so other threads need no lock.
        """
        return [] if self._inner is None else list(self._inner)


@dataclass(frozen=True, slots=True)
class LiveScope:
    """Snapshot of one open scope. inner: its inner scopes, oldest first."""

    name: str
    age_s: float
    doing: str = ""
    inner: tuple[LiveScope, ...] = ()

    @property
    def leaves(self) -> Iterator[str]:
        """The innermost operations, which are what the scope waits for."""
        if not self.inner:
            yield self.doing or self.name
        for scope in self.inner:
            yield from scope.leaves

    def lines(self, indent: str = "") -> Iterator[str]:
        """Yield the scope as text, one line per scope."""
        doing = f": {self.doing}" if self.doing and not self.inner else ""
        yield f"{indent}{self.name}, {self.age_s:.1f} s{doing}"
        for scope in self.inner:
            yield from scope.lines(indent + "  ")


@dataclass(frozen=True, slots=True)
class TaskCount:
    """Number of tasks with the same name and parent in trio's task tree, `depth` nurseries below its root."""

    depth: int
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class LiveScopes:
    """Snapshot of all scopes of a process.

    oldest: the oldest scopes in full.
    rest: of the other scopes: what they wait for -> how many.
    tasks: trio's task tree, which also shows operations without a scope.
    blocked: for each blocked event loop, where its thread is: it computes, or waits for something other than
        events. Everything in that loop waits meanwhile.
    """

    oldest: tuple[LiveScope, ...]
    rest: Mapping[str, int] = field(default_factory=dict)
    tasks: tuple[TaskCount, ...] = ()
    blocked: tuple[str, ...] = ()

    def shortened(self, limit: int) -> LiveScopes:
        """Return a copy with at most `limit` scopes in full and without trio's task tree."""
        rest = Counter(self.rest) + Counter(leaf for scope in self.oldest[limit:] for leaf in scope.leaves)
        return LiveScopes(self.oldest[:limit], dict(rest.most_common()), blocked=self.blocked)

    def lines(self) -> Iterator[str]:
        """Yield the snapshot as readable text."""
        yield from self.blocked
        for scope in self.oldest:
            yield from scope.lines()
        if self.rest:
            yield (
                f"and {sum(self.rest.values())} more: "
                f"{', '.join(f'{count} {name}' for name, count in self.rest.items())}"
            )
        if not self.oldest:
            yield "no attempt in progress"
        for task in self.tasks:
            yield f"{'  ' * task.depth}{'' if task.count == 1 else f'{task.count} x '}task {task.name}"


def look(root: Scope, *, limit: int, places: Mapping[str, str], now: float | None = None) -> LiveScopes:
    """Return a snapshot of the open scopes inside `root`, at most `limit` of them in full.

    Args:
        places: attempt key -> URL of the server that generates for it.
        now: time on the scopes' clock, in seconds; None: the current time.
    """
    now = root._clock() if now is None else now
    live = sorted(
        (_seen(scope, places, now, scope.key) for scope in root.inner), key=lambda scope: -scope.age_s
    )
    rest = Counter(leaf for scope in live[limit:] for leaf in scope.leaves)
    return LiveScopes(tuple(live[:limit]), dict(rest.most_common()))


def _seen(scope: Scope, places: Mapping[str, str], now: float, key: str) -> LiveScope:
    name = scope.name
    if name == GENERATE:
        name = f"{GENERATE} at {places[key]}" if key in places else f"{GENERATE}: not sent to a server"
    inner = tuple(_seen(one, places, now, one.key or key) for one in scope.inner)
    return LiveScope(name, max(0.0, now - scope.since), scope.doing, inner)


def count_tasks(root: trio.lowlevel.Task) -> tuple[TaskCount, ...]:
    """Return the tasks below `root`, grouped by name and parent. Thread-safe."""
    return tuple(_counts([root], depth=0))


def _counts(tasks: list[trio.lowlevel.Task], *, depth: int) -> Iterator[TaskCount]:
    by_name: dict[str, list[trio.lowlevel.Task]] = {}
    for task in tasks:
        by_name.setdefault(_short(task.name), []).append(task)
    for name, same in sorted(by_name.items()):
        yield TaskCount(depth, name, len(same))
        below = [child for task in same for nursery in task.child_nurseries for child in nursery.child_tasks]
        yield from _counts(below, depth=depth + 1)


def _short(name: str) -> str:
    """Return the last two parts of a task's name (class and function), without `<locals>`."""
    return ".".join([part for part in name.split(".") if part != "<locals>"][-2:])


def stack_of(thread: threading.Thread) -> list[str]:
    """Return the current stack of a thread as `file:line function`, innermost first; [] if the thread has
    ended.

    Library frames are omitted, except the innermost one: the calls of agentrl or a plugin say more.
    """
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        code = frame.f_code
        if not found or not _is_of_a_library(code.co_filename):
            found.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return found


def _is_of_a_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_PACKAGE)


def where_blocked(loop: threading.Thread) -> str | None:
    """Return where the thread of an event loop is blocked; None if it waits for events."""
    stack = stack_of(loop)
    if not stack or stack[0].endswith(_WAITS_FOR_EVENTS):
        return None
    return f"the event loop of thread {loop.name!r} is in {' < '.join(stack)}"


@dataclass(frozen=True, slots=True)
class PlayLoop:
    """A trio loop in which attempts are played, as seen from other threads: its root task, its thread, and
    the thread of the asyncio plugins.
    """

    gaps: LoopGaps
    root: trio.lowlevel.Task
    thread: threading.Thread
    plugins: threading.Thread

    @classmethod
    def here(cls, gaps: LoopGaps, *, plugins: threading.Thread) -> PlayLoop:
        """Return the loop in which the calling task runs."""
        root = trio.lowlevel.current_root_task()
        assert root is not None, "this is called from a task"
        return cls(gaps, root, threading.current_thread(), plugins)

    def look(self, scopes: Scope, *, limit: int, places: Mapping[str, str]) -> LiveScopes:
        """Return the live scopes inside `scopes` (see `scopes.look`), all tasks, and where blocked loops
        are.
        """
        threads = [self.plugins, *([self.thread] if self.gaps.is_blocked else [])]
        blocked = tuple(where for thread in threads if (where := where_blocked(thread)) is not None)
        return replace(
            look(scopes, limit=limit, places=places), tasks=count_tasks(self.root), blocked=blocked
        )
