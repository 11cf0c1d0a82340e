"""`RecentRate`: a rate over the last steps, for what is counted less often than steps are made."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0


class RecentRate:
    """Rate of a counter over the last `WINDOW_S` seconds or over the last step, whichever is longer.

    A server's tokens count when it answers, and within a step that is shorter than a turn none may answer.

    total: the counter before the first step.
    """

    def __init__(self, total: float) -> None:
        self._points = deque([(0.0, total)])  # (seconds since the beginning, counter), one per step

    def after(self, step_s: float, *, total: float) -> float:
        """Return the rate per second after a step of `step_s` > 0 seconds, which ended at `total`."""
        now = self._points[-1][0] + step_s
        self._points.append((now, total))
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_S:
            self._points.popleft()
        then, before = self._points[0]
        return (total - before) / (now - then)
