"""Reward for AIME answers: an integer from 0 to 999, often written with leading zeros."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, ClassVar

from agentrl.extras.answers.answer_number import (
    MAX_TAIL_CHARS,
    boxed_number,
    concluding_number,
    is_contradicted,
    stated_number,
)
from agentrl.extras.answers.boxed import MAX_MARKED_CHARS, BoxOptions, answer_box
from agentrl.extras.answers.gsm8k import parse_number
from agentrl.extras.answers.readings import Readings, read_value, require_truth
from agentrl.extras.answers.thoughts import without_thoughts
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task

MAX_ANSWER = 999

_MODULUS = re.compile(
    r"\\text\{\s?mod\s?\}\s?[0-9]{1,5}|\(?\\?[pb]?mod(?:ulo|ulus)?\b\s?\{?\s?[0-9]{1,5}\}?\)?|\bby "
    r"\$?1,?000\b\$?"
)
_MODULI = re.compile(r"mod(?:ulo|ulus)?\b[\s{}]{0,3}([0-9]{1,5})")
"""The modulus of a remainder is not the answer: in "42 (mod 1000)", 42 is."""


def extract_integer(text: str, *, strict: bool) -> int | None:
    r"""Return the answer in the last \boxed{...}; without a box and unless `strict`, the concluding number.

    None if that is not an integer from 0 to 999, or if there is more than one.
    """
    tail = without_thoughts(text)[-MAX_MARKED_CHARS:]
    boxed = answer_box(tail)
    if boxed is not None:
        number = boxed_number(_MODULUS.sub(" modulus ", boxed))
        if number is not None and any(number >= int(modulus) for modulus in _MODULI.findall(boxed)):
            return None  # a remainder is smaller than its modulus
        return (
            None
            if number is not None and is_contradicted(number, tail.rpartition("}")[2])
            else _in_range(number)
        )
    return None if strict else _in_range(concluding_number(_MODULUS.sub(" modulus ", tail[-MAX_TAIL_CHARS:])))


def parse_integer(value: Any) -> int | None:
    """Parse a ground truth or the content of a box ("042", 42, "$42$") to an integer from 0 to 999, or
    None.
    """
    return _in_range(stated_number(value) if isinstance(value, str) else parse_number(value))


def canonical(text: str, *, strict: bool = False) -> str | None:
    """Return the final answer in `text` in canonical form ("42"), or None if there is none."""
    answer = extract_integer(text, strict=strict)
    return None if answer is None else str(answer)


def _in_range(number: Fraction | None) -> int | None:
    return (
        int(number) if number is not None and number.denominator == 1 and 0 <= number <= MAX_ANSWER else None
    )


class Aime(Reward):
    """1 for the right integer in the last assistant message.

    Metrics: accuracy (by `strict`), accuracy_strict, accuracy_flexible, format (there is a box).
    Details: answer, in canonical form. An answer submitted by `finish` needs no box.
    """

    name: ClassVar[str] = "aime"
    runs_in: RunsIn = "inline"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(BoxOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        is_given = parse_integer(task.ground_truth) is not None
        require_truth(task, self.name, is_given=is_given, what="an integer from 0 to 999")

    def score(self, attempt: Attempted) -> RewardResult:
        """Score the last box, or the concluding number unless `strict`."""
        options, text = self._options, attempt.answer
        flexible = extract_integer(text, strict=False)
        in_form = extract_integer(text, strict=True) if attempt.handed_in is None else flexible
        truth = parse_integer(attempt.task.ground_truth)
        has_box = bool(answer_box(without_thoughts(text)[-MAX_MARKED_CHARS:]))
        readings = Readings(
            read_value(in_form, truth),
            read_value(flexible, truth),
            counts_strict=options.strict,
            has_format=has_box,
        )
        return readings.result(wrong=options.score_wrong(has_box=has_box))
