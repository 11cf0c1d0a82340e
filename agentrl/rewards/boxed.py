r"""The answer that mathematical texts put into `\boxed{...}`."""

from __future__ import annotations

import re

from agentrl.plugins.options import Options

_TOKENS = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,10}\{)|\\.|(?P<brace>[{}])", re.DOTALL)  # \{ and \} are characters, not braces


class BoxOptions(Options):
    r"""`strict`: only \boxed{...} counts. `format_score`: for a wrong answer in a box. `wrong_score`: for anything else."""

    strict: bool = False
    format_score: float | None = None  # None: as wrong_score
    wrong_score: float = 0.0

    def score_wrong(self, *, has_box: bool) -> float:
        """Return the score of a wrong answer."""
        return self.format_score if has_box and self.format_score is not None else self.wrong_score


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` (or `\fbox{...}`) that is closed, braces inside of it balanced; None without.

    Takes time linear in the text.
    """
    opened: list[int | None] = []  # where the inside of an open box begins, None for any other open brace
    last: tuple[int, int] | None = None
    for token in _TOKENS.finditer(text):
        if token["box"]:
            opened.append(token.end())
        elif token["brace"] == "{":
            opened.append(None)
        elif token["brace"] and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return text[slice(*last)] if last else None
