r"""Mathematical answers compared by value: numbers and texts at once and exactly, all else as expressions by `math-verify`.

Comparing expressions takes milliseconds, or for ever: callers run it in a process with a deadline.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import latex

from agentrl.rewards.number_words import number_in_words
from agentrl.rewards.numbers import numbers_in, with_signs
from agentrl.rewards.plain import plain
from agentrl.rewards.stated import answer_phrases

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-outs are off: the deadline is ours

MAX_ANSWER_CHARS = 1000
"""A longer answer is none: parsing it would take the time of many."""

MAX_PROSE_CHARS = 4000
"""How far from its end a response without a box is read."""

_UNIT = re.compile(
    r"(?:~|\\[ ,;]|\s)*\\(?:text|textrm|mathrm|mbox|hbox|operatorname)\s?\{(?:~|\\ |\s)*"
    r"(?!(?:or|and|hundred|thousand|million|billion)\b)[A-Za-z][A-Za-z .]{0,40}\}\s?(?:\^\s?\{?[23]\}?)?\s*$"
)
_NAMED = re.compile(r"\s*(?P<name>[A-Za-z](?:_\w)?)\s*=(?P<value>[^=]*)$", re.DOTALL)
_IN_BASE = re.compile(r"\(?([0-9A-F]{1,100})\)?(?:_\s?\{?\s?(?:\\text\{)?\s?([0-9]{1,2}|two|three|eight)\s?\}{0,2})?$")
_WORDED = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_ALTERNATIVES = re.compile(r"\b(?:or|and|to)\b|%|percent|-|:")
_REPEATING = re.compile(r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar)\s?\{([0-9]{1,20})\}")
_BASES = {"two": "2", "three": "3", "eight": "8"}
_WORDS = re.compile(r"[a-z]{2}[a-z ,'-]*|[a-z](?:,[a-z])*|[0-9]{1,3}:[0-9]{1,3}")
_IS = re.compile(r"\bis\b|=")
_SENTENCE = re.compile(r"[.!?;](?=\s|$)")
_ROOT = re.compile(r"\bsqrt\(([^()]{1,40})\)")
_THIN_SPACE = re.compile(r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))")
_IMAGINARY = re.compile(r"(?<=[0-9}])\s*i\b")
_CHOICE = re.compile(r"(?:option |choice )?\(?([A-H])\)?(?=[\s:.,$)]|$)(?!\)?,? (?:or|and) )")
_CLAUSE = re.compile(r"(?:[.,;](?=\s|$)|\s(?:because|since|as|and not|not|which)\b|\n)")


@dataclass(frozen=True, slots=True)
class _Number:
    value: Fraction
    is_percent: bool


def equal(answer: str, truth: str) -> bool:
    """Tell whether two answers, each as it would stand in a box, are the same: as numbers, as texts, or as expressions."""
    if (verdict := _equal_at_sight(answer, truth)) is not None:
        return verdict
    return equal_expressions(parse_boxed(answer), parse_boxed(truth))


def equal_expressions(answer: list[Any], truth: list[Any]) -> bool:
    """Tell whether parsed answers are equal. What raises inside of the library compares unlike things (a set and a number)."""
    return bool(answer) and bool(truth) and verify(truth, answer, timeout_seconds=None, allow_set_relation_comp=True)


def parse_boxed(answer: str) -> list[Any]:
    """Parse the inside of a box."""
    return _parse(f"\\boxed{{{_cleaned(answer)}}}", LatexExtractionConfig())


def parse_prose(text: str) -> list[Any]:
    """Parse the expression that a whole response ends with."""
    return _parse(text, LatexExtractionConfig(), ExprExtractionConfig())


def stated_text(text: str) -> str | None:
    """Return the words that a response says its answer is (`The answer is (C), because ...`: "(C)"), or None."""
    for stated in answer_phrases(text):
        if choice := _CHOICE.match(stated.strip(" $")):
            return choice[1]
        clause = _CLAUSE.split(stated.strip(), maxsplit=1)[0].strip(" $")
        if is_text(clause):
            return clause
    return None


def stated_plainly(text: str) -> str | None:
    """Return what a response without LaTeX says its answer is: behind "the answer is", else behind the last "is" or "=" of its end."""
    stated = next(answer_phrases(text), None)
    if stated is None:
        stated = (_IS.split(plain(text).strip().splitlines()[-1]) or [""])[-1]
    clause = _SENTENCE.split(stated.strip(), maxsplit=1)[0]
    return _ROOT.sub(r"\\sqrt{\1}", clause).replace("π", r"\pi").replace("√", r"\sqrt") or None


def is_text(answer: str) -> bool:
    """Tell whether an answer is a word, a few of them, a choice like (C), a time or a ratio."""
    return _WORDS.fullmatch(_normal_text(answer)) is not None


def number_of(answer: str) -> Fraction | None:
    """Return the number that an answer is, but for a unit; None when it is anything else."""
    number = _whole_number(answer)
    return None if number is None else number.value


def canonical(answer: str) -> str | None:
    """Return the one text that stands for an answer as it would stand in a box; None when it has no content.

    Equal numbers have equal texts ("1/2"; 50% is "50"), and so have equal words; expressions are written in one way, but not
    simplified.
    """
    if not _normal_text(answer):
        return None
    return _canonical_at_sight(answer) or canonical_expression(parse_boxed(answer), answer)


def canonical_expression(parsed: list[Any], written: str) -> str:
    """Return the one text for what was parsed; as it was written where it is no expression, or does not read back as itself."""
    if (at_sight := _canonical_at_sight(written)) is not None:
        return at_sight
    as_written = " ".join(written.split())
    if not parsed or isinstance(parsed[0], str):
        return as_written
    text = str(latex(parsed[0]))
    if (at_sight := _canonical_at_sight(text)) is not None:
        return at_sight
    again = parse_boxed(text)
    return text if again and latex(again[0]) == text else as_written


def _canonical_at_sight(answer: str) -> str | None:
    """Return the one text for a number or for words; None for anything else."""
    if (number := _whole_number(answer)) is not None:
        return str(number.value)
    return _normal_text(answer) if is_text(answer) else None


def _equal_at_sight(answer: str, truth: str) -> bool | None:
    """Compare without an algebra system; None when these are no plain numbers or texts."""
    said, true = _normal_text(answer), _normal_text(truth)
    if said == true:
        return bool(true)
    based, digits = _IN_BASE.match(truth.strip()), _IN_BASE.match(answer.strip())
    if based and based[2] and digits:
        return digits[1] == based[1] and (not digits[2] or _base(digits[2]) == _base(based[2]))
    one, other = _whole_number(answer), _whole_number(truth)
    if (one is None) != (other is None):  # \text{5 apples} and 5
        one, other = one or _worded_number(answer), other or _worded_number(truth)
    if one and other and not _have_other_names(answer, truth):
        values = {one.value, one.value / 100} if one.is_percent else {one.value}
        return bool(values & ({other.value, other.value / 100} if other.is_percent else {other.value}))
    if is_text(truth) and is_text(answer) and "\\text" in answer + truth:
        return False
    return None


def _normal_text(answer: str) -> str:
    text = plain(answer).strip().rstrip(".").strip().casefold()
    text = re.sub(r"\s*,\s*and\s+|\s+and\s+|\s*,\s*", ",", text)
    text = (
        re.sub(r"^(?:an?|the) |\s+(?=[^a-z])|(?<=[^a-z])\s+", "", text)
        .replace("\\varnothing", "\\emptyset")
        .replace("\\{\\}", "\\emptyset")
    )
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text


def _whole_number(answer: str) -> _Number | None:
    """Return the number that an answer is, but for a name before and a unit behind it; None when it is anything else."""
    named = _NAMED.match(answer)
    text = _UNIT.sub("", named["value"] if named else answer)
    if (repeating := _repeating(text)) is not None:
        return _Number(repeating, is_percent=False)
    text = with_signs(plain(text).strip()).strip(" $").rstrip(".")
    bare = re.sub(r"\s?(?:°|degrees|dollars|units)$", "", text)
    without_percent = re.sub(r"\s?(?:%|percent)$", "", bare)
    found = numbers_in(without_percent)
    is_all = len(found) == 1 and (found[0].start, found[0].end) == (0, len(without_percent))
    is_percent = without_percent != bare or bool(re.search(r"\\(?:text|mathrm)\{\s*(?:percent|\\%)\s*\}\s*$", answer))
    return _Number(found[0].value, is_percent) if is_all and found[0].value is not None else None


def _worded_number(answer: str) -> _Number | None:
    """Return the number that an answer of words begins with."""
    worded = _WORDED.fullmatch(answer.strip())
    if worded is None:
        return None
    found = numbers_in(worded[1].strip())
    is_first = len(found) == 1 and found[0].start == 0 and not _ALTERNATIVES.search(worded[1])
    value = found[0].value if is_first else None if found else number_in_words(worded[1])
    return None if value is None else _Number(value, is_percent=False)


def _repeating(text: str) -> Fraction | None:
    r"""Return the value of 0.1\overline{6}."""
    found = _REPEATING.fullmatch(text.strip())
    if found is None:
        return None
    whole, first, period = found.groups()
    repeated = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(first)
    return Fraction(f"{whole or 0}.{first or 0}") + repeated


def _have_other_names(answer: str, truth: str) -> bool:
    names = [found["name"] for found in (_NAMED.match(answer), _NAMED.match(truth)) if found]
    return len(set(names)) > 1


def _base(text: str) -> str:
    return _BASES.get(text, text)


def _cleaned(answer: str) -> str:
    r"""Return LaTeX as the parser wants it: 1\,234 without its space, ° as a command, 4i with its i apart."""
    text = _THIN_SPACE.sub("", answer).replace("~", " ").replace("°", "^{\\circ}").replace("\u2212", "-")
    return _IMAGINARY.sub(" i", text.strip().removesuffix("."))


def _parse(text: str, *kinds: Any) -> list[Any]:
    return parse(text, kinds, parsing_timeout=None)
