"""The virtual clock, and runs under it that repeat exactly."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from trio._core import _run
from trio.abc import Clock

T = TypeVar("T")

_MAX_IDLE = 1000
"""Polls without a deadline. trio itself makes a few when a run begins and ends."""


class VirtualClock(Clock):
    """Starts at 0 and jumps to the next deadline whenever every task waits.

    Nothing may wait for another thread or a socket: the clock would not wait for it.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._num_idle = 0

    def start_clock(self) -> None:
        return

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump. trio calls this only when no task can run."""
        self._num_idle = self._num_idle + 1 if deadline == math.inf else 0
        assert self._num_idle < _MAX_IDLE, "all tasks wait, and none has a deadline"
        if deadline < math.inf:
            self._now = max(self._now, deadline)
        return 0.0


def run_virtually(main: Callable[..., Awaitable[T]], *args: Any, seed: int) -> T:
    """Run `main(*args)` under trio on a virtual clock and return its value.

    The order in which trio runs the tasks that are ready is random. Here it is a function of `seed`, so a run
    with the same seed repeats every interleaving.
    """
    # trio has no public setting for this; its plugin for Hypothesis sets the same two names.
    before, was_sorted = _run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._r.seed(seed)
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    try:
        return trio.run(main, *args, clock=VirtualClock())
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = was_sorted  # type: ignore[misc]
        _run._r.setstate(before)
