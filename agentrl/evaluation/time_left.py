"""Time left of an evaluation, estimated from how long attempts took and how long those in flight have taken.

The pace of finished attempts alone is wrong by an order of magnitude at first: with 32 attempts at once, the
first to finish says little about the others, which are almost done too.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import neg

MAX_SIMULATED = 512
"""Waiting attempts that are simulated one by one. The rest is counted at the mean."""
MAX_OUTLASTING = 1.5
"""Chosen by the simulation of tests/evaluation/test_time_left.py, from 1.25, 1.5 and 2."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, cover [0, 1) evenly at every count: quantiles without randomness."""


class Durations:
    """Distribution of the seconds that an attempt takes, from finished attempts and those in flight.

    Up to the longest time seen: the product-limit estimator, in which an attempt in flight counts as longer
    than its time so far. Attempts that outlast that time are assumed to end, evenly distributed, within as
    much time again, at the latest after `limit_s`.

    Source: Kaplan and Meier 1958, "Nonparametric estimation from incomplete observations".
    """

    def __init__(self, finished: Sequence[float], running: Sequence[float], *, limit_s: float) -> None:
        """`finished`: durations; `running`: times so far, of at least one attempt. All in seconds."""
        self._longest = max([*finished, *running])
        self._end = max(self._longest, min(MAX_OUTLASTING * self._longest, limit_s))
        self._times, self._survival = [0.0], [1.0]  # survival: share of attempts that take longer
        events = sorted([(seconds, 0) for seconds in finished] + [(seconds, 1) for seconds in running])
        for index, (seconds, is_running) in enumerate(events):
            if not is_running:
                self._times.append(seconds)
                self._survival.append(self._survival[-1] * (1 - 1 / (len(events) - index)))

    def quantile(self, share: float, *, after_s: float = 0.0) -> float:
        """Return the duration that `share` in [0, 1) of the attempts that take longer than `after_s` do not
        exceed.
        """
        survival = self._survival[bisect_right(self._times, after_s) - 1] * (1 - share)
        # `_survival` falls: the first value that is not above the target, but for rounding
        index = bisect_left(self._survival, -survival - 1e-12, key=neg)
        if index < len(self._times):
            return max(self._times[index], after_s)
        rest = self._survival[-1]
        start = max(self._longest, after_s)
        return start + (1 - survival / rest) * (max(self._end, start) - start)


class TimeLeft:
    """Estimates the time left from the starts and ends of attempts.

    Args:
        num_attempts: to be played by this process.
        max_tokens: tokens that an attempt may sample; with the seconds per token of finished attempts, it
            bounds how long the others take.
        timeout_s: no attempt takes longer.
    """

    def __init__(
        self,
        num_attempts: int,
        *,
        max_tokens: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_attempts = num_attempts
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._clock = clock
        self._started: dict[str, float] = {}
        self._finished: list[float] = []
        self._num_tokens = 0

    def began(self, key: str) -> None:
        """Count an attempt that starts."""
        self._started[key] = self._clock()

    def ended(self, key: str, num_tokens: int) -> None:
        """Count the end of an attempt that sampled `num_tokens`."""
        self._finished.append(self._clock() - self._started.pop(key))
        self._num_tokens += num_tokens

    def seconds(self, at_once: int) -> float:
        """Return the estimated seconds until all attempts have ended, NaN before the first one has.

        The attempts in flight and those that wait are scheduled on `at_once` slots, with durations spread
        evenly over the quantiles of `Durations`.
        """
        if not self._finished:
            return math.nan
        now = self._clock()
        running = [now - start for start in self._started.values()]
        waiting = max(0, self._num_attempts - len(self._finished) - len(running))
        durations = Durations(self._finished, running, limit_s=self._limit_s())
        shares = _even_shares()
        ends = [durations.quantile(next(shares), after_s=seconds) - seconds for seconds in sorted(running)]
        simulated = min(waiting, MAX_SIMULATED)
        lengths = [durations.quantile(next(shares)) for _ in range(simulated)]
        left_s = _makespan(ends, lengths, slots=max(1, at_once))
        rest = waiting - simulated
        return left_s + (rest * sum(lengths) / simulated / max(1, at_once) if rest else 0.0)

    def _limit_s(self) -> float:
        if not self._num_tokens:
            return self._timeout_s
        return min(self._timeout_s, self._max_tokens * sum(self._finished) / self._num_tokens)


def _even_shares() -> Iterator[float]:
    share = 0.5
    while True:
        yield share
        share = (share + GOLDEN) % 1


def _makespan(running: Sequence[float], waiting: Sequence[float], *, slots: int) -> float:
    """Return when the last attempt ends. running: seconds left of attempts; waiting: lengths of attempts that
    start in order, each in the first free slot.
    """
    ends = [*running, *[0.0] * (slots - len(running))]
    heapq.heapify(ends)
    for length in waiting:
        while len(ends) > slots:  # the number of slots was reduced: the first to end is not replaced
            heapq.heappop(ends)
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends, default=0.0)
