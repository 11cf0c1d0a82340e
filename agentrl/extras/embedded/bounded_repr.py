"""Bounded representations of foreign values, for error messages."""

from __future__ import annotations

import reprlib
from typing import Any

_LONGEST = 400
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxdict = 2, 4, 4
_SHOWN.maxstring, _SHOWN.maxlong, _SHOWN.maxother = 200, 40, 200


def shown(value: Any) -> str:
    """Return a shortened `repr(value)`, cut at depth 2. The true `repr` fails on deep nesting."""
    return _SHOWN.repr(value)


def cut(text: str) -> str:
    """Return `text` without its middle if it is longer than 400 characters."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
