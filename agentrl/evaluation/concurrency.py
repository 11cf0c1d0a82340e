"""How many attempts are under way at once: as many as the servers bear."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import trio

START = 16
"""Attempts at the beginning; doubled in each round until the servers first show that it is too much."""
LATENCY_FACTOR = 4.0
"""Tokens that take so many times longer than in the quickest window wait for something; a batch that is only larger may take as long."""
THROUGHPUT_SHARE = 0.7
"""Of the best window: fewer tokens per second than that, though more attempts wait, and the servers do the same work over and over."""
WINDOW = 16
"""Attempts that are measured together, or as many as there is room for at the window's beginning, if that is more."""


class Concurrency:
    """Additive increase, multiplicative decrease, between 1 and `limit`.

    Until the first trouble each finished attempt makes room for one more, which doubles the number in each round; later a whole
    round makes room for one. A trouble halves it, once per round: what was begun before the last halving says nothing about it.
    `reasons` counts what halved it: overload (a server said so, or failed), timeout (of an attempt), latency (tokens take
    LATENCY_FACTOR times longer than at best, and there are fewer of them per second than THROUGHPUT_SHARE of the best).

    Source: Chiu and Jain 1989, "Analysis of the increase and decrease algorithms for congestion avoidance in computer networks".
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.reasons: Counter[str] = Counter()
        self._limit = limit
        self._room = float(min(START, limit))
        self._slots = trio.CapacityLimiter(int(self._room))
        self._rounds = 0  # halvings so far: an attempt belongs to the round that it began in
        self._congestion = _Congestion(clock)

    @property
    def now(self) -> int:
        """How many attempts may be under way at this moment."""
        return int(self._slots.total_tokens)

    @property
    def round(self) -> int:
        """In which round an attempt begins that begins now."""
        return self._rounds

    async def begin(self, attempt: str) -> int:
        """Wait for room for the attempt of this name, and return the round that it begins in."""
        await self._slots.acquire_on_behalf_of(attempt)
        return self._rounds

    def end(self, attempt: str) -> None:
        """Give the attempt's room back."""
        self._slots.release_on_behalf_of(attempt)

    def went_well(self, began_in: int, seconds: float, num_tokens: int) -> None:
        """Take note of an attempt that was answered: `num_tokens` were sampled, for which it waited `seconds`."""
        if self._congestion.add(seconds, num_tokens, room=self.now):
            self.trouble(began_in, "latency")
        else:
            self._set(self._room + (1.0 if self._rounds == 0 else 1.0 / self._room))

    def trouble(self, began_in: int, reason: str) -> None:
        """Take note of a trouble: half as many attempts, unless that was done since the attempt began."""
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
    """Tells servers that queue from servers that are well filled: both answer slowly, but the former do less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._quickest = float("inf")  # seconds per token, of the best window
        self._most = 0.0  # tokens per second, of the best window
        self.begin_window(0)

    def begin_window(self, room: int) -> None:
        """Measure anew: what was begun under other conditions says nothing."""
        self._began = self._clock()
        self._size = max(WINDOW, room)
        self._num_tokens = 0
        self._paces: list[float] = []

    def add(self, seconds: float, num_tokens: int, *, room: int) -> bool:
        """Take note of an attempt; at the end of a window, tell whether the servers queue. `room`: for how many attempts there is."""
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
