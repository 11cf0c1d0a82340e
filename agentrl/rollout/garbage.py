"""The garbage collector of a process that plays thousands of trajectories at once."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 50)
"""Objects made before the youngest are searched for cycles (Python's own: 700), and collections of one generation before the next."""


def collect_rarely() -> None:
    """Leave what is loaded out of every collection, and collect seldom.

    A trajectory in flight holds thousands of objects that live for minutes. Python's own pace goes through them again and again, for
    a quarter of the loop's time, and in long pauses; cycles are few here. Call it once everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
