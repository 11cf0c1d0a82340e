"""Reward for mathematical answers, compared by `math-verify`: 1/2, 0.5 and \\frac{1}{2} are equal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.errors import RewardError
from agentrl.extras.answers import expressions
from agentrl.extras.answers.answer_number import (
    MAX_TAIL_CHARS,
    answer_phrases,
    concluding_number,
    is_contradicted,
    without_first_thoughts,
)
from agentrl.extras.answers.boxed import MAX_MARKED_CHARS, BoxOptions, answer_box, last_boxed
from agentrl.extras.answers.cpu_limit import cpu_limit
from agentrl.extras.answers.readings import Reading, Readings, relative_tolerance, require_truth
from agentrl.extras.answers.thoughts import without_thoughts
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task

MAX_DETAIL_CHARS = 200
MAX_CPU_S = 0.8
"""For costs that the bounds do not foresee.

An answer takes milliseconds; at the bounds, tenths of a second.
"""
MAX_BARE_CHARS = 100
"""A longer response without a box is prose."""

_LATEX = re.compile(r"(?<!\\)\$|\\[(\[A-Za-z]")
_PROSE = re.compile(r"&\s?=|\$|\\[(\[]|\n|(?<![\\\w{])[A-Za-z]{2,}\s+[A-Za-z]+")


class Math(Reward):
    """1 if the last assistant message gives an expression equal to the ground truth.

    Metrics: accuracy (by `strict`), accuracy_strict, accuracy_flexible, format (there is a box).
    Details: answer, in canonical form. An answer submitted by `finish` needs no box.

    It runs in a process of its own, so a costly answer (see `agentrl.extras.answers.bounds`) blocks nothing
    else.
    """

    name: ClassVar[str] = "math"
    runs_in: RunsIn = "process"
    max_answer_cpu_s: int | None = 2

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(BoxOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        relative_tolerance(task)
        is_given = bool(_truth(task.ground_truth))
        require_truth(task, self.name, is_given=is_given, what="an expression (text or a number)")

    def score(self, attempt: Attempted) -> RewardResult:
        """Score. Errors count as a wrong answer, since the ground truth passed through the same code first.

        Raises:
            RewardError: the ground truth is not an expression, or does not equal itself.
        """
        self.rehearse(attempt.task)
        truth = _truth(attempt.task.ground_truth)
        text = without_thoughts(attempt.answer)
        boxed = answer_box(text[-MAX_MARKED_CHARS:])
        try:
            with cpu_limit(MAX_CPU_S):
                in_form, flexible = self._read(attempt, text, boxed, truth)
        except Exception:  # noqa: BLE001 - boundary: sympy may raise anything on model output
            in_form = flexible = Reading(None, False)
        return self._result(in_form, flexible, boxed)

    def rehearse(self, task: Task) -> None:
        """Compare the ground truth with itself.

        Raises:
            RewardError: it is not an expression, or does not equal itself.
        """
        truth = _truth(task.ground_truth)
        if not truth:
            raise RewardError(
                f"the ground truth {str(task.ground_truth)[:80]!r} is not a mathematical expression"
            )
        expressions.rehearse(truth)

    def failed(self, attempt: Attempted) -> RewardResult:
        """Return the score of a wrong answer."""
        return self._result(
            Reading(None, False),
            Reading(None, False),
            answer_box(without_thoughts(attempt.answer)[-MAX_MARKED_CHARS:]),
        )

    def _result(self, in_form: Reading, flexible: Reading, boxed: str | None) -> RewardResult:
        readings = Readings(in_form, flexible, counts_strict=self._options.strict, has_format=bool(boxed))
        return readings.result(wrong=self._options.score_wrong(has_box=bool(boxed)))

    def _read(self, attempt: Attempted, text: str, boxed: str | None, truth: str) -> tuple[Reading, Reading]:
        tolerance = relative_tolerance(attempt.task)
        if boxed is not None:
            read = Reading(None, False) if _is_taken_back(boxed, text) else _read_box(boxed, truth, tolerance)
            return read, read
        is_bare = attempt.handed_in is not None and not _PROSE.search(text)
        flexible = _read_box(text, truth, tolerance) if is_bare else _read_prose(text, truth, tolerance)
        return flexible if attempt.handed_in is not None else Reading(None, False), flexible


def _is_taken_back(boxed: str, text: str) -> bool:
    number = expressions.number_of(boxed)
    return is_contradicted(number, text.rpartition("}")[2])


def canonical(text: str, *, strict: bool = False) -> str | None:
    r"""Return the final answer in `text` in canonical form, or None if there is none.

    It is the content of the last \boxed{...}. Without a box and unless `strict`, it is what a sentence calls
    the answer, or the bare answer itself.
    """
    try:
        with cpu_limit(MAX_CPU_S):
            return _canonical_answer(without_thoughts(text), strict=strict)
    except Exception:  # noqa: BLE001 - boundary: sympy may raise anything on model output
        return None


def _canonical_answer(text: str, *, strict: bool) -> str | None:
    boxed = answer_box(text[-MAX_MARKED_CHARS:])
    if boxed is not None or strict:
        return None if boxed is None else _canonical(boxed)
    text = without_first_thoughts(text[-MAX_TAIL_CHARS:])
    if (
        (words := expressions.stated_text(text)) is not None
        or expressions.is_text(text)
        or not _PROSE.search(text)
    ):
        return _canonical(text if words is None else words)
    return _canonical_prose(expressions.parse_prose(text))


def _canonical_prose(found: Sequence[Any]) -> str | None:
    return expressions.canonical_expression(found, str(found[-1]))[:MAX_DETAIL_CHARS] if found else None


def _canonical(answer: str) -> str | None:
    if len(answer) > expressions.MAX_ANSWER_CHARS:
        return None
    found = expressions.canonical(answer)
    return found[:MAX_DETAIL_CHARS] if found else None


def _read_box(answer: str, truth: str, tolerance: float) -> Reading:
    found = _canonical(answer)
    return Reading(
        found,
        found is not None
        and not expressions.is_relation_only(answer, truth)
        and expressions.equal(answer, truth, tolerance=tolerance),
    )


def _read_prose(text: str, truth: str, tolerance: float) -> Reading:
    """Read the words that a response calls its answer, if the truth is words; else its concluding
    expression.
    """
    text = without_first_thoughts(text[-MAX_TAIL_CHARS:])
    if expressions.is_text(truth) and (words := expressions.stated_text(text)) is not None:
        return _read_box(words, truth, tolerance)
    bare = text.strip(" \n$*.")
    phrase = next(answer_phrases(text), None)
    if phrase is None and len(bare) <= MAX_BARE_CHARS and not _PROSE.search(bare):
        return _read_box(bare, truth, tolerance)
    if phrase is not None and (phrase.startswith("not ") or expressions.opens_with_bound(phrase, truth)):
        return Reading(None, False)
    if not _LATEX.search(text):
        return _read_plain_prose(text, truth, tolerance)
    found = expressions.parse_prose(text)
    is_no_value = bool(found) and expressions.is_relation_only(str(found[-1]), truth)
    is_right = not is_no_value and expressions.equal_expressions(
        found, expressions.parse_box_of_truth(truth), tolerance=tolerance
    )
    return Reading(_canonical_prose(found), is_right)


def _read_plain_prose(text: str, truth: str, tolerance: float) -> Reading:
    number = concluding_number(text) if expressions.number_of(truth) is not None else None
    stated = str(number) if number is not None else expressions.stated_plainly(text)
    return Reading(None, False) if stated is None else _read_box(stated, truth, tolerance)


def _truth(ground_truth: Any) -> str:
    """Return the ground truth, or the content of its last box if it is a whole solution; "" if there is
    none.
    """
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, (str, int, float)):
        return ""
    text = str(ground_truth).strip()
    inside = last_boxed(text)
    return (text.strip("$") if inside is None else inside).strip()
