"""How long the trio loop of a rollout actor computes between two checkpoints: while it does, all its trajectories stand still.

A gap is the CPU time of the loop's thread from the end of one task's step to the end of the next. Waiting for the network is not in
it, nor is what other processes and threads take from this one; a collection of garbage is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import trio

Clock = Callable[[], int]
"""Returns nanoseconds."""

SHORT_S = 1 / 8192
"""Gaps below (0.12 ms) are only counted."""
BUCKETS_PER_DOUBLING = 4
MAX_BUCKETS = 4 * 20
"""The last bucket begins at 2 minutes and has all that is longer."""
REFRESH_NS = 1_000_000
"""How old a reading of the thread's clock may be, which costs five times as much as one of the wall's."""
PREFIX = "loop_gaps/"
BLOCKED_S = 1.0
"""A step that takes longer is told where somebody asks what goes on."""


class LoopGaps(trio.abc.Instrument):
    """Counts gaps in buckets of growing width; register it with the loop that it watches.

    A gap is read from the wall's clock, which cannot be shorter, and only if that says a millisecond or more, from the thread's. A step
    may so be taken for up to REFRESH_NS longer than it was, never for shorter.
    """

    def __init__(self, wall_clock: Clock = time.perf_counter_ns, thread_clock: Clock = time.thread_time_ns) -> None:
        self._wall_clock = wall_clock
        self._thread_clock = thread_clock
        self._num_short = 0
        self._counts = [0] * (MAX_BUCKETS + 1)
        self._wall_ns = self._read_at_ns = self._thread_ns = 0

    def before_run(self) -> None:
        """Begin: called in the thread of the loop."""
        self._wall_ns = self._read_at_ns = self._wall_clock()
        self._thread_ns = self._thread_clock()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count the gap that ends here."""
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
        """Seconds since a task of the loop ended its step: it waits for events, or computes; safe to read from another thread."""
        return (self._wall_clock() - self._wall_ns) / 1e9

    @property
    def is_blocked(self) -> bool:
        """Whether no task has ended a step for longer than any should take; true of a loop, too, in which nothing wakes up meanwhile."""
        return self.since_step_s > BLOCKED_S

    def counters(self) -> dict[str, float]:
        """Return the number of gaps by the upper bound of their bucket, `loop_gaps/<seconds>`; safe to call from another thread."""
        counts = {SHORT_S: self._num_short} | {upper_bound(index): count for index, count in enumerate(self._counts) if count}
        return {f"{PREFIX}{bound:.6g}": float(count) for bound, count in counts.items()}


_SHORT_NS = SHORT_S * 1e9


def upper_bound(index: int) -> float:
    """Return the end of a bucket in seconds."""
    return SHORT_S * 2 ** ((index + 1) / BUCKETS_PER_DOUBLING)


def without_gaps(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the counters that a person can read."""
    return {name: value for name, value in counters.items() if not name.startswith(PREFIX)}


def gap_metrics(growth: Mapping[str, float]) -> dict[str, float]:
    """Return `p999` and `max` in seconds of the gaps that counters grew by: the upper bound of the bucket, at most 19 % above.

    Nothing where no gap was counted. An actor that was replaced counts from zero, so that a counter may have shrunk: that is no gap.
    """
    gaps = sorted((float(name.removeprefix(PREFIX)), count) for name, count in growth.items() if name.startswith(PREFIX) and count > 0)
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
