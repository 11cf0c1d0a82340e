"""A conversation as lines of text, for people."""

from __future__ import annotations

import json
from collections.abc import Iterator

from agentrl.types import Message


def message_lines(message: Message) -> Iterator[str]:
    """Yield the thinking, the content and the tool calls of a message, each labelled with its role."""
    if message.reasoning:
        yield f"[{message.role}, thinking] {message.reasoning}"
    if message.content or not (message.reasoning or message.tool_calls):
        yield f"[{message.role}] {message.content}"
    for call in message.tool_calls:
        yield (
            f"[call] {call.name} "
            f"{json.dumps(call.arguments, ensure_ascii=False) if call.error is None else call.error}"
        )


def shortened(text: str, max_chars: int) -> str:
    """Return at most `max_chars` characters: both ends of a longer text, and between them how much is
    missing.
    """
    if len(text) <= max_chars:
        return text
    notice = f"\n[... {len(text)} characters, shortened ...]\n"
    room = max_chars - len(notice)
    if room < 2:
        return text[:max_chars]
    return text[: room - room // 2] + notice + text[len(text) - room // 2 :]
