"""English number words: `forty-two`, `two and a half`, `three quarters`, `eighteen dollars and fifty
cents`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(_ONES.split())} | {
    word: 10 * value for value, word in enumerate(_TENS.split(), 2)
}
_DIGITS = frozenset(_ONES.split()[:10])
_ROUND = range(20, 100, 10)
_COUNTS = {"a": 1, "one": 1, "two": 2, "three": 3}
_SCALES = {"thousand": 1000, "million": 1_000_000, "billion": 1_000_000_000, "dozen": 12}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4,
    "fifth": 5, "fifths": 5,
    "sixths": 6, "eighth": 8, "eighths": 8, "tenths": 10,
}  # fmt: skip
_SKIPPED_WORDS = (
    "a an the is it its exactly approximately about only just total of equal equals to therefore so answer "
    "final be are there has she he they makes gets we have"
)
_SKIPPED = frozenset(_SKIPPED_WORDS.split())
_UNSURE = frozenset(
    [
        "of",
        "or",
        "to",
        "and",
        "half",
        "point",
        "hundred",
        "minus",
        "plus",
        "times",
        "hundredths",
        "thousandths",
        "squared",
        "cubed",
        "factorial",
        "dozens",
        *_SCALES,
    ]
)
"""After number words, these announce a continuation: `one of them`, `six or seven`, `two and a half`."""
_CENTS = frozenset(["cents", "cent", "pence"])
MAX_CHARS = 400
"""More than a line that is searched for an answer has: a number that is cut would be another one."""


def number_in_words(text: str) -> Fraction | None:
    """Return the number that `text` begins with in words, or None."""
    words = re.findall(r"[a-z]+|[0-9]+|[^a-z\s-]", text[:MAX_CHARS].lower())
    start = next((i for i, word in enumerate(words) if word not in _SKIPPED), len(words))
    if _word(words, start) in ("minus", "negative"):
        value, end = _read(words, start + 1)
        return None if value is None or not _is_alone(words[end:]) else -value
    if _word(words, start - 1) == "a" and _word(words, start) in ("hundred", "thousand", "million", "dozen"):
        words.insert(start, "one")
    value, end = _read(words, start)
    if value is None:
        return None
    rest = words[end:]
    if _word(rest, 0) in ("dollar", "dollars", "pounds", "euros"):
        cents, after = _read(rest, 2 if _word(rest, 1) == "and" else 1)
        if cents is not None and cents < 100 and _word(rest, after) in _CENTS:
            return value + cents / 100 if _is_alone(rest[after + 1 :]) else None
    return value if _is_alone(rest) else None


def _word(words: Sequence[str], position: int) -> str:
    """Return a word, or "" beside the ends."""
    return words[position] if 0 <= position < len(words) else ""


def _is_alone(rest: list[str]) -> bool:
    """Return whether the text after a number neither modifies it nor states another one."""
    return _word(rest, 0) not in _UNSURE and not any(
        word in _VALUES or word.isdigit() or word in ("or", "<", ">", "≤", "≥") for word in rest
    )


def _read(words: list[str], start: int) -> tuple[Fraction | None, int]:
    """Return the number that begins at word `start`, and the position after it."""
    total = current = 0
    position = start
    while position < len(words):
        word, before = words[position], _word(words, position - 1)
        is_first = position == start or before in _SCALES or (before == "and" and not current)
        if word in _VALUES and _fits(_VALUES[word], current, is_first=is_first):
            current += _VALUES[word]
        elif word == "hundred" and 0 < current < 100:
            current *= 100
        elif word in _SCALES and current and before not in _SCALES:
            total, current = total + current * _SCALES[word], 0
        elif word != "and" or before not in ("hundred", "thousand") or _word(words, position + 1) == "a":
            break
        position += 1
    if position > start:
        return _with_part(words, position, Fraction(total + current))
    if _word(words, start) not in ("half", "quarter"):
        return None, start
    part = Fraction(1, _PARTS[words[start]])
    if _word(words, start + 1) in ("a", "of") and (scale := _SCALES.get(_word(words, start + 2))):
        return scale * part, start + 3  # half a dozen
    return part, start + 1


def _with_part(words: list[str], position: int, value: Fraction) -> tuple[Fraction | None, int]:
    """Return the number with its fraction, if one follows: `point five`, `and a half`, `quarters`."""
    if _word(words, position) == "point":
        digits = ""
        position += 1
        while _word(words, position) in _DIGITS:
            digits, position = digits + str(_VALUES[words[position]]), position + 1
        return (value + Fraction(f"0.{digits}"), position) if digits else (None, position)
    if _word(words, position) == "and" and (count := _COUNTS.get(_word(words, position + 1))):
        if part := _PARTS.get(_word(words, position + 2)):
            return value + Fraction(count, part), position + 3
        return None, position
    if (part := _PARTS.get(_word(words, position))) and 0 < value < 10:
        return value / part, position + 1
    return value, position


def _fits(value: int, current: int, *, is_first: bool) -> bool:
    """Return whether a word may follow: nine after forty, forty after hundred, but not three after two."""
    if is_first:
        return True
    if not value or not current:
        return False
    return current % 100 == 0 or (current % 100 in _ROUND and value < 10)
