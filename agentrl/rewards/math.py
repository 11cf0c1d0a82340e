"""Mathematical answers, compared as expressions by `math-verify`: 1/2, 0.5 and \\frac{1}{2} are the same."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from agentrl.errors import DataError, RewardError
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.rewards import expressions
from agentrl.rewards.boxed import BoxOptions, last_boxed
from agentrl.rewards.readings import Reading, Readings
from agentrl.rewards.stated import answer_phrases, concluding_number, without_first_thoughts
from agentrl.types import JsonObject, Task

MAX_DETAIL_CHARS = 200
MAX_BARE_CHARS = 100
"""A longer response is prose, whatever it holds."""

_LATEX = re.compile(r"(?<!\\)\$|\\[(\[A-Za-z]")
_PROSE = re.compile(r"&\s?=|\$|\\[(\[]|\n|(?<![\\\w{])[A-Za-z]{2,}\s+[A-Za-z]+")


class Math(Reward):
    """1 when the last assistant message gives an expression equal to the ground truth.

    Metrics: accuracy (by `strict`), accuracy_strict, accuracy_flexible, format (there is a box). Details: answer, canonical.
    What was handed in by `finish` needs no box.

    It runs in a process: comparing expressions may take forever, and the library's own time-outs need the main thread and
    answer "wrong", where only the deadline is known to have passed.
    """

    name: ClassVar[str] = "math"
    runs_in: RunsIn = "process"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(BoxOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        if not _truth(task.ground_truth):
            raise DataError(
                f"task {task.task_id}: reward {self.name!r} needs an expression (text or a number) as reward_model.ground_truth "
                f"(got {str(task.ground_truth)[:80]!r})"
            )

    def score(self, attempt: Attempted) -> RewardResult:
        """Score; takes milliseconds, or for ever.

        Raises:
            RewardError: the ground truth is no expression.
        """
        options, text, truth = self._options, attempt.answer, _truth(attempt.task.ground_truth)
        if not truth:
            raise RewardError(f"the ground truth {str(attempt.task.ground_truth)[:80]!r} is no mathematical expression")
        boxed = last_boxed(text)
        if boxed is not None:
            in_form = flexible = _read_box(boxed, truth)
        else:
            is_bare = attempt.handed_in is not None and not _PROSE.search(text)
            flexible = _read_box(text, truth) if is_bare else _read_prose(text, truth)
            in_form = flexible if attempt.handed_in is not None else Reading(None, False)
        readings = Readings(in_form, flexible, counts_strict=options.strict, has_format=boxed is not None)
        return readings.result(wrong=options.score_wrong(has_box=boxed is not None))


def canonical(text: str, *, strict: bool = False) -> str | None:
    r"""Return the final answer in `text` as the one text that stands for it, or None when there is none.

    It stands in the last \boxed{...}; without one, and unless `strict`, it is what a sentence states, or the bare answer itself.
    """
    boxed = last_boxed(text)
    if boxed is not None or strict:
        return None if boxed is None else _canonical(boxed)
    text = without_first_thoughts(text[-expressions.MAX_PROSE_CHARS :])
    if (words := expressions.stated_text(text)) is not None or expressions.is_text(text) or not _PROSE.search(text):
        return _canonical(text if words is None else words)
    return _canonical_prose(expressions.parse_prose(text))


def _canonical_prose(found: list[Any]) -> str | None:
    return expressions.canonical_expression(found, str(found[-1]))[:MAX_DETAIL_CHARS] if found else None


def _canonical(answer: str) -> str | None:
    if len(answer) > expressions.MAX_ANSWER_CHARS:
        return None
    found = expressions.canonical(answer)
    return found[:MAX_DETAIL_CHARS] if found else None


def _read_box(answer: str, truth: str) -> Reading:
    found = _canonical(answer)
    return Reading(found, found is not None and expressions.equal(answer, truth))


def _read_prose(text: str, truth: str) -> Reading:
    """Read the words that a response calls its answer where the truth is words, else the expression that it ends with."""
    text = without_first_thoughts(text[-expressions.MAX_PROSE_CHARS :])
    if expressions.is_text(truth) and (words := expressions.stated_text(text)) is not None:
        return _read_box(words, truth)
    bare = text.strip(" \n$*.")
    phrase = next(answer_phrases(text), None)
    if phrase is None and len(bare) <= MAX_BARE_CHARS and not _PROSE.search(bare):
        return _read_box(bare, truth)
    if phrase is not None and phrase.startswith("not "):
        return Reading(None, False)
    if not _LATEX.search(text):
        return _read_plain_prose(text, truth)
    found = expressions.parse_prose(text)
    return Reading(_canonical_prose(found), expressions.equal_expressions(found, expressions.parse_boxed(truth)))


def _read_plain_prose(text: str, truth: str) -> Reading:
    number = concluding_number(text) if expressions.number_of(truth) is not None else None
    stated = str(number) if number is not None else expressions.stated_plainly(text)
    return Reading(None, False) if stated is None else _read_box(stated, truth)


def _truth(ground_truth: Any) -> str:
    """Return the ground truth as it would stand in a box; of a whole solution what stands in its last box; "" when there is none."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, (str, int, float)):
        return ""
    text = str(ground_truth).strip()
    inside = last_boxed(text)
    return (text.strip("$") if inside is None else inside).strip()
