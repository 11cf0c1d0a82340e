"""Threads in which plugins may block. A thread cannot be stopped: a call that outlives its deadline keeps its
own, and these are counted, bounded and told.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from agentrl.plugins.last_words import note, noting

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_STUCK = 256
"""Threads that calls of one plugin may keep after their deadlines. Calls that are cancelled all at once, as
at the end of a validation, are fewer, and end soon.
"""


class StuckThreads(RuntimeError):
    """Too many calls of a plugin have not ended after their deadlines."""


class CallThreads:
    """Runs calls of one plugin in threads, over all attempts of a process.

    A call that is cancelled leaves its thread behind and frees its place, so that calls that hang do not
    starve the others.
    """

    _lock = threading.Lock()
    _num_stuck_here = 0

    def __init__(self, who: str, *, num: float, max_stuck: int = MAX_STUCK) -> None:
        """`who` is named in messages; `num` calls run at once, without those left behind."""
        self._who = who
        self._places = trio.CapacityLimiter(num)
        self._threads = trio.CapacityLimiter(math.inf)
        self._max_stuck = max_stuck
        self._num_stuck = 0
        self._is_told = False

    @property
    def num_stuck(self) -> int:
        """Calls that were left behind and still run."""
        return self._num_stuck

    @classmethod
    def num_stuck_here(cls) -> int:
        """Return the calls of all plugins of this process that were left behind and still run."""
        return cls._num_stuck_here

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, called in a thread. If the caller is cancelled, the thread goes on alone.

        Raises:
            StuckThreads: too many earlier calls go on alone.
        """
        if self._num_stuck >= self._max_stuck:
            raise StuckThreads(
                f"{self._num_stuck} calls of {self._who} still run in threads after their deadlines, and a "
                "thread cannot be stopped; give what it waits for a timeout"
            )
        call = _Call(self)
        await self._places.acquire_on_behalf_of(call)
        try:
            return await trio.to_thread.run_sync(
                call.run, function, args, abandon_on_cancel=True, limiter=self._threads
            )
        except trio.Cancelled:
            call.leave()
            raise
        finally:
            self._places.release_on_behalf_of(call)

    def _count(self, change: int) -> None:
        """Count threads left behind. Called with the lock."""
        self._num_stuck += change
        CallThreads._num_stuck_here += change

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            log.warning(
                "a call of %s was given up and still runs in its thread, which cannot be stopped; give what "
                "it waits for a timeout (told once, counted in rollout/stuck_threads)",
                self._who,
            )


class _Call:
    """One call: whether its thread runs, and whether its caller has left."""

    __slots__ = ("_is_left", "_is_running", "_threads")

    def __init__(self, threads: CallThreads) -> None:
        self._threads = threads
        self._is_left = self._is_running = False

    def run(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        with CallThreads._lock:
            self._is_running = True
            self._threads._count(self._is_left)
        try:
            with noting(note()):
                return function(*args)
        finally:
            with CallThreads._lock:
                self._is_running = False
                self._threads._count(-self._is_left)

    def leave(self) -> None:
        with CallThreads._lock:
            self._is_left = True
            self._threads._count(self._is_running)
        if self._is_running:
            self._threads._tell()
