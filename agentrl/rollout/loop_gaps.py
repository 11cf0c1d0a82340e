"""Measures how long the trio loop of a rollout actor is blocked between two checkpoints; all its attempts
wait meanwhile.

A gap is the CPU time of the loop's thread from the end of one task's step to the end of the next. It includes
garbage collection. It excludes waiting for the network and time that other processes and threads take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import trio

Clock = Callable[[], int]
"""Returns nanoseconds."""

SHORT_S = 1 / 8192
"""Gaps shorter than this (0.12 ms) share one counter."""
BUCKETS_PER_DOUBLING = 4
MAX_BUCKETS = 4 * 20
"""The last bucket begins at 2 minutes and has no upper bound."""
REFRESH_NS = 1_000_000
"""Maximal age of a reading of the thread's clock.

Reading it costs five times as much as reading the wall clock.
"""
PREFIX = "loop_gaps/"
BLOCKED_S = 1.0
"""A loop without a finished step for longer counts as blocked."""


class LoopGaps(trio.abc.Instrument):
    """Counts gaps in buckets of growing width. Register it as an instrument of the loop to watch.

    The wall-clock duration is an upper bound of the gap. The thread's clock is read only if REFRESH_NS have
    passed since it was last read. A gap can therefore be overestimated by up to REFRESH_NS, but never
    underestimated.
    """

    def __init__(
        self, wall_clock: Clock = time.perf_counter_ns, thread_clock: Clock = time.thread_time_ns
    ) -> None:
        self._wall_clock = wall_clock
        self._thread_clock = thread_clock
        self._num_short = 0
        self._counts = [0] * (MAX_BUCKETS + 1)
        self._wall_ns = self._read_at_ns = self._thread_ns = 0

    def before_run(self) -> None:
        """Start measuring. trio calls it in the thread of the loop."""
        self._wall_ns = self._read_at_ns = self._wall_clock()
        self._thread_ns = self._thread_clock()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count the gap that ends with this step."""
        now = self._wall_clock()
        gap = now - self._wall_ns
        self._wall_ns = now
        if now - self._read_at_ns >= REFRESH_NS:
            read = self._thread_clock()
            gap = min(gap, read - self._thread_ns)
            self._thread_ns = read
            self._read_at_ns = now
        if gap < _SHORT_NS:
            self._num_short += 1
        else:
            self._counts[min(MAX_BUCKETS, int(BUCKETS_PER_DOUBLING * math.log2(gap / _SHORT_NS)))] += 1

    @property
    def since_step_s(self) -> float:
        """Seconds since the last step of a task ended.

        The loop then waits for events or computes. Thread-safe.
        """
        return (self._wall_clock() - self._wall_ns) / 1e9

    @property
    def is_blocked(self) -> bool:
        """Whether no step has ended for BLOCKED_S.

        This is also true of an idle loop in which no task wakes up.
        """
        return self.since_step_s > BLOCKED_S

    def counters(self) -> dict[str, float]:
        """Return the number of gaps per bucket, named `loop_gaps/<upper bound in seconds>`. Thread-safe."""
        counts = {SHORT_S: self._num_short} | {
            upper_bound(index): count for index, count in enumerate(self._counts) if count
        }
        return {f"{PREFIX}{bound:.6g}": float(count) for bound, count in counts.items()}


_SHORT_NS = SHORT_S * 1e9


def upper_bound(index: int) -> float:
    """Return the upper bound of a bucket in seconds."""
    return SHORT_S * 2 ** ((index + 1) / BUCKETS_PER_DOUBLING)


def without_gaps(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the counters without the gap buckets."""
    return {name: value for name, value in counters.items() if not name.startswith(PREFIX)}


def gap_metrics(growth: Mapping[str, float]) -> dict[str, float]:
    """Return `p999` and `max` in seconds of the gaps counted in `growth`, the increase of the counters.

    Values are upper bounds of buckets, at most 19 % too high. Returns {} if no gap was counted. A replaced
    actor counts from zero again, so a counter can shrink; negative growth is ignored.
    """
    gaps = sorted(
        (float(name.removeprefix(PREFIX)), count)
        for name, count in growth.items()
        if name.startswith(PREFIX) and count > 0
    )
    if not gaps:
        return {}
    above = 1e-3 * sum(count for _, count in gaps)
    p999 = gaps[-1][0]
    for bound, count in reversed(gaps):
        above -= count
        if above < 0:
            p999 = bound
            break
    return {"p999": p999, "max": gaps[-1][0]}
