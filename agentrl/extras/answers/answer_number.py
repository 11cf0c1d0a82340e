"""Extraction of the answer number: from a stated answer, or from the conclusion of a whole response.

An answer states a number only if it can mean nothing else. Every other number in it must be explained: as
part of a sum that results in the answer, as a premise ("so", "which is"), as a detail ("18 dollars for 9
eggs"), or as the same value again. Several values, relations ("less than 18", "> 17"), false equations and
retracted answers ("18 is wrong") state no number.

All patterns are bounded, and so is the text: the checkers run in the event loop.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set
from fractions import Fraction
from itertools import pairwise

from agentrl.extras.answers.equations import is_false, is_no_result, worked_out
from agentrl.extras.answers.number_words import number_in_words
from agentrl.extras.answers.numbers import (
    FoundNumber,
    has_number,
    in_smaller_unit,
    numbers_in,
    unit_of,
    with_signs,
)
from agentrl.extras.answers.plain_text import plain

MAX_TAIL_CHARS = 4000
"""Characters at the end of a response that are searched for an answer without `####` or a box.

Rewards run in the event loop, so time must be bounded.
"""
MAX_LINE_CHARS = 300
MAX_PHRASES = 5
MAX_WORDS_CHARS = 60
"""A longer response is not a number in words."""
MAX_BARE_CHARS = 60
"""A longer line is a sentence; a shorter one may consist of values only."""
MAX_NUMBERS = 40
"""A text with more numbers is not an answer."""

PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})")
"""Most answers and ground truths are written like this, and need no search for the number."""

# Text between two numbers: a unit, and the signs of a sum, of its result, or of several answers.
_WORDS = r"(?:\s?[A-Za-z%]{1,20}){0,2}"
_SIGNS = r"(?:[-+*×·/±]|\b(?:times|plus|minus|multiplied by|divided by)\b)"
_OPERATOR = re.compile(rf"{_WORDS}\s?,?\s?{_SIGNS}\s?\$?")
_COMES_TO = re.compile(rf"{_WORDS},?\s(?:which\s)?(?:is|equals|makes|gives)\s\$?")
_EQUALS = re.compile(r"\s?[A-Za-z%$]{0,20}\s?[=≈≡]\s?[$€£¥₹]?")
_ALTERNATIVE = re.compile(
    rf"{_WORDS}\s?(?:,?\s?\b(?:and/or|or|to|through|versus|vs\.?)\b|{_SIGNS})\s?(?:about\s|perhaps\s|maybe\s|even\s)?\$?"
)
_LIST = re.compile(rf"\s?(?:,|;|&|//)\s?(?:and|or)?\s?\$?|{_WORDS},?\s(?:and|or)\s\$?")
_BARE_LIST = re.compile(r"\s?(?:,|;|&|//)\s?(?:and|or)?\s?\$?")
# Text that explains the numbers beside the answer.
_PREMISE = re.compile(
    r"(?i)\b(?:so|therefore|thus|hence|meaning|means|which (?:is|makes|gives|means)|that "
    r"is|that's|i\.e|rounds (?:up |down )?to|rounded (?:up |down )?to|or rather|comes "
    r"to|makes|gives|yields|leaves|leaving|total(?:ing|s)?|altogether|in all|in total)\b|→|⇒|->|=>"
)
_NAMED_SUM = re.compile(
    r"\s?[,;]\s?(?:and\s)?[A-Za-z][A-Za-z0-9_]{0,6}(?:\s?[-+×*/]\s?[A-Za-z][A-Za-z0-9_]{0,6}){1,5}\s?=\s?\$?"
)
_UNIT = r"(?:[\s/-]{0,2}[$€£¥₹%°\"']?[A-Za-z%°$]{0,20}[.\"']?(?:\^[23])?){0,4}?"
_DETAIL = re.compile(
    rf"(?i){_UNIT},?\s?(?:[/@(\[]|\b(?:per|for|from|in|at|of|out "
    rf"of|by|after|with|on|during|within|if|when|where|than|given|"
    r"assuming|using|including|before|until|since|as|because|among|across|every|each "
    r"of)\b)(?:\s?[A-Za-z$€£'\"#(]{1,20}){0,6}\s?[$€£]?"
)
_REMAINDER = re.compile(r"(?i)\b(?:remainder|r|rem|mod|modulo|choose|base|point|squared|cubed|factorial)\b")
# Text that turns a number into something else, or retracts it.
_BELOW_OR_ABOVE = re.compile(
    r"(?i)(?:(?<![-=])>|[<≤≥≠≮≯∈∉∪±]|\b[b-hj-zB-HJ-Z]\s?[-+*×/]|\b(?:log|ln|lg|exp|sin|cos|tan|sqrt)|[√ƒ∞π]\s?[-+*×/]?"
    r"|\b(?:wrong|incorrect|false|mistaken|bad)(?:\s\w{1,12})?\s?(?::|is|was|would "
    r"be|=)|(?:\b(?:less|more|fewer"
    r"|greater|larger|smaller|bigger|higher|lower|older|younger|longer|shorter|better)(?:\sor\s"
    r"equal)?\s(?:than|to)|\bat (?:least|most)|\bup "
    r"to|\b(?:under|over|above|below|beyond|exceed(?:s|ing)?|nearly|almost|barely|(?:close|next|near) to"
    r"|max|minimum|maximum|not exceeding|upwards? of|as (?:many|much|few|little) as|multiples? of|divisible "
    r"by|half|third|twice|double|triple|thrice|(?:halves|quarter|fourth|fifth|sixth|eighth|tenth|percent|per "
    r"cent|multiple|factor|divisor|power|root|square|cube"
    r"|factorial|reciprocal|inverse|opposite|complement)s? "
    r"of|sqrt|without|except|excluding|(?:all|every(?:thing|one)|any(?:thing|one)?) but|other "
    r"than|besides|apart from|aside from|different (?:from|than|to)|(?:far|away|off) "
    r"from|unequal(?:\sto)?|unlike|anywhere (?:near|from)|between|within|neither|nor|either)(?:\s(?:of|or "
    r"equal to|than|exactly|a|an))?))\s?(?:about\s)?[(\[]?[$€£¥₹]?\s?$"
)
_OR_MORE = re.compile(
    rf"(?i)(?:\s?[-+*×]\s?\(?[b-hj-z]\b|\s?\\[lcv]?dots|ths\b|\s?(?:‰|%%|per mille\b|basis points\b|half[- "
    rf"]dozens?\b)|\s?!!+|,?\s(?:plus or minus|give or "
    rf"take|plus/minus)\b|\swithin\s[0-9.]{{1,9}}\s?%?\s*\Z|\s?(?:%|percent|per cent)?\s?of [$€£]?-?[0-9]"
    rf"|\s?mod(?:ulo)?\s?[0-9]|{_UNIT}\s?(?:(?<![-=])>|[<≤≥≠≮≯±+]|\b(?:or|and) "
    rf"(?:more|less|fewer|greater|above|below|up|upwards?|over|under|higher|lower|beyond)\b"
    r"|\b(?:(?:at|or) (?:least|most)|minimum|max(?:imum)?|plus|tops|and "
    r"counting|squared|cubed|factorial|point|and (?:a )?(?:bit|some|change|something)|something|odd|and "
    r"(?:one|another)|too (?:many|much|few|little)|(?:ten|hundred|thousand)ths?|halves)\b|\bor "
    r"(?!so\b|[$€£]?-?[0-9])[A-Za-z]))"
)
_WITHDRAWN = re.compile(
    r"(?i)(?:\b(?:is|are|was|were|be|being|seems?|looks?|that's|it's|isn't|wasn't)\s(?:\w{1,15}\s)?(?:wrong|incorrect|mistaken"
    r"|false|untrue|invalid|impossible|off|a mistake|an error|a typo|not right|not correct|not the "
    r"(?:\w{1,10}\s)?(?:answer|result|solution)|not it|(?:right|correct|the (?:\w{1,10}\s)?answer)(?<=n't "
    r"right)|not possible|not true|too (?:much|many|high|low|small|large|big|few|little))\b"
    r"|\b(?:isn't|wasn't|is not|was not|cannot be|can't be)\s(?:right|correct|true|possible|it|the "
    r"(?:\w{1,10}\s)?(?:answer|result|solution))\b|[-,:(]\s?(?:this is "
    r")?(?:wrong|incorrect|no|nope|not|false)\b(?=\s?[).,;:!?]|\s*$)|\?\s?(?:no|nope)\b|[✗✘❌✖]|\b(?:ignore"
    r"|discard|scrap) (?:that|this|it)\b|\b(?:was|were) my (?:first|initial|old|previous) )"
)
_THAT = re.compile(r"(?i)\s?(?:that|to say)\b")
_UNDECIDED = re.compile(
    r"(?i)\b(?:no (?:answer|solution)|(?:can ?not|can't) be "
    r"(?:determined|known|solved|found)|undefined|undetermined|depends|insufficient|not enough"
    r"|unknown|unsolvable|impossible)\b"
)
_NEGATION = re.compile(
    r"(?i)(?:,?\s?\b(?:and|but)\s)?(?:,\s?)?\b(?:not|never|no longer|nobody|no one|hardly|rather "
    r"than|instead of|(?:is|was|are|were|do|does|did|would|could|should|ca|wo)n't|cannot|as opposed "
    r"to|unlike)\b"
)
_CLAUSE_END = re.compile(r",|;|:|\bbut\b|\brather\b|\binstead\b|[.!?](?=\s|$)|[-–—] ")
# Text that announces an answer.
_ANSWER_IS = re.compile(
    r"(?i)\b(?:answer|correct (?:option|choice))(?:[ ](?:to|for|of)[ ][^\n.:=]{1,60}?)?[ "
    r"]?(?:\([^()\n]{1,40}\))?(?:\s{0,3}(?:\bis\b|\bwas\b|would[ ]be|should[ ]be|will[ ]be|must[ "
    r"]be|equals|:|=|->|→|-(?=[ ]))){1,2}\s{0,10}|\banswer[ ]?\n\s{0,10}|答案(?:是|为|:){1,2}\s?"
)
_SECOND_THOUGHT = re.compile(
    r"(?i)\b(?:wait|actually|correction|hold on|scratch that|i made an? (?:mistake|error)|on second "
    r"thought|i meant?|let me correct)\b|\b(?:no|nope|sorry),?\s(?=(?:it's |it is |rather "
    r")?[$\\]{0,3}[0-9])|\b(?:oops|hmm+)\b"
)
_SENTENCE_END = re.compile(
    r"(?<!\bapprox)(?<!\bca)(?<!\bRs)(?<!\bi\.e)(?<!\be\.g)[.!?](?=\s|$)(?!\s?[=+*×/^])"
)
_INTRODUCTION = re.compile(
    r"(?i)(?:\s|[$€£¥₹≈~=:(\[\"']|\b(?:a|an|the|is|it|exactly|approximately|about|around|roughly|approx\.|only|just|simply|total|of|"
    r"equal|to|be|therefore|so|thus|indeed|still|then|also|again)(?!\w))*+"
)
_LEAD = re.compile(
    r"[=≈≡]|(?P<colon>:(?=\s))|\brounds (?:up |down )?to\b|\bis\b(?=\s?\$?-?[0-9])|(?P<converted>\bwhich "
    r"is\b)|(?P<clause>,? so\b|\bmeaning\b|\bwhich means\b)"
)
_REASON = re.compile(
    r"(?<!\band)\s(?:because|since)\b|,\s?where\b|,?\swhich is [$]?[0-9.,]{1,20} "
    r"\w{0,15}\s?(?:more|less|fewer|times|older|younger)\b"
)
_FACTORIAL = re.compile(r"(?<=[0-9])\s?!")
_FACTORIAL_IN_LATEX = re.compile(r"(?<=[0-9])!(?=\s?(?:\$|\\[)\]]))")
_MACRO = re.compile(r"\\(?:def|let|(?:re)?newcommand|providecommand|input|include|write)(?![a-z])")
_IS_THE_ANSWER = re.compile(r"(?i)\bis (?:the|our|my) (?:final |correct )?answer\b")
_ASIDE = re.compile(
    r"(?<![0-9)+*×/^=-])(?<![+*×/^=-]\s)\([^()\n]{0,200}\)(?!\s?[+*×/^(]|-|\s-\s?[0-9])|\[[^\[\]\n]{0,200}\]"
)
_OTHER_ASIDE = re.compile(
    r"(?i)[(\[]\s?(?:or|maybe|perhaps|alternatively|possibly|could be|might be|may be|should be"
    r"|correction|corrected|edit|typo|actually|instead|i mean|rather|else)\b"
)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*(?!\s?:)|\\(?:textbf|mathbf)\{([^{}\n]{1,200})\}")
_LIST_MARK = re.compile(r"\A\s*(?:\(?[0-9]{1,3}[.)]|[-*•]|>{3})\s")
_BULLET = re.compile(r"\A[-•][ \t]")
_UNFINISHED = re.compile(r"\s?[=+*×/-]\s*")
_BARE = re.compile(rf"\s?[$€£¥₹]?\s?0{_UNIT}[.!?]?\s*")
_VALUES = re.compile(
    r"(?:\s?(?:and\s)?(?:[A-Za-z]\w{0,12}\s?(?:is|=|:)\s?)?[(\[{$]{0,2}0[)\]}$]{0,2}(?:\s[A-Za-z]{1,15}){0,2}\s?[,;.&|]?){2,20}"
)
_TAKEN_BACK = re.compile(
    r"(?i)\s*(?:is|was|seems|looks)\s(?:\w{1,12}\s)?(?:wrong|incorrect|mistaken|not right|not correct|not "
    r"the answer)\b|\s*\?\s*no\b|[.;\s]*(?:but\s)?(?:this|that|it)(?:'s| is)\s(?:only|just)\s(?:an? |the "
    r")?(?:half|part|first|intermediate)"
    r"|\s*(?:no[,.;]?\s)?(?:wait[,.;]?\s|sorry[,.;]?\s|but\s)?(?:that|this|it|the (?:above|answer above)|my "
    r"(?:answer|result))(?:'s| is| was| seems| looks)\s(?:\w{1,12}\s)?(?:wrong|incorrect|mistaken|false|a "
    r"mistake|an error|not right|not correct)\b|\s*\b(?:wrong|incorrect|scratch that|i was wrong|i made an? "
    r"(?:mistake|error)|ignore that)\s*(?:[.!,]|$)"
)
_OFFER = re.compile(
    r"(?i)[\s.,;*)}$\\]*(?:or|alternatively|otherwise|perhaps|maybe|possibly|edit|update|correction|corrected|revised|instead|ou|oder"
    r"|或)\b(?:\s*[:,-])?"
)
_CONTEXT = re.compile(
    r"(?i)\b(?:in|after|for|of|at|by|from|with|on|during|over|all|the|these|those|her|his|their|its|step|day|week|month|year"
    r"|part|case|no\.|"
    r"question|problem|option|since|every|per|if|when|given)\s?(?:\w{1,12}\s)?[$€£#]?$|\A\s*[(\[]$"
)
_LAST_MARK = re.compile(r"(\\[A-Za-z]{1,20}|[^\w\s])[\s{(\[$€£¥₹\"'*]{0,5}\Z")
_NEXT_MARK = re.compile(r"[\s})\]$€£¥₹%\"'*]{0,5}([^\w\s!])")
_HARMLESS_SIGNS = "=≈~≡+×/|→⇒<>±≤≥∴∵"  # relations are judged by their operands
_MARK_AT_END = re.compile(r"[\s#*]+$")


def stated_number(text: str) -> Fraction | None:
    """Return the number that an answer (after `####`, in a box, after "the answer is") states, or None.

    It is the number at the beginning of its first sentence, or the result of a worked-out sum there (16 - 3 =
    13). Else it is the number after the last equals sign or colon, else the last number. Alternatives (72 or
    73), ranges, lists, relations and unfinished sums state no number.
    """
    if PLAIN_INTEGER.fullmatch(text):
        return Fraction(int(text))
    text = _FACTORIAL_IN_LATEX.sub("^", text[:MAX_LINE_CHARS])
    whole = (
        "" if _MACRO.search(text) else with_signs(without_first_thoughts(_MARK_AT_END.sub("", plain(text))))
    )
    first, rest = _first_sentence(whole)
    line = _what_is_meant(first)
    found = numbers_in(line)
    if not found:
        return number_in_words(line)
    if len(found) > MAX_NUMBERS or _is_taken_back(rest, found) or is_false(line):
        return None
    if (value := worked_out(line)) is not None:
        return value
    start = (
        0 if _INTRODUCTION.fullmatch(line, 0, found[0].start) else _behind_last_lead(line, found, colons=True)
    )
    if start == 0 and _end_of_sum(line, found, start):  # in several steps: the result of the last one
        start = _behind_last_lead(line, found, colons=True)
    end = _end_of_sum(line, found, start)
    if end is None:
        return None
    number = _result(line, found, start, (_ALTERNATIVE, _LIST))
    return number if number is not None and _are_accounted_for(line, found, start, end) else None


def boxed_number(inside: str) -> Fraction | None:
    """Return the number that the content of a box states. There, 5! is a factorial, not an exclamation."""
    return stated_number(_FACTORIAL.sub("^", inside))


def is_contradicted(number: Fraction | None, text: str) -> bool:
    """Return whether the text after a stated number retracts it: "that is wrong", or another number as the
    answer.
    """
    tail = text[:MAX_TAIL_CHARS]
    if _TAKEN_BACK.match(tail.lstrip("}$*.!) \n")):
        return True
    if number is None:
        return False
    if _offers_another(tail, {number}):
        return True
    others = [stated_number(stated) for stated in answer_phrases(tail)]
    if (thought := without_first_thoughts(tail)) != tail:
        others.append(_last_number(thought))
    return any(other is not None and other != number for other in others)


def concluding_number(text: str) -> Fraction | None:
    """Return a response's concluding number: after its last "answer is", else the last bold one, else the
    last.

    Text before a second thought ("wait", "actually") counts only if no number follows that.
    """
    tail = without_first_thoughts(text[-MAX_TAIL_CHARS:])
    for stated in answer_phrases(tail):
        if (number := stated_number(stated)) is not None:
            return None if is_contradicted(number, tail.rpartition(stated)[2]) else number
        if _states_too_much(stated):
            return None
    if _TAKEN_BACK.match(_last_sentence(tail)):
        return None
    if named := _IS_THE_ANSWER.search(tail):  # "18 is the answer"
        tail = tail[: named.start()]
    return (
        _last_number(tail) if len(tail) > MAX_WORDS_CHARS or has_number(plain(tail)) else stated_number(tail)
    )


def _states_too_much(stated: str) -> bool:
    """Return whether the text called the answer begins with several values, or with a false sum."""
    line, _ = _first_sentence(with_signs(stated))
    found = numbers_in(line)
    if not found or not _INTRODUCTION.fullmatch(line, 0, found[0].start):
        return False
    return is_false(line) or _is_joined(line, found, 1, (_ALTERNATIVE, _BARE_LIST))


def without_first_thoughts(text: str) -> str:
    """Return the text after the last second thought ("wait", "actually").

    The whole text if no number follows it.
    """
    cut = max((found.end() for found in _SECOND_THOUGHT.finditer(text)), default=0)
    return text[cut:] if cut and has_number(plain(text[cut:])) else text


def answer_phrases(text: str) -> Iterator[str]:
    """Yield the rest of the line after each "the answer is", as plain text, last one first."""
    readable = plain(text[-MAX_TAIL_CHARS:])
    for phrase in list(_ANSWER_IS.finditer(readable))[: -MAX_PHRASES - 1 : -1]:
        stated = readable[phrase.end() : phrase.end() + MAX_LINE_CHARS].partition("\n")[0]
        yield _BULLET.sub("", stated) if "\n" in phrase[0] else stated


def _last_number(text: str) -> Fraction | None:
    """Return the conclusion of the last line with a number: its last bold number, else that of its last
    sentence.
    """
    for raw in reversed(text.splitlines()):
        line = with_signs(_LIST_MARK.sub("", plain(_FACTORIAL_IN_LATEX.sub("^", raw))))
        if not has_number(line):
            continue
        if _are_several(line):
            return None
        bold = [
            number for one, other in _BOLD.findall(raw) if (number := stated_number(one or other)) is not None
        ]
        return (
            bold[-1]
            if bold
            else next(_concluded(sentence) for sentence in _sentences_from_last(line) if has_number(sentence))
        )
    return None


def _are_several(line: str) -> bool:
    """Return whether a line consists of several values: "x is 17, y is 18", "18 apples 19 pears"."""
    found = numbers_in(line) if len(line) <= MAX_BARE_CHARS else []
    gaps = [line[one.end : other.start] for one, other in pairwise(found)]
    if (
        len({number.value for number in found}) < 2
        or any(map(_OPERATOR.fullmatch, gaps))
        or any(map(_EQUALS.fullmatch, gaps))
    ):
        return False
    for number in reversed(found):
        line = f"{line[: number.start]}0{line[number.end :]}"
    return _VALUES.fullmatch(line) is not None


def _concluded(sentence: str) -> Fraction | None:
    """Return the number after a sentence's last equals sign, else its last one.

    None if cut off or not worked out.
    """
    sentence = _what_is_meant(sentence)
    found = numbers_in(sentence)
    if not found or is_false(sentence):
        return None
    if (value := worked_out(sentence)) is not None:
        return value
    start = _behind_last_lead(sentence, found, colons=False)
    return (
        None
        if _UNFINISHED.fullmatch(sentence, found[-1].end)
        else _result(sentence, found, start, (_ALTERNATIVE,))
    )


def _first_sentence(text: str) -> tuple[str, str]:
    text = text.strip()
    end = _SENTENCE_END.search(text)
    return (text[: end.start()], text[end.end() :]) if end else (text, "")


def _what_is_meant(sentence: str) -> str:
    """Return a sentence without denials, reasons and asides; "" if it states two things."""
    for withdrawn in reversed(list(_WITHDRAWN.finditer(sentence))):
        sentence = sentence[withdrawn.end() :]
        if _THAT.match(sentence):  # "it is not true that it is 18"
            return ""
        break
    other = _OTHER_ASIDE.search(sentence)
    if _UNDECIDED.search(sentence) or (other and has_number(sentence[other.start() :])):
        return ""
    return _without_reason(_without_asides(_without_negations(sentence)))


def _without_negations(sentence: str) -> str:
    """Return a sentence without its negated clauses: "18, not 17" becomes "18"."""
    for _ in range(MAX_PHRASES):
        if not (denied := _NEGATION.search(sentence)):
            break
        end = _CLAUSE_END.search(sentence, denied.end())
        sentence = sentence[: denied.start()] + " " + (sentence[end.start() :] if end else "")
    return sentence


def _is_taken_back(rest: str, found: Sequence[FoundNumber]) -> bool:
    """Return whether the text after an answer's first sentence retracts it, or has another number."""
    if _TAKEN_BACK.match(rest) or _offers_another(rest, {number.value for number in found}):
        return True
    others = numbers_in(rest)
    if len(others) != 1 or not _BARE.fullmatch(rest[: others[0].start] + "0" + rest[others[0].end :]):
        return False
    return all(number.value != others[0].value for number in found)


