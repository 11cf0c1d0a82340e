"""Two readings of an answer, in the requested form and in any form: metrics then separate form from
ability.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from agentrl.errors import DataError
from agentrl.plugins import RewardResult
from agentrl.types import Task

RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Reading:
    """`answer`: its canonical text, the same for equal answers (for majority votes).

    None: nothing was found.
    """

    answer: str | None
    is_right: bool


def relative_tolerance(task: Task) -> float:
    """Return the relative tolerance for a truth that is not an integer: `extra_info.tolerance` of the task,
    else 1e-9.

    Raises:
        DataError: it is not a number in [0, 1).
    """
    tolerance = task.extra_info.get("tolerance")
    if tolerance is None:
        return RELATIVE_TOLERANCE
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise DataError(
            f"task {task.task_id}: extra_info.tolerance={tolerance!r} is not a relative "
            "tolerance; use a number from 0 up to, but not including, 1"
        )
    return float(tolerance)


def require_truth(task: Task, reward: str, *, is_given: bool, what: str) -> None:
    """Raise DataError unless the task's ground truth is `what` the reward needs."""
    if not is_given:
        raise DataError(
            f"task {task.task_id}: reward {reward!r} needs {what} as reward_model.ground_truth (got "
            f"{task.ground_truth!r:.80})"
        )


def read_value(
    value: Fraction | int | None, truth: Fraction | int | None, *, tolerance: float = 0.0
) -> Reading:
    """Compare a number with the truth.

    `tolerance` is relative; it applies to truths that are not integers.
    """
    if value is None or truth is None:
        return Reading(None if value is None else str(value), False)
    expected = Fraction(truth)
    if expected.denominator == 1:
        return Reading(str(value), value == expected)
    allowed = abs(expected) * Fraction(str(tolerance))
    return Reading(str(value), abs(Fraction(value) - expected) <= allowed)


@dataclass(frozen=True, slots=True)
class Readings:
    """Both readings of a text. `counts_strict`: which one is scored. `has_format`: has the requested form."""

    strict: Reading
    flexible: Reading
    counts_strict: bool
    has_format: bool

    @property
    def counting(self) -> Reading:
        """The reading that is scored."""
        return self.strict if self.counts_strict else self.flexible

    def result(self, *, wrong: float) -> RewardResult:
        """Return the value 1 for a right answer, else `wrong`.

        Metrics: accuracy (of the scored reading), accuracy_strict, accuracy_flexible, format. Details:
            answer.
        """
        metrics = {
            "accuracy": float(self.counting.is_right),
            "accuracy_strict": float(self.strict.is_right),
            "accuracy_flexible": float(self.flexible.is_right),
            "format": float(self.has_format),
        }
        return RewardResult(
            1.0 if self.counting.is_right else wrong, metrics, {"answer": self.counting.answer}
        )
