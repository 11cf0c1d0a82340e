"""GSM8K's answers: the number after `####`, or the last number of the text.

The checkers are pure functions of their text: interactions and other rewards use them too.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task

MAX_DIGITS = 100
"""A longer run of digits is no answer, and converting it would be slow."""
MAX_TAIL_CHARS = 2000
"""How far an answer is looked for: it bounds the time, for the rewards run in the event loop."""

# Sign before or after the currency; a minus right after a word, a digit or a bracket subtracts. Digits are plain or in
# groups of three. What follows (a unit, a percent sign, a full stop) is not part of the number.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])(?P<sign>[-+\u2212]))?\s?[$\u20ac\u00a3\u00a5]?\s?(?P<inner>(?<=[$\u20ac\u00a3\u00a5])[-\u2212])?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)
_MARK = "####"


def extract_answer(text: str, *, strict: bool) -> Fraction | None:
    """Return the final answer in `text`, or None when there is none.

    It is the first number on the line of the last `####`; without such a number, and unless `strict`, the last number
    within MAX_TAIL_CHARS of the text's end. Thousands separators, signs, decimals, currency, units and percent signs (50%
    is 50) are understood.
    """
    _, mark, tail = text.rpartition(_MARK)
    if mark and (found := _NUMBER.search(tail.lstrip().partition("\n")[0][:MAX_TAIL_CHARS])):
        return _number(found)
    if strict:
        return None
    numbers = list(_NUMBER.finditer(text, max(0, len(text) - MAX_TAIL_CHARS)))
    return _number(numbers[-1]) if numbers else None


def parse_number(ground_truth: Any) -> Fraction | None:
    """Return a dataset's ground truth (a number, "1,234", or GSM8K's whole solution with `####`) as a number, or None."""
    if isinstance(ground_truth, str):
        return extract_answer(ground_truth, strict=False)
    is_number = isinstance(ground_truth, (int, float)) and not isinstance(ground_truth, bool) and math.isfinite(ground_truth)
    # A float through its shortest text: 0.1 means one tenth, not the binary number next to it.
    return Fraction(str(ground_truth)) if is_number else None


def is_correct(answer: Fraction | None, ground_truth: Any) -> bool:
    """Tell whether `answer` is the number that `ground_truth` stands for."""
    return answer is not None and answer == parse_number(ground_truth)


def require_number(task: Task, reward: str) -> None:
    """Raise DataError unless the task's ground truth is a number."""
    if parse_number(task.ground_truth) is None:
        raise DataError(
            f"task {task.task_id}: reward {reward!r} needs a number as reward_model.ground_truth (got {str(task.ground_truth)[:80]!r})"
        )


class Gsm8kOptions(Options):
    """`strict`: only what follows `####` counts, else the last number will do. `format_score`: for a wrong answer in the right form."""

    strict: bool = True
    format_score: float = 0.0


class Gsm8k(Reward):
    """1 for the right number in the last assistant message, `format_score` for a wrong one, 0 for none.

    Metrics: accuracy, format (an answer after `####`). What counts as an answer for `format_score` depends on `strict`.
    """

    name: ClassVar[str] = "gsm8k"
    runs_in: RunsIn = "inline"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(Gsm8kOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        require_number(task, self.name)

    def score(self, attempt: Attempted) -> RewardResult:
        text, needs_mark = attempt.answer, attempt.handed_in is None
        answer = extract_answer(text, strict=self._options.strict and needs_mark)
        accuracy = float(is_correct(answer, attempt.task.ground_truth))
        wrong = self._options.format_score if answer is not None else 0.0
        return RewardResult(accuracy or wrong, {"accuracy": accuracy, "format": float(extract_answer(text, strict=needs_mark) is not None)})


def _number(found: re.Match[str]) -> Fraction | None:
    digits = found["digits"].replace(",", "")
    if len(digits) > MAX_DIGITS:
        return None
    value = Fraction(digits if digits[0] != "." else "0" + digits)
    return -value if (found["sign"] or found["inner"] or "+") in "-\u2212" else value