def _offers_another(rest: str, values: Set[Fraction | None]) -> bool:
    """Return whether a text continues with another number instead: "or maybe 17", "Edit: it should be 20"."""
    if not (offer := _OFFER.match(rest)):
        return False
    line = with_signs(plain(rest[offer.end() : offer.end() + MAX_BARE_CHARS].partition("\n")[0]))
    other = next(iter(numbers_in(line)), None)
    if other is None or other.value is None:
        return False
    return other.value not in values and not (unit_of(line, other)[1] and other.value / 100 in values)


def _are_accounted_for(line: str, found: Sequence[FoundNumber], start: int, end: int) -> bool:
    """Return whether the numbers beside the sum start..end are explained: premises before, details after
    it.
    """
    value = found[end].value
    for position in range(start):
        gap = line[found[position].end : found[position + 1].start]
        is_step = _are_same(line, found[position], found[position + 1]) or any(
            joint.fullmatch(gap) for joint in (_OPERATOR, _EQUALS, _COMES_TO, _NAMED_SUM)
        )
        if not (
            is_step
            or _PREMISE.search(gap)
            or _CONTEXT.search(line[max(0, found[position].start - 40) : found[position].start])
        ):
            return False
    others = [number.value for number in found[end + 1 :]]
    if None in others or _is_breakdown(value, others):
        return None not in others
    is_detail = False
    for position in range(end, len(found) - 1):
        gap = line[found[position].end : found[position + 1].start]
        if _are_same(line, found[end], found[position + 1]):
            continue
        if _REMAINDER.search(gap) or not (
            _DETAIL.fullmatch(gap) or (is_detail and (_OPERATOR.fullmatch(gap) or _EQUALS.fullmatch(gap)))
        ):
            return False
        is_detail = True
    return True


