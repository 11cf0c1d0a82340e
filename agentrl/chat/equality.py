"""Equality of messages, for comparing a message with a copy that passed through another program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentrl.types import Message, ToolCall


def is_same_message(mine: Message, theirs: Message) -> bool:
    """Return whether two messages are equal, up to what other programs change.

    Compared are the role, the content up to outer white space, the calls (ids, names, and arguments as JSON
    values) and the id of the answered call. Thoughts count only if both messages have them: most programs do
    not send them back.
    """
    return (
        mine.role == theirs.role
        and mine.content.strip() == theirs.content.strip()
        and mine.images == theirs.images
        and mine.tool_call_id == theirs.tool_call_id
        and len(mine.tool_calls) == len(theirs.tool_calls)
        and all(map(_is_same_call, mine.tool_calls, theirs.tool_calls))
        and (
            not mine.reasoning.strip()
            or not theirs.reasoning.strip()
            or mine.reasoning.strip() == theirs.reasoning.strip()
        )
    )


def is_same_json(left: Any, right: Any) -> bool:
    """Compare two values as JSON: 1 equals 1.0, but not true.

    The order of an object's keys does not count, nor do digits that a 64-bit float does not have: many
    programs read all numbers as such.
    """
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(
            is_same_json(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(is_same_json, left, right))
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right or _as_float(left) == _as_float(right)
    return bool(left == right)


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _is_same_call(mine: ToolCall, theirs: ToolCall) -> bool:
    return (
        mine.id == theirs.id and mine.name == theirs.name and is_same_json(mine.arguments, theirs.arguments)
    )
