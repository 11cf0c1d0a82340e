"""Hermes (Qwen2.5, Qwen3, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in
one turn.
"""

from __future__ import annotations

import json
import re

from agentrl.chat.formats.json_calls import begun_name, call_of, name_of, read_json, skip_space
from agentrl.chat.formats.writing import with_thought
from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat
from agentrl.types import Message

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_TAG = re.compile(f"{OPEN}|{CLOSE}")


class Hermes(ToolFormat):
    """The JSON is parsed, not cut at the closing tag, because an argument may contain `</tool_call>`."""

    name = "hermes"
    sign = re.compile("<tool_call>")
    generality = 3
    closing = CLOSE

    def __init__(self) -> None:
        super().__init__(OPEN)

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        body = skip_space(source.text, start + len(OPEN))
        read = read_json(source, body)
        if read is None:
            return None
        if read.error is not None:
            return self.broken(source, body, begun_name(source.text, body), read.error, marks=_TAG)
        end = skip_space(source.text, read.end)
        is_closed = source.has(CLOSE, end)
        if is_closed is None:
            return None
        if not is_closed:
            error = f"there is text between the JSON and {CLOSE}"
            return self.broken(source, end, name_of(read.value), error, marks=_TAG)
        return ParsedPiece(end + len(CLOSE), (call_of(read.value),))

    def write(self, message: Message) -> str:
        lines = [message.content] if message.content else []
        for call in message.tool_calls:
            body = json.dumps(
                {"name": call.name, "arguments": dict(call.arguments or {})}, ensure_ascii=False
            )
            lines.append(f"{OPEN}\n{body}\n{CLOSE}")
        return with_thought(message.reasoning, "\n".join(lines))