def _are_same(line: str, one: FoundNumber, other: FoundNumber) -> bool:
    """Return whether two numbers have one value: 18 and 18.00, 1/4 and 25%, 90 minutes and 1.5 hours."""
    if one.value is None or other.value is None:
        return False
    if one.value == other.value:
        return True
    (unit, is_share), (other_unit, is_other_share) = unit_of(line, one), unit_of(line, other)
    if is_share != is_other_share:
        return one.value == other.value / 100 if is_other_share else one.value / 100 == other.value
    return other.value == in_smaller_unit(one.value, unit, other_unit) or one.value == in_smaller_unit(
        other.value, other_unit, unit
    )


def _is_breakdown(value: Fraction | None, parts: Sequence[Fraction | None]) -> bool:
    """Return whether the numbers after an answer are its parts: 22 legs, 12 from dogs and 10 from birds."""
    numbers = [part or Fraction(0) for part in parts]
    return len(parts) > 1 and value in (sum(numbers), math.prod(numbers[:6]))


def _last_sentence(text: str) -> str:
    return next(
        (sentence for sentence in _sentences_from_last(text.strip().rpartition("\n")[2]) if sentence.strip()),
        "",
    )


def _sentences_from_last(line: str) -> Iterator[str]:
    end = len(line)
    for found in reversed(list(_SENTENCE_END.finditer(line))):
        yield line[found.end() : end]
        end = found.start()
    yield line[:end]


