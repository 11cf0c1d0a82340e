"""The garbage collector of a process that plays thousands of trajectories at once.

A trajectory in flight holds some 350 objects that live for minutes, and the collector takes 60 ns for each that it looks at: at 10,000 in
flight a search of everything is a pause of a quarter of a second or more, in which all of them stand still. Cycles are few here.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 5, 2000)
"""Objects made before the youngest are searched for cycles (Python's own: 700), and collections of one generation before the next.

The first two are pauses of 3 and 20 ms. The third is for a process that nobody asks to `collect_oldest`.
"""
DUE = 50
"""Collections of the middle generation that make one of the oldest worth its time: 15 million objects, made and not yet gone."""


def collect_rarely() -> None:
    """Leave what is loaded out of every collection, and collect seldom. Call it once everything is loaded.

    At Python's own pace the collector goes through the trajectories in flight again and again, for a quarter of the loop's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def collect_oldest() -> bool:
    """Search everything but what was frozen, if enough was made since the last time; return whether it was. Call it where nothing waits."""
    if gc.get_count()[2] < DUE:
        return False
    gc.collect()
    return True
