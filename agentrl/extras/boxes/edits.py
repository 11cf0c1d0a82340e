"""Exact replacements in a text, with errors that say how to correct the call."""

from __future__ import annotations

import difflib

from agentrl.plugins import WrongCall

MAX_SHOWN_LINES = 5


def replaced(text: str, old: str, new: str, *, path: str) -> str:
    """Return `text` with its only occurrence of `old` replaced by `new`.

    Raises:
        WrongCall: `old` is empty or equal to `new`, or `text` does not contain it exactly once.
    """
    if not old:
        raise WrongCall(f"{path} exists: `old` must be a part of it that is replaced, or all of it")
    if old == new:
        raise WrongCall("`old` and `new` are equal: nothing would change")
    match text.count(old):
        case 1:
            return text.replace(old, new)
        case 0:
            raise WrongCall(f"{path} does not contain `old`{_hint(text, old)}")
        case number:
            lines = ", ".join(map(str, _lines(text, old)[:MAX_SHOWN_LINES]))
            lines += ", ..." if number > MAX_SHOWN_LINES else ""
            raise WrongCall(
                f"{path} contains `old` {number} times (lines {lines}): include lines around it, "
                "so that it is there once"
            )


def _lines(text: str, old: str) -> list[int]:
    """Return the line numbers at which `old` begins."""
    found, place = [], text.find(old)
    while place >= 0:
        found.append(text.count("\n", 0, place) + 1)
        place = text.find(old, place + len(old))
    return found


def _hint(text: str, old: str) -> str:
    """Say what comes close: the same lines with other white space, or the line most like the first one."""
    lines, wanted = text.splitlines(), [line.strip() for line in old.strip("\n").splitlines()]
    stripped = [line.strip() for line in lines]
    for first in range(len(lines) - len(wanted) + 1):
        if wanted and stripped[first : first + len(wanted)] == wanted:
            return f"; lines {first + 1} to {first + len(wanted)} differ from it in white space only"
    first_line = next((line for line in wanted if line), "")
    for near in difflib.get_close_matches(first_line, stripped[:5000], n=1, cutoff=0.7):
        number = stripped.index(near)
        return f"; the line most like it is line {number + 1}: {lines[number][:200]!r}"
    return ""
