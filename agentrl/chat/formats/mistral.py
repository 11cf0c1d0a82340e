"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`.

Since 2025: `[TOOL_CALLS]name[ARGS]{...}` for each call.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from agentrl.chat.formats.json_calls import (
    begun_name,
    call_of,
    call_with,
    is_portable,
    name_of,
    read_json,
    skip_space,
    write_json,
)
from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat, beginnings
from agentrl.types import Message, ToolCall

OPEN = "[TOOL_CALLS]"
ARGS = "[ARGS]"
THOUGHT, END_THOUGHT = "[THINK]", "[/THINK]"

_OPEN = re.compile(re.escape(OPEN))
_HEAD = re.compile(r"([^{}\[\]\n]+)(?:\[CALL_ID\]([^{}\[\]\n]*))?(?:\[ARGS\])?[ \t]*+(?=\{)")
_HEAD_END = re.compile(rf"[{{}}\n]|{re.escape(OPEN)}")
_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Call ids that Mistral's templates accept. The model's
own id is kept, because the tool's answer repeats it.
"""


class Mistral(ToolFormat):
    """A call ends with its JSON; there is no closing mark.

    Thoughts are in `<think>` or, for Magistral, in `[THINK]`.
    """

    name = "mistral"
    sign = re.compile(r"\[TOOL_CALLS\]")

    def __init__(self) -> None:
        super().__init__(OPEN, THOUGHT)
        ends = ("</think>", END_THOUGHT)
        self.thought_end = re.compile("|".join(map(re.escape, ends)))
        self.partial_thought_end = beginnings(ends)

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        if source.text.startswith(THOUGHT, start):
            return ParsedPiece(start + len(THOUGHT), begins="reasoning")
        body = skip_space(source.text, start + len(OPEN))
        if body == len(source.text) and source.unfinished is None:
            return None
        if source.text.startswith("[", body) and not source.text.startswith(OPEN, body):
            return self._read_list(source, body) if source.has(OPEN, body) is not None else None
        if source.text.startswith("{", body):
            return self._read_object(source, body)
        return self._read_named(source, body)

    def _read_list(self, source: SampledText, start: int) -> ParsedPiece | None:
        """Read the elements one by one, so that complete calls count even if a later one is broken or cut."""
        text = source.text
        calls: list[ToolCall] = []
        position = skip_space(text, start + 1)
        if text.startswith("]", position):
            return ParsedPiece(position + 1)
        while True:
            read = read_json(source, position)
            if read is None:
                return None
            if read.error is not None:
                return self._broken(source, position, calls, begun_name(text, position), read.error)
            calls.append(_call(read.value))
            position = skip_space(text, read.end)
            if text.startswith("]", position):
                return ParsedPiece(position + 1, tuple(calls))
            if text.startswith(",", position):
                position = skip_space(text, position + 1)
            elif position < len(text):
                return self._broken(
                    source, position, calls, "", "the calls must be a JSON list: expected , or ]"
                )
            else:
                return None if source.unfinished is None else ParsedPiece(position, tuple(calls))

    def _read_object(self, source: SampledText, start: int) -> ParsedPiece | None:
        read = read_json(source, start)
        if read is None:
            return None
        if read.error is not None:
            return self._broken(source, start, [], begun_name(source.text, start), read.error)
        return ParsedPiece(read.end, (_call(read.value),))

    def _read_named(self, source: SampledText, start: int) -> ParsedPiece | None:
        end = source.search(_HEAD_END, start)
        if end is None and source.unfinished is None:
            return None
        head = _HEAD.match(source.text, start)
        if head is None or not is_portable(name := head[1].strip()):
            return self._broken(
                source,
                start,
                [],
                "",
                f"{OPEN} must be followed by a JSON list of calls, or by name{ARGS}{{...}}",
            )
        read = read_json(source, head.end())
        if read is None:
            return None
        if read.error is not None:
            return self._broken(source, head.end(), [], name, read.error)
        return ParsedPiece(read.end, (_with_id(call_with(name, read.value), (head[2] or "").strip()),))

    def _broken(
        self, source: SampledText, start: int, calls: list[ToolCall], name: str, error: str
    ) -> ParsedPiece | None:
        """Add a call that cannot be read. It ends at the next mark, else with the turn."""
        mark = source.search(_OPEN, start)
        if mark is not None:
            return ParsedPiece(mark.start(), (*calls, ToolCall("", name, None, error)))
        if source.unfinished is None:
            return None
        is_cut = source.unfinished == self.unfinished(is_truncated=True)
        return ParsedPiece(
            len(source.text), (*calls, ToolCall("", name, None, source.unfinished if is_cut else error))
        )

    def write(self, message: Message) -> str:
        thought = f"{THOUGHT}{message.reasoning}{END_THOUGHT}" if message.reasoning else ""
        if not message.tool_calls:
            return thought + message.content
        calls = [
            f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": '
            f'{write_json(call.arguments)}, "id": "{call.id}"}}'
            for call in message.tool_calls
        ]
        return f"{thought}{message.content}{OPEN} [{', '.join(calls)}]"


def _call(value: Any) -> ToolCall:
    call = call_of(value)
    return _with_id(call, value.get("id") if name_of(value) else None)


def _with_id(call: ToolCall, id: Any) -> ToolCall:
    return dataclasses.replace(call, id=id) if isinstance(id, str) and _ID.fullmatch(id) else call
