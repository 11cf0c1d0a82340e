"""English number words: `forty-two`, `one hundred and five`, `two thousand`."""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(_ONES.split())} | {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_SCALES = {"thousand": 1000, "million": 1_000_000}
_SKIPPED = frozenset(
    ("a", "an", "the", "is", "it", "exactly", "approximately", "about", "only", "just", "total", "of", "equal", "to", "therefore", "so")
)
_UNSURE = frozenset(["of", "or", "to", "and", "half", "point"])
"""Behind number words these say that there is more to come: `one of them`, `six or seven`, `two and a half`."""
MAX_CHARS = 100


def number_in_words(text: str) -> Fraction | None:
    """Return the number that `text` begins with in words, or None."""
    words = re.findall(r"[a-z]+|[^a-z\s-]", text[:MAX_CHARS].lower())
    start = next((i for i, word in enumerate(words) if word not in _SKIPPED), len(words))
    total = current = 0
    position = start
    for position in range(start, len(words) + 1):
        word = words[position] if position < len(words) else ""
        if word in _VALUES and _fits(_VALUES[word], current, is_first=position == start or words[position - 1] in _SCALES):
            current += _VALUES[word]
        elif word == "hundred" and 0 < current < 10:
            current *= 100
        elif word in _SCALES and current:
            total, current = total + current * _SCALES[word], 0
        elif not (word == "and" and words[position - 1] == "hundred"):
            break
    is_none = position == start or (words[position : position + 1] and (words[position] in _UNSURE or words[position] in _VALUES))
    return None if is_none else Fraction(total + current)


def _fits(value: int, current: int, *, is_first: bool) -> bool:
    """Tell whether a word may follow: nine after forty, forty after hundred, but not three after two."""
    if is_first:
        return True
    return value > 0 and current > 0 and (current % 100 == 0 or (current % 10 == 0 and current % 100 >= 20 and value < 10))
