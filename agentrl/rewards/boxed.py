r"""The answer that mathematical texts put into `\boxed{...}`."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,10}\{)|\\.|(?P<brace>[{}])", re.DOTALL)  # \{ and \} are characters, not braces


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
