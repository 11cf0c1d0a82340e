"""The circuit breaker of one tool or server: after repeated failures it refuses calls for a while, then
allows one probe.
"""

from __future__ import annotations

import math


class CircuitBreaker:
    """A state machine without a clock of its own: `now` is in seconds on any monotonic clock.

    closed: calls are allowed. `max_failures` failures in a row open the breaker.
    open: no call is allowed for `pause_s`. Then one call is allowed, the probe. Its success closes the
    breaker; its failure opens it again.

    The pause doubles, up to `max_pause_s` (None: always `pause_s`), each time the breaker opens again before
    a call other than a probe succeeds. `is_open`: start open, so that the first call is a probe.

    A call reports its result with the ticket from `begin`. The result is ignored if the breaker opened or
    closed after the call began: calls that hang in a dead service fail one by one, long after the breaker
    opened.
    """

    def __init__(
        self, *, max_failures: int, pause_s: float, max_pause_s: float | None = None, is_open: bool = False
    ) -> None:
        self._max_failures = max_failures
        self._pause_s = self._next_pause_s = pause_s
        self._max_pause_s = pause_s if max_pause_s is None else max_pause_s
        self._failures = 0
        self._open_until: float | None = -math.inf if is_open else None  # None: closed
        self._is_probing = False
        self._epoch = 0
        self.num_openings = 0

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    def begin(self, now: float) -> int | None:
        """Return a ticket for a call; None if the call is refused."""
        if self._open_until is None:
            return self._epoch
        if self._is_probing or now < self._open_until:
            return None
        self._is_probing = True
        return self._epoch

    def succeeded(self, ticket: int) -> None:
        """Report that the call was answered, even if the answer is an error of the model's call."""
        if ticket != self._epoch:
            return
        self._failures = 0
        if self._is_probing:
            self._open_until, self._is_probing = None, False
            self._epoch += 1
        else:
            self._next_pause_s = self._pause_s

    def failed(self, ticket: int, now: float) -> None:
        """Report that the tool or server itself broke."""
        if ticket != self._epoch:
            return
        self._failures += 1
        if self._is_probing or self._failures >= self._max_failures:
            self._open_until, self._is_probing = now + self._next_pause_s, False
            self._next_pause_s = min(2 * self._next_pause_s, self._max_pause_s)
            self._failures = 0
            self._epoch += 1
            self.num_openings += 1

    def abandoned(self, ticket: int) -> None:
        """Report that the call was cancelled or timed out, which proves nothing.

        If it was the probe, another may follow.
        """
        if ticket == self._epoch:
            self._is_probing = False
