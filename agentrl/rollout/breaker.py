"""The circuit breaker of one tool or server: after failures in a row, calls are refused for a while, then one may try."""

from __future__ import annotations

import math


class CircuitBreaker:
    """A state machine without a clock: `now` is in seconds of any clock that never goes back.

    closed: calls begin; `max_failures` failures in a row open it. open: none begins until `pause_s` have passed; then one does,
    the probe. Its success closes the breaker, its failure opens it again.

    A breaker that opens again before any call but its probes succeeded stays open twice as long each time, up to `max_pause_s`
    (None: always `pause_s`). `is_open`: begin open, so that the first call is a probe.

    A call holds the ticket that `begin` gave it. What a call says that began before the breaker last opened or closed counts for
    nothing: calls hang in what is down and tell of it one by one.
    """

    def __init__(self, *, max_failures: int, pause_s: float, max_pause_s: float | None = None, is_open: bool = False) -> None:
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
        """Return the ticket of a call that may begin, None when it is refused."""
        if self._open_until is None:
            return self._epoch
        if self._is_probing or now < self._open_until:
            return None
        self._is_probing = True
        return self._epoch

    def succeeded(self, ticket: int) -> None:
        """The call was answered, whatever the model made of it."""
        if ticket != self._epoch:
            return
        self._failures = 0
        if self._is_probing:
            self._open_until, self._is_probing = None, False
            self._epoch += 1
        else:
            self._next_pause_s = self._pause_s

    def failed(self, ticket: int, now: float) -> None:
        """The tool or server itself broke."""
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
        """The call ended and says nothing: it was cancelled, or ran into its deadline. After a probe, the next may try."""
        if ticket == self._epoch:
            self._is_probing = False
