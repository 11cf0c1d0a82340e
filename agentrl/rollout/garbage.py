"""Settings of the garbage collector for a process that plays thousands of attempts at once.

An attempt in flight holds about 350 objects that live for minutes, and the collector needs 60 ns per object.
With 10,000 attempts in flight, a full collection blocks all of them for a quarter of a second or more. Cycles
are rare, but they add up over hours. So full collections run only as often as takes a fraction SHARE of the
time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from agentrl import heap

THRESHOLDS = (50_000, 5, 2000)
"""Thresholds of `gc.set_threshold`. Python's default for the first is 700.

Collections of the first two generations pause for 3 and 20 ms. The third threshold is for processes that
never call `OldGarbage.collect`.
"""
SHARE = 0.001
"""Fraction of time for full collections: one per 20 s at 1,000 attempts in flight, one per four minutes at
10,000.
"""


def collect_rarely() -> None:
    """Exclude all existing objects from garbage collection and collect rarely. Call it when everything is
    loaded.

    With Python's defaults the collector scans the attempts in flight repeatedly, which takes a quarter of the
    loop's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


class OldGarbage:
    """Full garbage collections at a bounded rate."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`clock`: returns seconds; `cpu_clock`: returns the thread's CPU seconds."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._due = clock()

    def collect(self) -> bool:
        """Run a full collection, unless that would exceed SHARE of the time. Returns whether it ran.

        Freed memory is returned to the operating system. Call it when no request is waiting.
        """
        now, begun = self._clock(), self._cpu_clock()
        if now < self._due:
            return False
        gc.collect()
        heap.release_free_memory()
        self._due = now + (self._cpu_clock() - begun) / SHARE
        return True
