"""Lines of a terminal, made of pieces of text in different styles; nothing here knows what is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells

from agentrl.terminal_text import visible

MIN_WIDTH = 2
"""Cells of the widest character."""
_UNSEEN = re.compile(
    "[\u00ad\u180e\u200b-\u200d\u2028\u2029\u2060-\u2065\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters without a width, which hide parts of a text, and halves of characters."""
_WORDS = re.compile(r"\n|[^\s]+[^\S\n]*|[^\S\n]+")
_WHOLE = re.compile(r"\n|[^\n]+")


@dataclass(frozen=True, slots=True)
class StyledText:
    """A harmless text in one style of rich's. A newline ends the line.

    token: place of the token that it shows, which is broken only if it is longer than a line; None: prose,
    which is broken between words.
    """

    text: str
    style: str = ""
    token: int | None = None


Line = tuple[StyledText, ...]


def harmless(text: str) -> str:
    """Return a text of a model, a tool or a file for the screen: what is not seen is shown by its number."""
    shown = _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], visible(text))
    return shown.replace("\t", "    ")


def one_line(text: str) -> str:
    """Return a harmless text without line breaks."""
    return harmless(text.replace("\n", " "))


def wrap(pieces: Iterable[StyledText], width: int) -> list[Line]:
    """Return lines of at most `width` cells; all pieces in order, without the newlines."""
    width = max(width, MIN_WIDTH)
    lines: list[Line] = []
    line: list[StyledText] = []
    used = 0
    for piece in pieces:
        for part in (_WORDS if piece.token is None else _WHOLE).findall(piece.text):
            cells = cell_len(part)
            if part == "\n" or (used and used + cells > width):
                lines.append(tuple(line))
                line, used = [], 0
                if part == "\n":
                    continue
            *full, part = chop_cells(part, width) if cells > width else [part]
            lines += [(StyledText(text, piece.style, piece.token),) for text in full]
            line.append(StyledText(part, piece.style, piece.token))
            used += cell_len(part)
    return [*lines, tuple(line)] if line else lines
