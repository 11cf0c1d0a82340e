"""How long nothing ran."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio


class IdleTime:
    """Idle seconds since the first task started.

    Call `begin` and `end` around each task, from within trio.
    """

    def __init__(self) -> None:
        self._running = 0
        self._seconds = 0.0
        self._since: float | None = None
        self._now: Callable[[], float] = time.monotonic

    def begin(self) -> None:
        if self._since is not None:
            self._seconds += self._now() - self._since
            self._since = None
        self._running += 1

    @property
    def num_running(self) -> int:
        return self._running

    def end(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._now = (
                trio.lowlevel.current_clock().current_time
            )  # trio's clock is not accessible from other threads
            self._since = self._now()

    def seconds(self) -> float:
        """Return the total, including the current idle period. Thread-safe."""
        total, since = self._seconds, self._since
        return total if since is None else total + self._now() - since
