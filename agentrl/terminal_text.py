"""What models, tools and files say, as a terminal may show it: characters that would command the terminal are written out."""

from __future__ import annotations

import re

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline that moves a cursor, changes colours or titles, or turns the direction of text."""


def visible(text: str) -> str:
    r"""Return the text with control characters as Python writes them: `\x1b` in place of what begins a colour."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
