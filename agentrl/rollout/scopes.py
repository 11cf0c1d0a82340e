"""What goes on in a process at this moment, as a tree of scopes with their ages: a run that stands still says by it what it waits for.

group 17 member 1 (tool_agent), 125.0 s
    tool search, 124.2 s
ship 3 trajectories, 0.1 s

A scope costs a few microseconds and a few hundred bytes, so that 10,000 attempts may have one each. It is opened and closed in one thread,
and may be looked at from any other: also while that one is blocked, which is when somebody looks.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio

GENERATE = "generate"
"""A scope so called waits for a server, or for one that is up; which one, the router knows by the `key` of the scope around it."""
MAX_FRAMES = 6
_WAITS_FOR_EVENTS = (" get_events", " select")
"""The functions in which the loops of trio and asyncio wait for the world: one that stands there is idle, not blocked."""

_LIBRARIES = ("<frozen", *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).parents[1])

Clock = Callable[[], float]


class Scope:
    """A context manager: it is part of the tree while it is entered.

    doing: what goes on in it while no inner scope is open. key: that of its trajectory in the router.
    """

    __slots__ = ("_clock", "_inner", "_outer", "doing", "key", "name", "since")

    def __init__(
        self, name: str = "", *, outer: Scope | None = None, doing: str = "", key: str = "", clock: Clock = time.monotonic
    ) -> None:
        self.name = name
        self.doing = doing
        self.key = key
        self._clock = clock
        self._outer = outer
        self._inner: dict[Scope, None] | None = None
        self.since = clock()

    def open(self, name: str, *, doing: str = "", key: str = "") -> Scope:
        """Return an inner scope, to be entered at once: `with scope.open("tool search"): ...`."""
        return Scope(name, outer=self, doing=doing, key=key, clock=self._clock)

    def attach(self, outer: Scope, name: str, *, doing: str = "", key: str = "") -> Scope:
        """Return this scope, to be entered at once as one inside of `outer`: for one that was made before anybody knew where it belongs."""
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
        """The open scopes inside, in the order in which they were opened; a copy made in one step of the interpreter."""
        return [] if self._inner is None else list(self._inner)


@dataclass(frozen=True, slots=True)
class LiveScope:
    """One open scope. inner: those within it, oldest first."""

    name: str
    age_s: float
    doing: str = ""
    inner: tuple[LiveScope, ...] = ()

    @property
    def leaves(self) -> Iterator[str]:
        """What is waited for in it."""
        if not self.inner:
            yield self.doing or self.name
        for scope in self.inner:
            yield from scope.leaves

    def lines(self, indent: str = "") -> Iterator[str]:
        """Yield it as text, a line for each scope."""
        doing = f": {self.doing}" if self.doing and not self.inner else ""
        yield f"{indent}{self.name}, {self.age_s:.1f} s{doing}"
        for scope in self.inner:
            yield from scope.lines(indent + "  ")


@dataclass(frozen=True, slots=True)
class TaskCount:
    """So many tasks of one name at one place of trio's tree, `depth` nurseries below its root."""

    depth: int
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class LiveScopes:
    """All scopes of a process: the oldest ones, and of the others what they wait for, with how many do.

    tasks: trio's own tree, which has what has no scope. blocked: for each event loop whose thread computes, or waits for something else
    than events, where that is: all that goes on in the loop stands still meanwhile.
    """

    oldest: tuple[LiveScope, ...]
    rest: Mapping[str, int] = field(default_factory=dict)
    tasks: tuple[TaskCount, ...] = ()
    blocked: tuple[str, ...] = ()

    def shortened(self, limit: int) -> LiveScopes:
        """Return the same with `limit` scopes in full, and without trio's tree."""
        rest = Counter(self.rest) + Counter(leaf for scope in self.oldest[limit:] for leaf in scope.leaves)
        return LiveScopes(self.oldest[:limit], dict(rest.most_common()), blocked=self.blocked)

    def lines(self) -> Iterator[str]:
        """Yield them as text for a person."""
        yield from self.blocked
        for scope in self.oldest:
            yield from scope.lines()
        if self.rest:
            yield f"and {sum(self.rest.values())} more: {', '.join(f'{count} {name}' for name, count in self.rest.items())}"
        if not self.oldest:
            yield "no attempt is under way"
        for task in self.tasks:
            yield f"{'  ' * task.depth}{'' if task.count == 1 else f'{task.count} x '}task {task.name}"


def look(root: Scope, *, limit: int, places: Mapping[str, str], now: float | None = None) -> LiveScopes:
    """Return the open scopes inside `root`; no more than `limit` of them in full.

    Args:
        places: of keys of trajectories, where their generation is asked for.
        now: of the clock of the scopes; None: at this moment.
    """
    now = root._clock() if now is None else now
    live = sorted((_seen(scope, places, now, scope.key) for scope in root.inner), key=lambda scope: -scope.age_s)
    rest = Counter(leaf for scope in live[limit:] for leaf in scope.leaves)
    return LiveScopes(tuple(live[:limit]), dict(rest.most_common()))


def _seen(scope: Scope, places: Mapping[str, str], now: float, key: str) -> LiveScope:
    name = scope.name
    if name == GENERATE:
        name = f"{GENERATE} at {places[key]}" if key in places else f"{GENERATE}: no server has it"
    inner = tuple(_seen(one, places, now, one.key or key) for one in scope.inner)
    return LiveScope(name, max(0.0, now - scope.since), scope.doing, inner)


def count_tasks(root: trio.lowlevel.Task) -> tuple[TaskCount, ...]:
    """Return the tasks below `root`, those of one name and place together; safe to call from another thread."""
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
    """Return the class and the function of a task's name, without modules and `<locals>`."""
    return ".".join([part for part in name.split(".") if part != "<locals>"][-2:])


def stack_of(thread: threading.Thread) -> list[str]:
    """Return where a thread is at this moment, as `file:line function`, innermost first; [] of one that has ended.

    Of libraries only the innermost function is told: what our code, or a plugin, asked of them says more.
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
    """Return where the thread of an event loop stands; None while it waits for events, as it mostly should."""
    stack = stack_of(loop)
    if not stack or stack[0].endswith(_WAITS_FOR_EVENTS):
        return None
    return f"the event loop of thread {loop.name!r} is in {' < '.join(stack)}"
