"""Hermes (Qwen2.5, Qwen3, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in
one turn.
"""

from __future__ import annotations

import json
import re

from agentrl.chat.formats.json_calls import begun_name, call_of, name_of, read_json, skip_space
from agentrl.chat.formats.writing import with_thought
from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat
from agentrl.types import Message, ToolCall

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_TAG = re.compile(f"{OPEN}|{CLOSE}")


class Hermes(ToolFormat):
    """The JSON is parsed, not cut at the closing tag, because an argument may contain `</tool_call>`."""

    name = "hermes"
    closing = CLOSE

    def __init__(self) -> None:
        super().__init__(OPEN)

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        body = skip_space(source.text, start + len(OPEN))
        read = read_json(source, body)
        if read is None:
            return None
        if read.error is not None:
            return self._broken(source, body, begun_name(source.text, body), read.error)
        end = skip_space(source.text, read.end)
        is_closed = source.has(CLOSE, end)
        if is_closed is None:
            return None
        if not is_closed:
            return self._broken(
                source, end, name_of(read.value), f"there is text between the JSON and {CLOSE}"
            )
        return ParsedPiece(end + len(CLOSE), (call_of(read.value),))

    def _broken(self, source: SampledText, start: int, name: str, error: str) -> ParsedPiece | None:
        """Return a call that cannot be read.

        It ends at its closing tag, else at the next call, else with the turn.
        """
        tag = source.search(_TAG, start)
        if tag is not None and tag[0] == CLOSE:
            return ParsedPiece(tag.end(), (ToolCall("", name, None, error),))
        if tag is not None:
            return ParsedPiece(tag.start(), (ToolCall("", name, None, self.unfinished(is_truncated=False)),))
        return (
            None
            if source.unfinished is None
            else ParsedPiece(len(source.text), (ToolCall("", name, None, source.unfinished),))
        )

    def write(self, message: Message) -> str:
        lines = [message.content] if message.content else []
        for call in message.tool_calls:
            body = json.dumps(
                {"name": call.name, "arguments": dict(call.arguments or {})}, ensure_ascii=False
            )
            lines.append(f"{OPEN}\n{body}\n{CLOSE}")
        return with_thought(message.reasoning, "\n".join(lines))
