"""Reward for GSM8K answers: the number after `####`, or the number that concludes the text.

The extraction functions are pure; interactions and other rewards use them too.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, ClassVar

from agentrl.extras.answers.answer_number import (
    MAX_LINE_CHARS,
    MAX_TAIL_CHARS,
    PLAIN_INTEGER,
    boxed_number,
    concluding_number,
    is_contradicted,
    stated_number,
)
from agentrl.extras.answers.boxed import MAX_MARKED_CHARS, answer_box
from agentrl.extras.answers.numbers import has_number
from agentrl.extras.answers.plain_text import plain
from agentrl.extras.answers.readings import (
    RELATIVE_TOLERANCE,
    Readings,
    read_value,
    relative_tolerance,
    require_truth,
)
from agentrl.extras.answers.thoughts import without_thoughts
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task

_MARK = "####"
_HEADING = re.compile(r"(?i)[\s*_]*(?:step|part|case|day|week|question|problem|section|method|option)\b")
"""`#### Step 2: ...` is a Markdown heading, not an answer."""
MAX_HEADINGS = 20


def extract_answer(text: str, *, strict: bool) -> Fraction | None:
    r"""Return the final answer in `text`, or None if there is none or more than one.

    It is the number on the line of the last `####`. If that line has no number and unless `strict`, it is the
    number in the last \boxed{...}; without a box, the number that concludes the last MAX_TAIL_CHARS
    characters. Thousands separators, signs, decimals, fractions, currency, units, percent signs (50% is 50),
    LaTeX, Markdown and the digits of all scripts are understood. Thoughts (`<think>`) do not count, nor does
    an answer that the text later retracts or contradicts.
    """
    text = without_thoughts(text)[-MAX_MARKED_CHARS:]
    if (marked := _marked_line(text)) is not None:
        line, rest = marked
        if (number := stated_number(line)) is not None:
            return None if _is_contradicted(number, rest) else number
        if strict or has_number(plain(line[:MAX_LINE_CHARS])):
            return None
        text = rest
    return None if strict else _unmarked(text)


def _unmarked(text: str) -> Fraction | None:
    boxed = answer_box(text)
    if boxed is None:
        return concluding_number(text)
    number = boxed_number(boxed)
    return None if number is not None and is_contradicted(number, text.rpartition("}")[2]) else number


def _is_contradicted(number: Fraction, rest: str) -> bool:
    if not rest or rest.isspace():
        return False
    boxed = answer_box(rest[:MAX_TAIL_CHARS])
    return is_contradicted(number, rest) or (boxed is not None and boxed_number(boxed) != number)


def canonical(text: str, *, strict: bool = False) -> str | None:
    """Return the final answer in `text` in canonical form ("18", "7/2"), or None if there is none."""
    answer = extract_answer(text, strict=strict)
    return None if answer is None else str(answer)


def parse_number(ground_truth: Any) -> Fraction | None:
    """Parse a ground truth (a number, "1,234", or GSM8K's whole solution with `####`) to a number, or
    None.
    """
    if isinstance(ground_truth, str):
        is_plain = PLAIN_INTEGER.fullmatch(ground_truth)
        return Fraction(ground_truth) if is_plain else extract_answer(ground_truth, strict=False)
    is_number = (
        isinstance(ground_truth, (int, float))
        and not isinstance(ground_truth, bool)
        and math.isfinite(ground_truth)
    )
    # A float by its shortest representation: 0.1 means one tenth, not the nearest binary number.
    return Fraction(str(ground_truth)) if is_number else None


def is_correct(answer: Fraction | None, ground_truth: Any) -> bool:
    """Return whether `answer` is the number of `ground_truth`."""
    return read_value(answer, parse_number(ground_truth), tolerance=RELATIVE_TOLERANCE).is_right


def require_number(task: Task, reward: str) -> None:
    """Raise DataError unless the task's ground truth is a number and its tolerance, if any, is valid."""
    relative_tolerance(task)
    require_truth(task, reward, is_given=parse_number(task.ground_truth) is not None, what="a number")


class Gsm8kOptions(Options):
    """`strict`: only the number after `####` counts, else any form. `format_score`: for a wrong answer."""

    strict: bool = True
    format_score: float = 0.0


class Gsm8k(Reward):
    """1 for the right number in the last assistant message, `format_score` for a wrong one, 0 for none.

    Metrics: accuracy (by `strict`), accuracy_strict, accuracy_flexible, format (an answer after `####`).
    Details: answer, in canonical form. `strict` also decides what counts as an answer for `format_score`. An
    answer submitted by `finish` needs no `####`.
    """

    name: ClassVar[str] = "gsm8k"
    runs_in: RunsIn = "inline"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(Gsm8kOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        require_number(task, self.name)

    def score(self, attempt: Attempted) -> RewardResult:
        readings = read_number(attempt, strict=self._options.strict)
        return readings.result(
            wrong=self._options.format_score if readings.counting.answer is not None else 0.0
        )


def read_number(attempt: Attempted, *, strict: bool) -> Readings:
    """Extract an attempt's final number, strictly and flexibly. One submitted by `finish` needs no `####`."""
    answer, needs_form = attempt.answer, attempt.handed_in is None
    in_form = extract_answer(answer, strict=needs_form)
    flexible = in_form  # a number in the requested form is also the answer in any form
    if in_form is None and needs_form:
        flexible = extract_answer(answer, strict=False)
    truth, tolerance = parse_number(attempt.task.ground_truth), relative_tolerance(attempt.task)
    in_form_reading = flexible_reading = read_value(in_form, truth, tolerance=tolerance)
    if flexible is not in_form:
        flexible_reading = read_value(flexible, truth, tolerance=tolerance)
    return Readings(in_form_reading, flexible_reading, counts_strict=strict, has_format=in_form is not None)


def _marked_line(text: str) -> tuple[str, str] | None:
    """Return the text after the last `####` on its line, and the text after that line.

    If the line is empty, it is the next line with text. If no text follows, it is the text before the mark
    (18 ####).
    """
    end = len(text)
    for _ in range(MAX_HEADINGS):
        start = text.rfind(_MARK, 0, end)
        if start < 0:
            return None
        line, _, rest = text[start + len(_MARK) :].lstrip().partition("\n")
        if not line:
            before = text[:start].rstrip("# \t")[-MAX_TAIL_CHARS:].rpartition("\n")[2]
            return before.lstrip("# "), ""
        if not _HEADING.match(line):
            return line, rest
        end = start
    return None
