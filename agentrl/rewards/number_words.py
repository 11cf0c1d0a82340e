"""English number words: `forty-two`, `two and a half`, `three quarters`, `eighteen dollars and fifty
cents`.
"""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(_ONES.split())} | {
    word: 10 * value for value, word in enumerate(_TENS.split(), 2)
}
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
MAX_CHARS = 100


def number_in_words(text: str) -> Fraction | None:
    """Return the number that `text` begins with in words, or None."""
    words = re.findall(r"[a-z]+|[0-9]+|[^a-z\s-]", text[:MAX_CHARS].lower())
    start = next((i for i, word in enumerate(words) if word not in _SKIPPED), len(words))
    if words[start : start + 1] in (["minus"], ["negative"]):
        value, end = _read(words, start + 1)
        return None if value is None or not _is_alone(words[end:]) else -value
    if words[max(0, start - 1) : start] == ["a"] and words[start : start + 1] in (
        ["hundred"],
        ["thousand"],
        ["million"],
        ["dozen"],
    ):
        words = [*words[:start], "one", *words[start:]]
    value, end = _read(words, start)
    if value is None:
        return None
    rest = words[end:]
    if len(rest) >= 3 and rest[0] in ("dollar", "dollars", "pounds", "euros"):
        cents, after = _read(rest, 2 if rest[1] == "and" else 1)
        if cents is not None and cents < 100 and after < len(rest) and rest[after] in _CENTS:
            return value + cents / 100 if _is_alone(rest[after + 1 :]) else None
    return value if _is_alone(rest) else None


def _is_alone(rest: list[str]) -> bool:
    """Return whether the text after a number neither modifies it nor states another one."""
    follows = rest[0] if rest else ""
    is_more = follows in _UNSURE or follows in _VALUES
    return not is_more and not any(
        word in _VALUES or word.isdigit() or word in ("or", "<", ">", "≤", "≥") for word in rest
    )


def _read(words: list[str], start: int) -> tuple[Fraction | None, int]:
    """Return the number that begins at word `start`, and the position after it."""
    total = current = 0
    position = start
    while position < len(words):
        word = words[position]
        if word in _VALUES and _fits(
            _VALUES[word], current, is_first=position == start or words[position - 1] in _SCALES
        ):
            current += _VALUES[word]
        elif word == "hundred" and 0 < current < 100:
            current *= 100
        elif word in _SCALES and current and words[position - 1] not in _SCALES:
            total, current = total + current * _SCALES[word], 0
        elif not (
            word == "and"
            and words[position - 1] in ("hundred", "thousand")
            and words[position + 1 : position + 2][:1] != ["a"]
        ):
            break
        position += 1
    if position == start:
        is_half = words[start : start + 1] in (["half"], ["quarter"])
        if is_half and words[start + 1 : start + 2] in (["a"], ["of"]) and words[start + 2 : start + 3]:
            scale = _SCALES.get(words[start + 2])  # half a dozen
            return (
                (Fraction(scale, _PARTS[words[start]]), start + 3)
                if scale
                else (Fraction(1, _PARTS[words[start]]), start + 1)
            )
        return (Fraction(1, _PARTS[words[start]]), start + 1) if is_half else (None, start)
    return _with_part(words, position, Fraction(total + current))


def _with_part(words: list[str], position: int, value: Fraction) -> tuple[Fraction | None, int]:
    """Return the number with its fraction, if one follows: `point five`, `and a half`, `quarters`."""
    if words[position : position + 1] == ["point"]:
        digits = ""
        position += 1
        while position < len(words) and _VALUES.get(words[position], 10) < 10:
            digits, position = digits + str(_VALUES[words[position]]), position + 1
        return (value + Fraction(f"0.{digits}"), position) if digits else (None, position)
    if words[position : position + 1] == ["and"] and words[position + 1 : position + 2] in (
        ["a"],
        ["one"],
        ["three"],
        ["two"],
    ):
        if (part := words[position + 2 : position + 3]) and part[0] in _PARTS:
            count = {"a": 1, "one": 1, "two": 2, "three": 3}[words[position + 1]]
            return value + Fraction(count, _PARTS[part[0]]), position + 3
        return None, position
    if (part := words[position : position + 1]) and part[0] in _PARTS and 0 < value < 10:
        return value / _PARTS[part[0]], position + 1
    return value, position


def _fits(value: int, current: int, *, is_first: bool) -> bool:
    """Return whether a word may follow: nine after forty, forty after hundred, but not three after two."""
    if is_first:
        return True
    return (
        value > 0
        and current > 0
        and (current % 100 == 0 or (current % 10 == 0 and current % 100 >= 20 and value < 10))
    )
