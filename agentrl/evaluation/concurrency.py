"""Control of the number of concurrent attempts: as many as the servers can handle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import trio

START = 16
"""Attempts at the beginning. The number doubles each round until the servers are first overloaded."""
LATENCY_FACTOR = 4.0
"""If tokens take this many times longer than in the quickest window, they may be queueing. A larger batch
alone may be as slow, so throughput decides too.
"""
THROUGHPUT_SHARE = 0.7
"""Share of the best window's throughput. Fewer tokens per second,
although more attempts run, mean that the servers repeat work.
"""
WINDOW = 16
"""Attempts per measuring window; the limit at the start of the window, if that is larger."""


class Concurrency:
    """Additive increase, multiplicative decrease (AIMD), between 1 and `limit`.

    Until the first trouble, each finished attempt raises the limit by one, which doubles it each round (slow
    start). After that, a whole round raises it by one. Trouble halves the limit, at most once per round:
    attempts that began before the last halving carry no new information.

    `reasons` counts the halvings by cause: overload (a server reported it, or failed), timeout (of an
    attempt), latency (tokens take LATENCY_FACTOR times longer than at best, and throughput is below
    THROUGHPUT_SHARE of the best).

    Source: Chiu and Jain 1989, "Analysis of the increase and decrease algorithms for congestion avoidance in
    computer networks".
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.reasons: Counter[str] = Counter()
        self._limit = limit
        self._room = float(min(START, limit))
        self._slots = trio.CapacityLimiter(int(self._room))
        self._rounds = 0  # halvings so far; an attempt belongs to the round in which it began
        self._congestion = _Congestion(clock)

    @property
    def now(self) -> int:
        """The current limit: how many attempts may run at this moment."""
        return int(self._slots.total_tokens)

    @property
    def round(self) -> int:
        """The current round, to which an attempt that begins now belongs."""
        return self._rounds

    async def begin(self, attempt: str) -> int:
        """Wait for a slot for the attempt of this name, and return the round in which it begins."""
        await self._slots.acquire_on_behalf_of(attempt)
        return self._rounds

    def end(self, attempt: str) -> None:
        """Release the attempt's slot."""
        self._slots.release_on_behalf_of(attempt)

    def went_well(self, began_in: int, seconds: float, num_tokens: int) -> None:
        """Record a successful attempt: `num_tokens` were sampled, in `seconds` of waiting for the servers."""
        if self._congestion.add(seconds, num_tokens, room=self.now):
            self.trouble(began_in, "latency")
        else:
            # Slow start adds 1 per attempt; afterwards 1 / room, so that a round of `room` attempts adds 1.
            self._set(self._room + (1.0 if self._rounds == 0 else 1.0 / self._room))

    def trouble(self, began_in: int, reason: str) -> None:
        """Halve the limit, unless it was halved since the attempt began."""
        if began_in < self._rounds:
            return
        self.reasons[reason] += 1
        self._rounds += 1
        self._set(self._room / 2)
        self._congestion.begin_window(self.now)

    def _set(self, room: float) -> None:
        self._room = min(max(room, 1.0), float(self._limit))
        self._slots.total_tokens = int(self._room)


class _Congestion:
    """Detects servers that queue.

    Well-filled servers answer slowly too, but only queueing lowers the throughput.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._quickest = float("inf")  # seconds per token, in the best window
        self._most = 0.0  # tokens per second, in the best window
        self.begin_window(0)

    def begin_window(self, room: int) -> None:
        """Start a new window; measurements under other conditions are discarded."""
        self._began = self._clock()
        self._size = max(WINDOW, room)
        self._num_tokens = 0
        self._paces: list[float] = []

    def add(self, seconds: float, num_tokens: int, *, room: int) -> bool:
        """Record an attempt; at the end of a window, return whether the servers queue.

        `room`: the current limit on concurrent attempts, for the size of the next window.
        """
        if seconds <= 0 or not num_tokens:
            return False
        self._paces.append(seconds / num_tokens)
        self._num_tokens += num_tokens
        if len(self._paces) < self._size:
            return False
        pace, throughput = median(self._paces), self._num_tokens / max(self._clock() - self._began, 1e-9)
        self._quickest, self._most = min(self._quickest, pace), max(self._most, throughput)
        self.begin_window(room)
        return pace > LATENCY_FACTOR * self._quickest and throughput < THROUGHPUT_SHARE * self._most