def _without_asides(line: str) -> str:
    """Return a line without its parentheses, unless they contain its only numbers."""
    without = _ASIDE.sub(" ", line)
    return without if without == line or has_number(without) else line


def _behind_last_lead(line: str, found: Sequence[FoundNumber], *, colons: bool) -> int:
    """Return the index of the number after the last "=" ("rounds to", a colon, "so"), else of the last
    number.
    """
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
    """Return a sentence without the clause after "because", unless that contains its only numbers."""
    reason = _REASON.search(line)
    return line[: reason.start()] if reason and has_number(line[: reason.start()]) else line


def _result(
    line: str, found: Sequence[FoundNumber], start: int, joints: tuple[re.Pattern[str], ...]
) -> Fraction | None:
    """Return number `start`, or the result of the sum that begins there.

    None if it has none, or beside `joints`.
    """
    end = _end_of_sum(line, found, start)
    if end is None or _is_joined(line, found, start, joints) or _is_joined(line, found, end + 1, joints):
        return None
    return (
        None if _is_relation(line, found, start, end) or is_no_result(line, found, end) else found[end].value
    )


def _is_relation(line: str, found: Sequence[FoundNumber], start: int, end: int) -> bool:
    """Return whether the sum start..end is only a bound or a part of the answer: "less than 18", "18 or
    more".
    """
    before = {line[max(0, found[position].start - 40) : found[position].start] for position in (start, end)}
    if any(_BELOW_OR_ABOVE.search(text) or _is_modified(_LAST_MARK.search(text)) for text in before):
        return True
    return _OR_MORE.match(line, found[end].end) is not None or _is_modified(
        _NEXT_MARK.match(line, found[end].end)
    )


