"""Numbers in text, as exact values, whatever way they are written: 1,234.50, -$5, 1 1/2, 3/4, 50%, 1.5 million, 6 × 10^4."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 100
"""A longer run of digits is no answer, and converting it would be slow."""

_SCALES = {"k": 10**3, "m": 10**6, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GROUPED = r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3})++|(?:\ [0-9]{3})++)(?![0-9]|[,\ ][0-9]{3})(?:\.[0-9]++)?"
# A minus right after a word, a digit or a bracket subtracts. No number is a part of a word, an index, a power, a root, a time of
# day, a date. What follows (a unit, a percent sign, a full stop) is not part of the number.
_NUMBER = re.compile(
    rf"""
    (?:(?<![\w.)\]}}%])(?P<sign>[-+]))?
    (?<![A-Za-z_^√ƒ{{0-9])(?<![0-9][.:/])(?<!mod\ )(?<!not\ )
    (?:(?:Rs\.?|USD|EUR|GBP|INR|[A-Z]{{0,2}}[$€£¥₹])\s?)?+(?P<inner>(?<=[$€£¥₹])-)?
    (?P<digits>{_GROUPED}|[0-9]++(?:\.[0-9]++)?|\.[0-9]++)
    (?: (?:\ and)?\ {{1,2}}(?P<part>[0-9]{{1,4}}+)/(?P<whole>[0-9]{{1,4}}+)
      | \s?/\s?(?P<over>[0-9][0-9,]*+(?:\.[0-9]++)?)
      | [eE](?P<e>[-+]?[0-9]{{1,2}}+)(?![\w.])
      | \s?[×x*]\s?10\s?(?:\^|\*\*)\s?\{{?(?P<power>[-+]?[0-9]{{1,2}}+)\}}?
      | :00(?![0-9:])
    )?+
    (?:\s?(?P<scale>thousand|million|billion|trillion|(?<=[0-9])[kKM])(?![A-Za-z]))?+
    (?!:?[0-9]|/[0-9]|\s?\^|\s?[π√]|[xyzn]\b)
    """,
    re.VERBOSE,
)
_SPACED_MINUS = re.compile(r"(\A|[=:≈][ \t]?)-[ \t](?=[$€£¥₹]?[0-9.])")
_MINUS_WORD = re.compile(r"(?i)(?<![0-9] )\b(?:negative|minus) (?=[$€£¥₹]?[0-9.])")
_BETWEEN = re.compile(r"(?i)\bbetween (\S{1,20}) and ")
_DATE = re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}\b")
_PARTS = {" and a half": " 1/2", " and one half": " 1/2", " and a quarter": " 1/4", " and three quarters": " 3/4"}


@dataclass(frozen=True, slots=True)
class Found:
    """A number in a text, at text[start:end]; `value` None: one that is no answer (too long, or divided by zero)."""

    value: Fraction | None
    start: int
    end: int


def with_signs(text: str) -> str:
    """Return plain text with a minus right before its number, a half in digits, a range with its `to`, and without dates."""
    for words, digits in _PARTS.items():
        text = text.replace(words, digits)
    text = _DATE.sub(" ", _BETWEEN.sub(r"\1 to ", text))
    return _MINUS_WORD.sub("-", _SPACED_MINUS.sub(r"\1-", text))


def numbers_in(text: str) -> list[Found]:
    """Return the numbers of a plain text (`plain`, `with_signs`), in their order."""
    return [Found(_value(found), found.start(), found.end()) for found in _NUMBER.finditer(text)]


def has_number(text: str) -> bool:
    """Tell whether there is a number in a plain text."""
    return _NUMBER.search(text) is not None


def _value(found: re.Match[str]) -> Fraction | None:
    if found.end() - found.start() > MAX_DIGITS:
        return None
    value = _decimal(found["digits"])
    if found["part"]:
        part, whole = int(found["part"]), int(found["whole"])
        if part >= whole:
            return None
        value += Fraction(part, whole)
    if found["over"]:
        divisor = _decimal(found["over"])
        if not divisor:
            return None
        value /= divisor
    if exponent := found["e"] or found["power"]:
        value *= Fraction(10) ** int(exponent)
    if scale := found["scale"]:
        value *= _SCALES[scale.lower()]
    return -value if found["sign"] == "-" or found["inner"] else value


def _decimal(digits: str) -> Fraction:
    return Fraction("0" + digits.replace(",", "").replace(" ", ""))
