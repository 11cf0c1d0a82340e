"""Which number of a text is its answer: the one that an answer states, or the one that a whole response concludes with.

Every pattern is bounded, and so is the text: the checkers run in the event loop.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from fractions import Fraction

from agentrl.rewards.number_words import number_in_words
from agentrl.rewards.numbers import Found, has_number, numbers_in, with_signs
from agentrl.rewards.plain import plain

MAX_TAIL_CHARS = 2000
"""How far an answer is looked for: it bounds the time, for the rewards run in the event loop."""
MAX_LINE_CHARS = 300
MAX_PHRASES = 5
MAX_WORDS_CHARS = 60
"""A longer response is no number in words."""

# Between two numbers: a unit, and what makes a sum, its result, or several answers of them.
_WORDS = r"(?:\s?[A-Za-z%]{1,20}){0,2}"
_SIGNS = r"(?:[-+*×·/±]|\b(?:times|plus|minus|multiplied by|divided by)\b)"
_OPERATOR = re.compile(rf"{_WORDS}\s?{_SIGNS}\s?\$?")
_COMES_TO = re.compile(rf"{_WORDS},?\s(?:which\s)?(?:is|equals|makes|gives)\s\$?")
_EQUALS = re.compile(r"\s?[A-Za-z%$]{0,20}\s?[=≈]\s?[$€£¥₹]?")
_ALTERNATIVE = re.compile(rf"{_WORDS}\s?(?:,?\s?\b(?:or|to|through|versus|vs\.?)\b|{_SIGNS})\s?(?:about\s|perhaps\s|maybe\s|even\s)?\$?")
_LIST = re.compile(rf"\s?(?:,|;|&)\s?(?:and|or)?\s?\$?|{_WORDS},?\s(?:and|or)\s\$?")
# Where an answer stands.
_ANSWER_IS = re.compile(
    r"(?i)\b(?:answer|correct (?:option|choice))(?:[ ](?:to|for|of)[ ][^\n.:=]{1,60}?)?[ ]?(?:\([^()\n]{1,40}\))?"
    r"(?:\s{0,3}(?:\bis\b|\bwas\b|would[ ]be|should[ ]be|will[ ]be|must[ ]be|equals|:|=|->|→|-(?=[ ]))){1,2}\s{0,10}|"
    r"\banswer[ ]?\n\s{0,10}|答案(?:是|为|:){1,2}\s?"
)
_SECOND_THOUGHT = re.compile(
    r"(?i)\b(?:wait|actually|correction|hold on|scratch that|i made an? (?:mistake|error))\b|\bno,\s(?=[$\\]{0,3}[0-9])"
)
_SENTENCE_END = re.compile(r"(?<!\bapprox)(?<!\bca)(?<!\bRs)[.!?](?=\s|$)")
_INTRODUCTION = re.compile(
    r"(?i)(?:\s|[$€£¥₹≈~=:(\[\"']|\b(?:a|an|the|is|it|exactly|approximately|about|around|roughly|approx\.|only|just|simply|total|of|"
    r"equal|to|be|therefore|so|thus|indeed|still|then|also|again)(?!\w))*+"
)
_LEAD = re.compile(
    r"[=≈]|(?P<colon>:(?=\s))|\brounds (?:up |down )?to\b|\bis\b(?=\s?\$?-?[0-9])|(?P<converted>\bwhich is\b)|"
    r"(?P<clause>,? so\b|\bmeaning\b|\bwhich means\b)"
)
_REASON = re.compile(r"(?<!\band)\s(?:because|since)\b|,\s?where\b|,\swhich is [$]?[0-9.,]{1,20} (?:more|less|fewer|times|older|younger)\b")
_FACTORIAL = re.compile(r"(?<=[0-9])!")
_IS_THE_ANSWER = re.compile(r"(?i)\bis (?:the|our|my) (?:final |correct )?answer\b")
_ASIDE = re.compile(r"\([^()\n]{0,200}\)")
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*(?!\s?:)|\\(?:textbf|mathbf)\{([^{}\n]{1,200})\}")
_LIST_MARK = re.compile(r"\A\s*(?:[0-9]{1,3}[.)]|[-*•])\s")
_BULLET = re.compile(r"\A[-•][ \t]")
_UNFINISHED = re.compile(r"\s?[=+*×/-]\s*")


def stated_number(text: str) -> Fraction | None:
    """Return the number that a text given as the answer (behind `####`, in a box, after "the answer is") states, or None.

    It is the number at the beginning of its first sentence; of a sum that is worked out there (16 - 3 = 13) the result; else the
    number behind the last equals sign or colon, else the last. Alternatives (72 or 73), ranges, lists and sums that are not
    worked out state none.
    """
    line = with_signs(_first_sentence(plain(text[:MAX_LINE_CHARS])))
    line = _without_reason(_without_asides(line))
    found = numbers_in(line)
    if not found:
        return number_in_words(line)
    start = 0 if _INTRODUCTION.fullmatch(line, 0, found[0].start) else _behind_last_lead(line, found, colons=True)
    if start == 0 and _end_of_sum(line, found, start):  # worked out in several steps: the last one's result
        start = _behind_last_lead(line, found, colons=True)
    return _result(line, found, start, (_ALTERNATIVE, _LIST))


def boxed_number(inside: str) -> Fraction | None:
    """Return the number that the inside of a box states; there 5! is a factorial, no exclamation."""
    return stated_number(_FACTORIAL.sub("^", inside))


def concluding_number(text: str) -> Fraction | None:
    """Return the number that a whole response ends with: behind its last "answer is", else in bold in its last line, else its last.

    What stands before a second thought ("wait", "actually") counts only where no number follows it.
    """
    tail = without_first_thoughts(text[-MAX_TAIL_CHARS:])
    for stated in answer_phrases(tail):
        if (number := stated_number(stated)) is not None:
            return number
    if named := _IS_THE_ANSWER.search(tail):  # "18 is the answer"
        tail = tail[: named.start()]
    return _last_number(tail) if len(tail) > MAX_WORDS_CHARS or has_number(plain(tail)) else stated_number(tail)


def without_first_thoughts(text: str) -> str:
    """Return what follows the last second thought ("wait", "actually"); all of the text where no number follows it."""
    cut = max((found.end() for found in _SECOND_THOUGHT.finditer(text)), default=0)
    return text[cut:] if cut and has_number(plain(text[cut:])) else text


def answer_phrases(text: str) -> Iterator[str]:
    """Yield what follows each "the answer is" of a response, to the end of its line, as plain text, from the last on."""
    readable = plain(text[-MAX_TAIL_CHARS:])
    for phrase in list(_ANSWER_IS.finditer(readable))[: -MAX_PHRASES - 1 : -1]:
        stated = readable[phrase.end() : phrase.end() + MAX_LINE_CHARS].partition("\n")[0]
        yield _BULLET.sub("", stated, count=1) if "\n" in phrase[0] else stated


def _last_number(text: str) -> Fraction | None:
    """Return what the last line with a number concludes with: its last number in bold, else that of its last sentence with one."""
    for raw in reversed(text.splitlines()):
        line = with_signs(_LIST_MARK.sub("", plain(raw)))
        if not has_number(line):
            continue
        bold = [number for one, other in _BOLD.findall(raw) if (number := stated_number(one or other)) is not None]
        return bold[-1] if bold else next(_concluded(sentence) for sentence in _sentences_from_last(line) if has_number(sentence))
    return None


def _concluded(sentence: str) -> Fraction | None:
    """Return the number behind the last equals sign of a sentence, else its last one; None when it is cut off or not worked out."""
    sentence = _without_reason(_without_asides(sentence))
    found = numbers_in(sentence)
    start = _behind_last_lead(sentence, found, colons=False)
    return None if _UNFINISHED.fullmatch(sentence, found[-1].end) else _result(sentence, found, start, (_ALTERNATIVE,))


def _first_sentence(text: str) -> str:
    text = text.strip()
    end = _SENTENCE_END.search(text)
    return text[: end.start()] if end else text


def _sentences_from_last(line: str) -> Iterator[str]:
    end = len(line)
    for found in reversed(list(_SENTENCE_END.finditer(line))):
        yield line[found.end() : end]
        end = found.start()
    yield line[:end]


def _without_asides(line: str) -> str:
    """Return a line without what stands in parentheses, unless its numbers do."""
    without = _ASIDE.sub(" ", line)
    return without if without == line or has_number(without) else line


def _behind_last_lead(line: str, found: Sequence[Found], *, colons: bool) -> int:
    """Return the position of the number that the last equals sign (or "rounds to", a colon, "so") leads to; of the last number without."""
    chosen = len(found) - 1
    has_equals, starts = False, [number.start for number in found]
    for lead in _LEAD.finditer(line):
        later = bisect_left(starts, lead.end())
        if later == len(found):
            break
        if lead["clause"]:
            chosen = len(found) - 1
        elif (colons or not lead["colon"]) and (has_equals or not lead["converted"]):
            chosen = later
        has_equals = has_equals or lead[0] in "=≈"
    return chosen


def _without_reason(line: str) -> str:
    """Return a sentence without what follows "because", unless its numbers do."""
    reason = _REASON.search(line)
    return line[: reason.start()] if reason and has_number(line[: reason.start()]) else line


def _result(line: str, found: Sequence[Found], start: int, joints: tuple[re.Pattern[str], ...]) -> Fraction | None:
    """Return number `start`, or what the sum that begins there comes to; None without a result, or beside one of `joints`."""
    end = _end_of_sum(line, found, start)
    if end is None or _is_joined(line, found, start, joints) or _is_joined(line, found, end + 1, joints):
        return None
    return found[end].value


def _end_of_sum(line: str, found: Sequence[Found], start: int) -> int | None:
    """Return the position of the result of the sum that begins at number `start` (itself without operators), None without a result."""
    is_open = False
    for position in range(start, len(found) - 1):
        gap = line[found[position].end : found[position + 1].start]
        if _EQUALS.fullmatch(gap) or (is_open and _COMES_TO.fullmatch(gap)):
            is_open = False
        elif _OPERATOR.fullmatch(gap) or (gap.isspace() and line[found[position + 1].start] in "+-"):
            is_open = True
        else:
            return None if is_open else position
    return None if is_open else len(found) - 1


def _is_joined(line: str, found: Sequence[Found], position: int, joints: tuple[re.Pattern[str], ...]) -> bool:
    """Tell whether number `position` is only one of several on offer together with a different one before it."""
    if not 0 < position < len(found) or found[position - 1].value == found[position].value:
        return False
    gap = line[found[position - 1].end : found[position].start]
    is_subtracted = gap.isspace() and line[found[position].start] in "+-"
    return is_subtracted or any(joint.fullmatch(gap) for joint in joints)
