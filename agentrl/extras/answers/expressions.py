r"""Mathematical answers compared by value: plain numbers and texts directly, all else as expressions by
`math-verify`.

Comparing expressions takes milliseconds, or forever. So callers run it in a process with a deadline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from sympy import Expr, latex

from agentrl.errors import RewardError
from agentrl.extras.answers.answer_number import answer_phrases
from agentrl.extras.answers.bounds import MAX_CHARS, check_prose, check_text, check_tree
from agentrl.extras.answers.cpu_limit import TooCostlyError
from agentrl.extras.answers.expression_equality import same
from agentrl.extras.answers.number_words import number_in_words
from agentrl.extras.answers.numbers import numbers_in, with_signs
from agentrl.extras.answers.plain_text import plain
from agentrl.extras.answers.readings import RELATIVE_TOLERANCE

# math_verify warns that its timeouts are off; our deadline replaces them.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARS = 1000
"""A longer answer is not parsed: it would take the time of many others."""

_UNIT = re.compile(
    r"(?:~|\\[ ,;]|\s)*\\(?:text|textrm|mathrm|mbox|hbox|operatorname)\s?\{(?:~|\\ |\s)*"
    r"(?!(?:or|and|hundred|thousand|million|billion|dozens?|[kKM])\b)[A-Za-z][A-Za-z "
    r".]{0,40}\}\s?(?:\^\s?\{?[23]\}?)?\s*$"
)
_NAMED = re.compile(r"\s*(?P<name>[A-Za-z](?:_\w)?)\s*=(?P<value>[^=]*)$", re.DOTALL)
_IN_BASE = re.compile(
    r"\(?([0-9A-F]{1,100})\)?(?:_\s?\{?\s?(?:\\text\{)?\s?([0-9]{1,2}|two|three|eight)\s?\}{0,2})?$"
)
_WORDED = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_ALTERNATIVES = re.compile(r"\b(?:or|and|to)\b|%|percent|-|:")
_REPEATING = re.compile(r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar)\s?\{([0-9]{1,20})\}")
_PLUS_MINUS = re.compile(r"\\[pm]{2}(?![a-z])|±|\+/-")
_BASES = {"two": "2", "three": "3", "eight": "8"}
_WORDS = re.compile(r"[a-z]{2}[a-z ,'-]*|[a-z](?:,[a-z])*|[0-9]{1,3}:[0-9]{1,3}")
_IS = re.compile(r"\bis\b|=")
_SENTENCE = re.compile(r"[.!?;](?=\s|$)")
_ROOT = re.compile(r"\bsqrt\(([^()]{1,40})\)")
_THIN_SPACE = re.compile(r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))")
_INVISIBLE = re.compile(r"\\[hv]?phantom\s?\{[^{}]{0,100}\}")
_LEAD_IN = re.compile(
    r"(?i)\s*\\(?:text|textbf|mathrm|mbox)\s?\{\s*(?:the (?:final )?answer is|answer|it "
    r"is|option|choice)\s?:?\s*(?P<end>\}?)"
)
_OF_WHAT = re.compile(
    r"\s*(?:P|E|Pr|\\(?:Pr|mathbb\{[PE]\}|mathrm\{[PE]\}|text\{P\}))\s?\([^()=]{1,20}\)\s*=(?=[^=]*\Z)"
)
_FOR_ALL = re.compile(r"\s*\\text\{\s?for (?:all|every|any)[^{}]{0,20}\}\s*[a-zA-Z]?\s*\Z")
_SUCH_THAT = re.compile(r"\s*\\\{\s*([a-z])\s*(?::|\\mid|\||\\colon)\s*(?P<condition>[^{}]*?)\\\}\s*")
_OVER = re.compile(r"\{+\s?([0-9a-z]{1,20})\s?\}?\s?\\over\s?\{?\s?([0-9a-z]{1,20})\s?\}+")
_FRACTION = re.compile(r"\\[dt]?frac\s?(\\[a-z]{2,8})\s?([0-9])(?![0-9])")
_BIG = re.compile(r"\\[bB]igg?[lrm]?(?![a-z])")
_IN_DEGREES = re.compile(
    r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*([0-9]{1,4}(?:\.[0-9]{1,4})?)\s*(?:\^\s?\{?\s?\\circ\s?\}?|°)\s*[)}]?"
)
_ROOT_SIGN = re.compile(r"√\s?(?:\(([^()]{1,20})\)|([0-9]{1,20}|[a-z]))")
_RATIO = re.compile(r"[0-9]{1,9}\s*:\s*[0-9]{1,9}")
_PRIME = re.compile(r"[0-9]\s?'(?![0-9'])|[0-9]\s?\^\s?\{?\s?\\prime")
_OTHERWISE = re.compile(r"(?i)\(\s?(?:or|maybe|perhaps|alternatively|possibly)\b([^()]{0,60})\)")
_RATIO_SIGN = re.compile(r"\s*(?:\\colon|\\text\{\s*to\s*\})\s*")
_IMAGINARY = re.compile(r"(?<=[0-9}])\s*i\b")
_EULER = re.compile(r"\\(?:mathrm|mathit|text|operatorname)\s?\{\s?e\s?\}")
"""Euler's number in upright type, as ISO 80000-2 writes it."""
_ABRIDGED = re.compile("[ƒ√]")
"""All functions and roots, as `plain` writes them."""
_NO_VALUE = re.compile(
    r"(?i)\\[lcv]?dots\b|\.\.\.|…|\b(?:less|more|fewer|greater|larger|smaller) than\b|\bat "
    r"(?:least|most)\b|\bup to\b|\b(?:not|isn't|wrong|incorrect|or more|or less)\b"
)
_BOUND = re.compile(
    r"(?i)\s*(?:less|more|fewer|greater|larger|smaller) than\b|\s*(?:at (?:least|most)|up "
    r"to|between|either|neither)\b"
)
_CHOICE = re.compile(
    r"(?:option |choice )?\(?([A-H])\)?(?=[\s:.,$)]|$)(?!\)?[\s$]{0,3}(?:[,/;&?]|,? ?\b(?:or|and"
    r"|no)\b)[\s$]{0,3}(?:no,? |maybe |or |and )*\(?[A-H]\b)(?!\)?,? (?:or|and) )"
)
_CHOICES = re.compile(r"(?:option |choice )?\(?[A-H]\)?\s?(?:[,/;&?]|,? (?:or|and)\b)")
_CLAUSE = re.compile(r"(?:[.,;](?=\s|$)|\s(?:because|since|as|and not|not|which)\b|\n)")


