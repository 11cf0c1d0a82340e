"""Progress of a run, its pace and its ETA."""

from __future__ import annotations

import math
from collections import deque

from agentrl.tracking.metrics import StepRecord

WINDOW_STEPS = 20
"""Steps that the pace is averaged over: enough to smooth validations, few enough to follow longer
responses."""


class Progress:
    """Tracks step and running time from the records."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.wall_s = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS + 1)

    def add(self, record: StepRecord) -> None:
        self.wall_s = record.wall_s
        if record.kind == "train":
            # the run went back to a checkpoint: earlier steps do not give the pace
            if record.step <= self.step:
                self._recent.clear()
            self.step = record.step
            self._recent.append((record.step, record.wall_s))

    def seconds_per_step(self) -> float | None:
        """Return the mean time of the last steps, validations included; None before two steps."""
        if len(self._recent) < 2:
            return None
        (first_step, first_s), (last_step, last_s) = self._recent[0], self._recent[-1]
        return (last_s - first_s) / (last_step - first_step) if last_step > first_step else None

    def eta_s(self) -> float | None:
        """Return the seconds left at this pace; None while pace or total are unknown."""
        pace = self.seconds_per_step()
        if pace is None or self.total_steps is None:
            return None
        return max(0, self.total_steps - self.step) * pace


def duration(seconds: float | None) -> str:
    """Return `m:ss` or `h:mm:ss`; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