def _is_modified(mark: re.Match[str] | None) -> bool:
    """Return whether a number's neighbour changes its value: a mathematical sign or command."""
    sign = mark[1] if mark else ""
    if len(sign) > 1:  # a LaTeX command unknown to `plain`, with unknown meaning
        return True
    is_arrow = "\u2190" <= sign <= "\u21ff" or "\u27f0" <= sign <= "\u27ff"
    return (
        bool(sign)
        and sign not in _HARMLESS_SIGNS
        and not is_arrow
        and (sign in "!¬‰" or unicodedata.category(sign) == "Sm")
    )


def _end_of_sum(line: str, found: Sequence[FoundNumber], start: int) -> int | None:
    """Return the index of the result of the sum at number `start` (`start` without operators), or None."""
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


def _is_joined(
    line: str, found: Sequence[FoundNumber], position: int, joints: tuple[re.Pattern[str], ...]
) -> bool:
    """Return whether number `position` is one of several alternatives, next to a different number before
    it.
    """
    if not 0 < position < len(found) or _are_same(line, found[position - 1], found[position]):
        return False
    gap = line[found[position - 1].end : found[position].start]
    is_subtracted = gap.isspace() and line[found[position].start] in "+-"
    return is_subtracted or any(joint.fullmatch(gap) for joint in joints)