@dataclass(frozen=True, slots=True)
class _Number:
    value: Fraction
    is_percent: bool


def equal(answer: str, truth: str, *, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Return whether two answers, in the form of a box's content, are equal as numbers, texts or expressions.

    tolerance: relative; applies if the truth is a decimal. All else is compared exactly.

    Raises:
        TooCostlyError: the comparison would take too long.
    """
    if (verdict := _equal_at_sight(answer, truth, tolerance)) is not None:
        return verdict
    parsed = parse_box_of_truth(truth)
    is_single = any(isinstance(one, Expr) for one in parsed)
    if is_single and _PLUS_MINUS.search(answer) and not _PLUS_MINUS.search(truth):
        return False  # 5 ± 0 states two values
    return equal_expressions(parse_boxed(answer), parsed, tolerance=tolerance)


@lru_cache(maxsize=1024)
def rehearse(truth: str) -> None:
    """Pass a ground truth through all the code that parses and compares answers: an error here is not an
    answer's fault.

    Raises:
        RewardError: it does not equal itself.
    """
    parsed = parse_box_of_truth(truth)
    if not (
        equal("\\frac{1}{2}", "0.5")
        and equal(truth, truth)
        and (not parsed or equal_expressions(parsed, parsed))
    ):
        raise RewardError(f"the ground truth {truth[:80]!r} does not equal itself")


def parse_box_of_truth(truth: str) -> tuple[Any, ...]:
    """Parse a ground truth; () if it exceeds the bounds and can only be compared as text."""
    try:
        parsed = parse_boxed(truth)
        for one in parsed:
            check_tree(one)
    except TooCostlyError:
        return ()
    return parsed


def is_relation_only(answer: str, truth: str) -> bool:
    """Return whether an answer is only a bound ("less than 5" for 5), retracts itself, or says nothing (5 =
    5).
    """
    worded = plain(answer)
    if any(one.strip(" $") == other.strip(" $") for one, other in pairwise(worded.split("="))):
        return True
    if _PRIME.search(answer) and not _PRIME.search(truth):  # arc minutes, or a derivative
        return True
    if (other := _OTHERWISE.search(worded)) and (number := number_of(truth)) is not None:
        return any(found.value not in (number, number * 100) for found in numbers_in(other[1]))
    return bool(_NO_VALUE.search(worded)) and not _NO_VALUE.search(plain(truth))


def opens_with_bound(phrase: str, truth: str) -> bool:
    """Return whether a stated answer is only a bound: "at least 2"."""
    return _BOUND.match(phrase) is not None and not _BOUND.search(plain(truth))


def equal_expressions(
    answer: Sequence[Any], truth: Sequence[Any], *, tolerance: float = RELATIVE_TOLERANCE
) -> bool:
    """Return whether parsed answers are equal. Each one is (parsed object, its text)."""
    return any(same(one, other, tolerance=tolerance) for other in truth for one in answer)


def parse_boxed(answer: str) -> tuple[Any, ...]:
    """Parse the content of a box.

    Raises:
        TooCostlyError: parsing would take too long.
    """
    if len(answer) > MAX_CHARS:
        raise TooCostlyError(f"longer than {MAX_CHARS} characters")
    cleaned = _cleaned(answer)
    check_text(cleaned)
    return _parse_box(f"\\boxed{{{cleaned}}}")


def parse_prose(text: str) -> tuple[Any, ...]:
    """Parse the expression that concludes a whole response.

    Raises:
        TooCostlyError: parsing would take too long.
    """
    check_prose(text)
    return _parse(_EULER.sub(" e", text), LatexExtractionConfig(), ExprExtractionConfig())


def stated_text(text: str) -> str | None:
    """Return the words that a response calls its answer (`The answer is (C), because ...`: "(C)"), or
    None.
    """
    for stated in answer_phrases(text):
        if choice := _CHOICE.match(stated.strip(" $")):
            return choice[1]
        if _CHOICES.match(stated.strip(" $")):
            return stated.strip(" $")
        clause = _CLAUSE.split(stated.strip())[0].strip(" $")
        if is_text(clause):
            return clause
    return None


def stated_plainly(text: str) -> str | None:
    """Return the stated answer of a text without LaTeX: after "the answer is", else after its last "is" or
    "=".
    """
    stated = next(answer_phrases(text), None)
    if stated is None:
        stated = _IS.split(plain(text).strip().rpartition("\n")[2])[-1]
    clause = _SENTENCE.split(stated.strip())[0]
    return _ROOT.sub(r"\\sqrt{\1}", clause).replace("π", r"\pi").replace("√", r"\sqrt") or None


def is_text(answer: str) -> bool:
    """Return whether an answer is one or a few words, a choice like (C), a time or a ratio."""
    return _WORDS.fullmatch(_normal_text(answer)) is not None


def number_of(answer: str) -> Fraction | None:
    """Return the number of an answer that is a number with or without a unit, else None."""
    number = _whole_number(answer)
    return None if number is None else number.value


def canonical(answer: str) -> str | None:
    """Return the canonical form of an answer that has the form of a box's content; None if it is empty.

    Equal numbers have equal forms ("1/2"; 50% is "50"), and so have equal words. Expressions are normalised
    but not simplified.
    """
    if not _normal_text(answer):
        return None
    if (at_sight := _canonical_at_sight(answer)) is not None:
        return at_sight
    try:
        return canonical_expression(parse_boxed(answer), answer)
    except TooCostlyError:
        return " ".join(answer.split())


def canonical_expression(parsed: Sequence[Any], written: str) -> str:
    """Return the canonical form of a parsed answer; `written` if there is none that parses back to it."""
    if (at_sight := _canonical_at_sight(written)) is not None:
        return at_sight
    as_written = " ".join(written.split())
    if not parsed or isinstance(parsed[0], str):
        return as_written
    check_tree(parsed[0])
    text = str(latex(parsed[0]))
    if (at_sight := _canonical_at_sight(text)) is not None:
        return at_sight
    again = parse_boxed(text) if len(text) <= MAX_CHARS else ()
    return text if again and latex(again[0]) == text else as_written


def _canonical_at_sight(answer: str) -> str | None:
    """Return the canonical form of a number or of words, None for all else."""
    if (number := _whole_number(answer)) is not None:
        return str(number.value)
    return _normal_text(answer) if is_text(answer) else None


def _equal_at_sight(answer: str, truth: str, tolerance: float) -> bool | None:
    """Compare without sympy; None if the answers are not plain numbers or texts."""
    answer, truth = _without_lead_in(answer), _without_lead_in(truth)
    if _RATIO.fullmatch(truth.strip()):
        answer = _RATIO_SIGN.sub(":", answer)
    said, true = _normal_text(answer), _normal_text(truth)
    if said == true and (not _ABRIDGED.search(said) or "".join(answer.split()) == "".join(truth.split())):
        return bool(true)
    based, digits = _IN_BASE.match(truth.strip()), _IN_BASE.match(answer.strip())
    if based and based[2] and digits:
        return digits[1] == based[1] and (
            not digits[2] or _BASES.get(digits[2], digits[2]) == _BASES.get(based[2], based[2])
        )
    if digits and digits[2] and not (based and based[2]):
        return False  # the answer has a base, the truth has none
    one, other = _whole_number(answer), _whole_number(truth)
    if (one is None) != (other is None):  # \text{5 apples} and 5
        one, other = one or _worded_number(answer), other or _worded_number(truth)
    if one and other and not _have_other_names(answer, truth):
        return _equal_numbers(one, other, tolerance if "." in truth else 0.0)
    if is_text(truth) and is_text(answer) and "\\text" in answer + truth:
        return False
    return None


def _equal_numbers(answer: _Number, truth: _Number, tolerance: float) -> bool:
    """Compare numbers.

    5 and 5% are equal if the question may ask for a percentage; 0.5 and 0.5% never are.
    """
    values, true = [answer.value], truth.value
    if answer.is_percent != truth.is_percent:
        as_share = answer.value / 100 if answer.is_percent else answer.value * 100
        values = [answer.value, as_share] if abs(true) >= 1 or not true else [as_share]
    allowed = abs(true) * Fraction(str(tolerance)) if true.denominator > 1 else 0
    return any(abs(value - true) <= allowed for value in values)


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
    """Return the number of an answer, without a name before it and a unit after it; None for all else."""
    named = _NAMED.match(answer)
    text = _UNIT.sub("", named["value"] if named else answer)
    if (repeating := _repeating(text)) is not None:
        return _Number(repeating, is_percent=False)
    text = with_signs(plain(text).strip(), decimal_commas=False).strip(" $").rstrip(".")
    bare = re.sub(r"\s?(?:°|degrees|dollars|units)$", "", text)
    without_percent = re.sub(r"\s?(?:%|percent)$", "", bare)
    found = numbers_in(without_percent)
    is_all = len(found) == 1 and (found[0].start, found[0].end) == (0, len(without_percent))
    is_percent = without_percent != bare or bool(
        re.search(r"\\(?:text|mathrm)\{\s*(?:percent|\\%)\s*\}\s*$", answer)
    )
    return _Number(found[0].value, is_percent) if is_all and found[0].value is not None else None


def _worded_number(answer: str) -> _Number | None:
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


def _without_lead_in(answer: str) -> str:
    return _LEAD_IN.sub(lambda found: "" if found["end"] else "\\text{", _INVISIBLE.sub("", answer))


def _cleaned(answer: str) -> str:
    r"""Return LaTeX that the parser understands: 1\,234 without its space, ° as a command, 4i as 4 i."""
    text = _without_lead_in(_OF_WHAT.sub("", answer))
    if such := _SUCH_THAT.fullmatch(text):
        text = such["condition"]
    text = _OVER.sub(
        r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac{\1}{\2}", _BIG.sub("", _FOR_ALL.sub("", text)))
    )
    text = _IN_DEGREES.sub(r"\\\1\\left(\\frac{\2\\pi}{180}\\right)", text.replace("{\\text{o}}", "\\circ"))
    text = _ROOT_SIGN.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = _THIN_SPACE.sub("", text).replace("~", " ").replace("°", "^{\\circ}").replace("\u2212", "-")
    return _IMAGINARY.sub(" i", _EULER.sub(" e", text).strip().removesuffix("."))


@lru_cache(maxsize=1024)
def _parse_box(text: str) -> tuple[Any, ...]:
    return _parse(text, LatexExtractionConfig())


def _parse(text: str, *kinds: Any) -> tuple[Any, ...]:
    return tuple(parse(text, kinds, parsing_timeout=None))
