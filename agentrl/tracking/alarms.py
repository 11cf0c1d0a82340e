"""`Alarm`: what trackers are told when a metric crosses its bound, or returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALARMS_NAME = "alarms/log"
"""Name under which trackers show alarms as text."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule was violated at a step (`raised`), or its metric has returned (`cleared`).

    `bound` is absolute.
    """

    step: int
    event: Literal["raised", "cleared"]
    rule: str
    metric: str
    value: float
    side: Literal["at_most", "at_least"]
    bound: float
    advice: str

    def line(self) -> str:
        """Return the alarm as one line of text."""
        relation = ">" if self.side == "at_most" else "<"
        return (
            f"alarm {self.rule} at step {self.step}: {self.metric} = {self.value:.4g} {relation} "
            f"{self.bound:.4g}; {self.advice}"
        )
