"""How many attempts are under way at once: as many as the servers bear."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

import trio

START = 16
"""Attempts at the beginning; doubled in each round until the servers first show that it is too much."""
LATENCY_FACTOR = 4.0
"""A token that takes so many times longer than in the quickest window says that requests queue: batching alone costs far less."""
WINDOW = 16
"""Attempts whose seconds per token are compared: their median, for single attempts wait for tools and for each other."""


class Concurrency:
    """Additive increase, multiplicative decrease, between 1 and `limit`.

    Until the first trouble each finished attempt makes room for one more, which doubles the number in each round; later a whole
    round makes room for one. A trouble halves it, once per round: what was begun before the last halving says nothing about it.
    `reasons` counts what halved it: overload (a server said so, or failed), latency (tokens take LATENCY_FACTOR times longer), timeout.

    Source: Chiu and Jain 1989, "Analysis of the increase and decrease algorithms for congestion avoidance in computer networks".
    """

    def __init__(self, limit: int) -> None:
        self.reasons: Counter[str] = Counter()
        self._limit = limit
        self._room = float(min(START, limit))
        self._slots = trio.CapacityLimiter(int(self._room))
        self._rounds = 0  # halvings so far: an attempt belongs to the round that it began in
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._quickest: float | None = None

    @property
    def now(self) -> int:
        """How many attempts may be under way at this moment."""
        return int(self._slots.total_tokens)

    async def begin(self, attempt: str) -> int:
        """Wait for room for the attempt of this name, and return the round that it begins in."""
        await self._slots.acquire_on_behalf_of(attempt)
        return self._rounds

    def end(self, attempt: str) -> None:
        """Give the attempt's room back."""
        self._slots.release_on_behalf_of(attempt)

    def went_well(self, began_in: int, seconds_per_token: float | None) -> None:
        """Take note of an attempt that was answered; its speed may be a trouble. None: nothing was sampled in measurable time."""
        if seconds_per_token is not None and self._is_slow(seconds_per_token):
            self.trouble(began_in, "latency")
            return
        self._set(self._room + (1.0 if self._rounds == 0 else 1.0 / self._room))

    def trouble(self, began_in: int, reason: str) -> None:
        """Take note of a trouble: half as many attempts, unless that was done since the attempt began."""
        if began_in < self._rounds:
            return
        self.reasons[reason] += 1
        self._rounds += 1
        self._recent.clear()
        self._set(self._room / 2)

    @property
    def round(self) -> int:
        return self._rounds

    def _is_slow(self, seconds_per_token: float) -> bool:
        self._recent.append(seconds_per_token)
        if len(self._recent) < WINDOW:
            return False
        pace = median(self._recent)
        self._quickest = pace if self._quickest is None else min(pace, self._quickest)
        return pace > LATENCY_FACTOR * self._quickest

    def _set(self, room: float) -> None:
        self._room = min(max(room, 1.0), float(self._limit))
        self._slots.total_tokens = int(self._room)
