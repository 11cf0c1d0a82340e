"""Makes untrusted text (of models, tools and files) safe for a terminal by escaping control characters."""

from __future__ import annotations

import re

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor, change colours or titles, or reverse text; tab and newline are allowed."""


def visible(text: str) -> str:
    r"""Return the text with control characters escaped as in Python: `\x1b` for the escape character."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
