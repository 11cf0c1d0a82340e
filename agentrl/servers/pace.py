"""How long a token takes if so many requests run: `agentrl simulate --calibrate` fits a line to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from agentrl.types import Generation

PACE_SUMS = ("tokens", "running", "running_squared", "seconds", "running_seconds")


@dataclass(slots=True)
class _Occupancy:
    """Requests that run on a server, and the integral of their number over time, in request seconds."""

    running: int = 0
    request_s: float = 0.0
    since: float = 0.0

    def change(self, by: int, now: float) -> float:
        """Count a request that begins or ends; return the integral until `now`."""
        self.request_s += self.running * (now - self.since)
        self.running, self.since = self.running + by, now
        return self.request_s


class TokenPace:
    """Sums over answered requests, weighted by their tokens. They only grow; readers take differences.

    A request of n tokens that took s seconds, while r requests ran in the mean, adds n to `tokens`, n r to
    `running`, n r^2 to `running_squared`, s to `seconds`, and s r to `running_seconds`. The line of least
    squares through s / n over r needs no more. Requests of other processes on these servers are not counted.
    """

    def __init__(self) -> None:
        self._servers: defaultdict[str, _Occupancy] = defaultdict(_Occupancy)
        self._sums = dict.fromkeys(
            ("tokens", "running", "running_squared", "seconds", "running_seconds"), 0.0
        )

    @contextmanager
    def request(self, url: str) -> Iterator[list[Generation]]:
        """Time a request to a server. Yields a list that takes its answer; without one, nothing is added."""
        server, answers = self._servers[url], list[Generation]()
        began = trio.current_time()
        before = server.change(1, began)
        try:
            yield answers
        finally:
            now = trio.current_time()
            request_s = server.change(-1, now) - before
            if now > began:
                self._add(sum(len(answer.token_ids) for answer in answers), now - began, request_s)

    def _add(self, num_tokens: int, seconds: float, request_s: float) -> None:
        if not num_tokens:
            return
        running = request_s / seconds
        added = (num_tokens, num_tokens * running, num_tokens * running**2, seconds, seconds * running)
        for name, value in zip(PACE_SUMS, added, strict=True):
            self._sums[name] += value

    def sums(self) -> dict[str, float]:
        """Return the sums so far. Thread-safe."""
        return dict(self._sums)
