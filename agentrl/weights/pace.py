"""Deadlines of publishes: a constant, and the time that the bytes need at the measured rate."""

from __future__ import annotations

FIRST_BYTES_PER_S = 200e6
"""Assumed until a publish was measured: slower than most disks and networks."""
SLACK = 4.0
"""An attempt may take so many times as long for its bytes as the last one did."""


class Pace:
    """How long an attempt to update servers may take.

    timeout_s: allowed in addition to the time for the bytes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._bytes_per_s = FIRST_BYTES_PER_S

    def allowed_s(self, num_bytes: int) -> float:
        """Return the seconds that an attempt with `num_bytes` for each server may take."""
        return self._timeout_s + self._own_s(num_bytes)

    def limit(self, num_bytes: int) -> str:
        """Return the origin of `allowed_s`, for messages."""
        own_s = self._own_s(num_bytes)
        more = f", and {own_s:.0f} s for {num_bytes / 1e9:.1f} GB" if own_s >= 1 else ""
        return f"rollout.weights.timeout_s={self._timeout_s:g}{more}"

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Note that an attempt with `num_bytes` for each server succeeded after `seconds`."""
        if num_bytes and seconds > 0:
            self._bytes_per_s = num_bytes / seconds

    def _own_s(self, num_bytes: int) -> float:
        return SLACK * num_bytes / self._bytes_per_s
