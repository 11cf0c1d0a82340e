"""An answer read twice, side by side: in the form that was asked for, and in any form. Apart, form and ability are not confused."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from agentrl.plugins import RewardResult


@dataclass(frozen=True, slots=True)
class Reading:
    """`answer`: the canonical text of what was read, the same for equal answers (majority votes count it); None: nothing was found."""

    answer: str | None
    is_right: bool


def read_value(value: Fraction | int | None, truth: Fraction | int | None) -> Reading:
    """Return the reading of a number, or of none, against the true one."""
    return Reading(None, False) if value is None else Reading(str(value), value == truth)


@dataclass(frozen=True, slots=True)
class Readings:
    """Both readings of one text. `counts_strict`: which of them the score goes by; `has_format`: the text has the form asked for."""

    strict: Reading
    flexible: Reading
    counts_strict: bool
    has_format: bool

    @property
    def counting(self) -> Reading:
        """The reading that the score goes by."""
        return self.strict if self.counts_strict else self.flexible

    def result(self, *, wrong: float) -> RewardResult:
        """Return 1 for a right answer and `wrong` for any other.

        Metrics: accuracy (of the reading that counts), accuracy_strict, accuracy_flexible, format. Details: answer.
        """
        metrics = {
            "accuracy": float(self.counting.is_right),
            "accuracy_strict": float(self.strict.is_right),
            "accuracy_flexible": float(self.flexible.is_right),
            "format": float(self.has_format),
        }
        return RewardResult(1.0 if self.counting.is_right else wrong, metrics, {"answer": self.counting.answer})
