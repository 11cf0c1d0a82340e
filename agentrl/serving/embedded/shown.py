"""Values of others in messages: short, however long or deep they are."""

from __future__ import annotations

import reprlib
from typing import Any

_LONGEST = 400
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxdict = 2, 4, 4
_SHOWN.maxstring, _SHOWN.maxlong, _SHOWN.maxother = 200, 40, 200


def shown(value: Any) -> str:
    """Return `repr(value)`, cut in its middle and at a depth of 2. repr itself fails for what is nested 1,000 deep."""
    return _SHOWN.repr(value)


def cut(text: str) -> str:
    """Return a text for a message, without what is in its middle if it is long."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
