"""Equations of bare numbers: `17 = 18` says two things, `18 = 18` nothing, and `18 = 9 * 2` is 18."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from agentrl.rewards.numbers import Found

_EQUALS = re.compile(r"\s?=\s?")
_OPERATOR = re.compile(r"\s?[-+*×·/]\s?")
_BEGINS = re.compile(r"(?:\A|[=,;:$(])\s*$")
MAX_BITS = 1000


def is_no_result(line: str, found: Sequence[Found], end: int) -> bool:
    """Tell whether number `end` stands in an equation of two numbers that is false or empty: 17 = 18, 18 = 18."""
    if end == 0 or not _EQUALS.fullmatch(line, found[end - 1].end, found[end].start):
        return False
    left, right = found[end - 1], found[end]
    if not _BEGINS.search(line, found[end - 2].end if end > 1 else 0, left.start):
        return False
    return left.value != right.value or _written(line, left) == _written(line, right)


def restated(line: str, found: Sequence[Found]) -> Fraction | None:
    """Return the number of a line like `18 = 9 * 2`: a number, and the sum that comes to it."""
    gaps = [line[one.end : other.start] for one, other in pairwise(found)]
    if len(found) < 3 or not _EQUALS.fullmatch(gaps[0]) or not all(map(_OPERATOR.fullmatch, gaps[1:])):
        return None
    return found[0].value if _come_to([number.value for number in found[1:]], [gap.strip() for gap in gaps[1:]]) == found[0].value else None


def _come_to(values: Sequence[Fraction | None], operators: Sequence[str]) -> Fraction | None:
    terms = [values[0] or Fraction(0)]
    for operator, value in zip(operators, values[1:], strict=True):
        if value is None or (operator == "/" and not value):
            return None
        if operator in "+-":
            terms.append(value if operator == "+" else -value)
        else:
            terms[-1] = terms[-1] / value if operator == "/" else terms[-1] * value
        if max(terms[-1].numerator.bit_length(), terms[-1].denominator.bit_length()) > MAX_BITS:
            return None
    return sum(terms, Fraction(0))


def _written(line: str, number: Found) -> str:
    return re.sub(r"[^0-9./]", "", line[number.start : number.end])
