"""When two messages are the same, although one of them travelled through another program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.types import Message, ToolCall


def is_same_message(mine: Message, theirs: Message) -> bool:
    """Compare role, content up to outer white space, calls by JSON value and the ids they are answered by.

    Thoughts count only where both have them: most programs do not send them back.
    """
    return (
        mine.role == theirs.role
        and mine.content.strip() == theirs.content.strip()
        and mine.tool_call_id == theirs.tool_call_id
        and len(mine.tool_calls) == len(theirs.tool_calls)
        and all(map(_is_same_call, mine.tool_calls, theirs.tool_calls))
        and (not mine.reasoning.strip() or not theirs.reasoning.strip() or mine.reasoning.strip() == theirs.reasoning.strip())
    )


def is_same_json(left: Any, right: Any) -> bool:
    """Compare two values as JSON does: 1 equals 1.0, but not true; the order of an object's keys does not count."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(is_same_json(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(is_same_json, left, right))
    return bool(left == right)


def _is_same_call(mine: ToolCall, theirs: ToolCall) -> bool:
    return mine.id == theirs.id and mine.name == theirs.name and is_same_json(mine.arguments, theirs.arguments)
