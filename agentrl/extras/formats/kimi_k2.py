"""Kimi K2: `functions.name:number`, the id of the call, and its arguments as JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|><|tool_calls_section_end|>

Source: Moonshot AI, tool_call_guidance.md of Kimi-K2-Instruct.
"""

from __future__ import annotations

import re

from agentrl.chat.formats.json_calls import call_with, is_portable, read_json, skip_space, write_json
from agentrl.chat.parsing import END_THINK, THINK, ParsedPiece, SampledText, ToolFormat
from agentrl.types import Message, ToolCall

BEGIN_ALL, END_ALL = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
FUNCTIONS = "functions."

_MARK = re.compile("|".join(map(re.escape, (BEGIN, END, END_ALL))))
_HEAD_END = re.compile(rf"{re.escape(ARGUMENTS)}|{_MARK.pattern}")
_HEAD = re.compile(rf"\s*+(?P<id>(?:functions\.)?(?P<name>[^\s<>:|]++):\d++)\s*+{re.escape(ARGUMENTS)}")
_ID = re.compile(r"functions\.[^\s<>:|]+:\d+")


class KimiK2(ToolFormat):
    """A call keeps the id that the model wrote: the template shows it, with the name inside, in place of the
    name. The marks around all calls of a turn have no meaning and are skipped.
    """

    name = "kimi_k2"
    sign = re.compile(r"<\|tool_call_argument_begin\|>")
    closing = END

    def __init__(self) -> None:
        super().__init__(BEGIN, BEGIN_ALL, END_ALL)

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        for mark in (BEGIN_ALL, END_ALL):
            if source.text.startswith(mark, start):
                return ParsedPiece(start + len(mark))
        body = start + len(BEGIN)
        if source.search(_HEAD_END, body) is None and source.unfinished is None:
            return None
        head = _HEAD.match(source.text, body)
        if head is None or not is_portable(head["name"]):
            error = f"a call must be written as {FUNCTIONS}name:number{ARGUMENTS}{{...}}"
            return self.broken(source, body, "", error, marks=_MARK)
        body = skip_space(source.text, head.end())
        if source.has(END, body):
            return self._closed(source, head, None, body)
        read = read_json(source, body)
        if read is None:
            return None
        if read.error is not None:
            return self.broken(source, head.end(), head["name"], read.error, marks=_MARK)
        return self._closed(source, head, read.value, skip_space(source.text, read.end))

    def _closed(
        self, source: SampledText, head: re.Match[str], arguments: object, end: int
    ) -> ParsedPiece | None:
        is_closed = source.has(END, end)
        if is_closed is None:
            return None
        if not is_closed:
            error = f"there is text between the JSON and {END}"
            return self.broken(source, end, head["name"], error, marks=_MARK)
        call = call_with(head["name"], arguments)
        return ParsedPiece(end + len(END), (ToolCall(head["id"], call.name, call.arguments, call.error),))

    def write(self, message: Message) -> str:
        calls = "".join(
            f"{BEGIN}{_id(call, number)}{ARGUMENTS}{write_json(call.arguments)}{END}"
            for number, call in enumerate(message.tool_calls)
        )
        thought = f"{THINK}{message.reasoning}{END_THINK}" if message.reasoning else ""
        return thought + message.content + (f"{BEGIN_ALL}{calls}{END_ALL}" if calls else "")


def _id(call: ToolCall, number: int) -> str:
    """Return the id of a call as the model writes it; another format's id is replaced."""
    return call.id if _ID.fullmatch(call.id) else f"{FUNCTIONS}{call.name}:{number}"
