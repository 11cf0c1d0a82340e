r"""The answer in `\boxed{...}` of a mathematical text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentrl.plugins.options import Options

# \{ and \} are characters, not braces.
_TOKENS = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,10}\{)|\\.|(?P<brace>[{}])", re.DOTALL)
_JOINT = re.compile(
    r"(?i)[\s$.]{0,6}(?:,|;|/|&|\\\\|\\text\{|\\quad|%|\b(?:and/or|or|and|und|oder|alternatively|otherwise|maybe|perhaps|possibly)\b|[\s$}]|\\[,;:]){0,8}[\s$}]{0,6}"
)


_HIDDEN = re.compile(
    r"<!--(?:(?!<!--).){0,2000}?-->|\\[hv]?phantom\s?\{(?:[^{}]|\{[^{}]{0,100}\}){0,100}\}", re.DOTALL
)
"""Text that is not rendered."""
_DENIED = re.compile(
    r"(?i)(?:\b(?:not|isn't|wasn't|never|neither|nor|cannot|can't|couldn't|shouldn't|don't|wrong|incorrect|mistaken|false|unlike)"
    r"(?:\s(?:answer|result|value|be|equal(?:s| "
    r"to)?|just|simply|the|is|was|write|say|box|put|claim))*|\b(?:rather than|instead of|anything but|other "
    r"than))\s?[:=]?[\s$\\(\[{}*]*\Z"
)
MAX_MARKED_CHARS = 20_000
"""Characters at the end of a response that are searched for a box or `####`."""
MAX_DENIAL_CHARS = 60

MAX_JOINED = 8
"""Adjacent boxes that may form one answer."""


class BoxOptions(Options):
    r"""`strict`: only \boxed{...} counts. `format_score`: for a wrong one in a box.

    `wrong_score`: otherwise.
    """

    strict: bool = False
    format_score: float | None = None  # None: as wrong_score
    wrong_score: float = 0.0

    def score_wrong(self, *, has_box: bool) -> float:
        """Return the score of a wrong or missing answer."""
        return self.format_score if has_box and self.format_score is not None else self.wrong_score


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` or `\fbox{...}`, with balanced braces; None
    without a box.

    The time is linear in the length of the text.
    """
    last = max(
        (closed for closed in _boxes(text) if closed[2] is not None),
        key=lambda closed: closed[1],
        default=None,
    )
    return None if last is None else text[last[1] : last[2]]


def answer_box(text: str) -> str | None:
    r"""Return the content of a response's last box; None without a box.

    Adjacent boxes (`\boxed{1} or \boxed{2}`) form one answer: "1, 2". "" if the last box is not closed (an
    unfinished answer), or if the text denies it ("it is not \boxed{5}").
    """
    text = _HIDDEN.sub("", text)
    outermost: list[tuple[int, int, int | None]] = []
    for begin, start, end in sorted(_boxes(text)):
        if not outermost or (last := outermost[-1][2]) is None or begin > last:
            outermost.append((begin, start, end))
    if not outermost:
        return None
    while len(outermost) > 1 and _is_denied(text, outermost[-1][0]):
        outermost.pop()
    if _is_denied(text, outermost[-1][0]):
        return ""
    insides: list[str] = []
    following: int | None = None
    for begin, start, end in outermost[: -MAX_JOINED - 1 : -1]:
        if end is None or (following is not None and not _JOINT.fullmatch(text, end + 1, following)):
            break
        insides.insert(0, _unboxed(text[start:end]))
        following = begin
    return ", ".join(dict.fromkeys(inside.strip() for inside in insides))


def _is_denied(text: str, begin: int) -> bool:
    return _DENIED.search(text[max(0, begin - MAX_DENIAL_CHARS) : begin]) is not None


def _boxes(text: str) -> Iterator[tuple[int, int, int | None]]:
    """Yield (begin of the box, begin and end of its content) of each box; the end is None if unclosed."""
    opened: list[tuple[int, int] | None] = []  # None: a brace that opens no box
    for token in _TOKENS.finditer(text):
        if token["box"]:
            opened.append((token.start(), token.end()))
        elif token["brace"] == "{":
            opened.append(None)
        elif token["brace"] and opened and (box := opened.pop()) is not None:
            yield *box, token.start()
    yield from ((*box, None) for box in opened if box is not None)


def _unboxed(inside: str) -> str:
    r"""Return the content without nested boxes: \boxed{\boxed{5}} has the content 5."""
    for _ in range(3):
        for begin, start, end in _boxes(inside):
            if end is not None and not (inside[:begin] + inside[end + 1 :]).strip():
                inside = inside[start:end]  # the outermost box, which is yielded last
    return inside
