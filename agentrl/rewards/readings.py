"""An answer read twice, side by side: in the form that was asked for, and in any form. Apart, form and ability are not confused."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from agentrl.errors import DataError
from agentrl.plugins import RewardResult
from agentrl.types import Task

RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Reading:
    """`answer`: the canonical text of what was read, the same for equal answers (majority votes count it); None: nothing was found."""

    answer: str | None
    is_right: bool


def relative_tolerance(task: Task) -> float:
    """Return how far an answer may be from a true value that is a decimal and no integer: the row's `extra_info.tolerance`, else 1e-9.

    Raises:
        DataError: the row's is no number from 0 to below 1.
    """
    tolerance = task.extra_info.get("tolerance")
    if tolerance is None:
        return RELATIVE_TOLERANCE
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise DataError(
            f"task {task.task_id}: extra_info.tolerance={tolerance!r} is no relative tolerance; give a number from 0 to below 1"
        )
    return float(tolerance)


def read_value(value: Fraction | int | None, truth: Fraction | int | None, *, tolerance: float = 0.0) -> Reading:
    """Return the reading of a number, or of none, against the true one; `tolerance`: relative, for a true one that is no integer."""
    if value is None or truth is None:
        return Reading(None if value is None else str(value), False)
    expected = Fraction(truth)
    allowed = abs(expected) * Fraction(str(tolerance)) if expected.denominator > 1 else Fraction(0)
    return Reading(str(value), abs(Fraction(value) - expected) <= allowed)


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
