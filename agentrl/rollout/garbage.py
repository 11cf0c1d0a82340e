"""The garbage collector of a process that plays thousands of trajectories at once.

A trajectory in flight holds some 350 objects that live for minutes, and the collector takes 60 ns for each that it looks at: at 10,000 in
flight a search of everything is a pause of a quarter of a second or more, in which all of them stand still. Cycles are few here,
but hours of them are much: everything is searched as often as takes SHARE of the time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from agentrl import heap

THRESHOLDS = (50_000, 5, 2000)
"""Objects made before the youngest are searched for cycles (Python's own: 700), and collections of one generation before the next.

The first two are pauses of 3 and 20 ms. The third is for a process that nobody asks for an `OldGarbage.collect`.
"""
SHARE = 0.001
"""Of the time, that searches of everything may take: at 1,000 trajectories in flight one in 20 seconds, at 10,000 one in four minutes."""


def collect_rarely() -> None:
    """Leave what is loaded out of every collection, and collect seldom. Call it once everything is loaded.

    At Python's own pace the collector goes through the trajectories in flight again and again, for a quarter of the loop's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


class OldGarbage:
    """Cycles of objects that have lived long, and the memory that they leave."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """clock: returns seconds; cpu_clock: those that the thread has computed."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._due = clock()

    def collect(self) -> bool:
        """Search everything but what was frozen, unless it would take more than SHARE of the time; return whether it was.

        What becomes free goes back to the machine. Call it where nothing waits.
        """
        now, begun = self._clock(), self._cpu_clock()
        if now < self._due:
            return False
        gc.collect()
        heap.release_free_memory()
        self._due = now + (self._cpu_clock() - begun) / SHARE
        return True
