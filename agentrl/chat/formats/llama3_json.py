"""Llama 3.1 and 3.2: `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it.

Several calls are separated by `;` or line breaks.
"""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.chat.formats.json_calls import TOO_DEEP, begun_name, call_of, name_of, read_json, skip_space
from agentrl.chat.formats.writing import with_thought
from agentrl.chat.parsing import THINK, ParsedPiece, SampledText, ToolFormat, beginnings
from agentrl.types import Message, ToolCall

TAG = "<|python_tag|>"
KEYS = ("parameters", "arguments")
FORM = 'a call must be written as {"name": ..., "parameters": {...}}, without "function"'

# No mark distinguishes such a call from other JSON; an object is a candidate only if it begins like a call.
_OBJECT = (
    r'\{\s*+"(?:name"\s*+:\s*+"|type"\s*+:\s*+"function"|function"\s*+:\s*+["{]'
    r'|(?:parameters|arguments)"\s*+:\s*+\{)'
)
_PARTIAL_OBJECT = r'\{\s*+(?:"[a-z]*+(?:"\s*+(?::\s*+(?:"[a-z]*+)?)?)?)?'
_SEPARATOR = r"(?:;\s*+)?"
_NEXT = re.compile(rf"{re.escape(TAG)}|[;\n]\s*+(?={_OBJECT})")


class Llama3Json(ToolFormat):
    """An object with a name and parameters is a call; other JSON is text."""

    name = "llama3_json"
    sign = re.compile(r"<\|start_header_id\|>(?:.|\n)*\"parameters\": |<\|python_tag\|>")
    generality = 1

    def __init__(self) -> None:
        super().__init__(TAG)
        self.marks = (THINK, TAG, '"name"', '"function"')
        self.opening = re.compile(rf"{THINK}|{re.escape(TAG)}|{_SEPARATOR}{_OBJECT}")
        self.partial = beginnings((THINK, TAG), rf";\s*+(?:{_PARTIAL_OBJECT})?|{_PARTIAL_OBJECT}")

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        is_tagged = source.text.startswith(TAG, start)
        body = skip_space(source.text, start + len(TAG)) if is_tagged else source.text.index("{", start)
        read = read_json(source, body)
        if read is None:
            return None
        if read.error is not None:
            return self._broken(source, body, read.error)
        if name := _misplaced_name(read.value):
            return ParsedPiece(read.end, (ToolCall("", name, None, FORM),))
        if not is_tagged and not (name_of(read.value) and any(key in read.value for key in KEYS)):
            return ParsedPiece(read.end, text=source.text[start : read.end])
        return ParsedPiece(read.end, (call_of(read.value, keys=KEYS),))

    def _broken(self, source: SampledText, body: int, error: str) -> ParsedPiece | None:
        """Return a call that cannot be read. It ends where the next call begins, else with the turn."""
        name = begun_name(source.text, body)
        following = None if error == TOO_DEEP else source.search(_NEXT, body + 1)
        if following is not None:
            return ParsedPiece(following.start(), (ToolCall("", name, None, error),))
        if source.unfinished is None:
            return None
        is_cut = source.unfinished == self.unfinished(is_truncated=True)
        return ParsedPiece(
            len(source.text), (ToolCall("", name, None, source.unfinished if is_cut else error),)
        )

    def write(self, message: Message) -> str:
        calls = "; ".join(
            json.dumps({"name": call.name, "parameters": dict(call.arguments or {})}, ensure_ascii=False)
            for call in message.tool_calls
        )
        return with_thought(message.reasoning, "\n".join(filter(None, [message.content, calls])))


def _misplaced_name(value: Any) -> str:
    """Return the name of a call whose name or parameters are under "function", as in OpenAI's messages; "" if
    the value is none.
    """
    inner = value.get("function") if isinstance(value, dict) else None
    named = {**value, "name": inner} if isinstance(inner, str) else inner
    return name_of(named) if isinstance(named, dict) and any(key in named for key in KEYS) else ""
