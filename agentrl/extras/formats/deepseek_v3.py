"""DeepSeek: V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fenced JSON block.

V3.1 writes `name<｜tool▁sep｜>{...}`.
"""

from __future__ import annotations

import re

from agentrl.chat.formats.json_calls import call_with, is_portable, read_json, skip_space, write_json
from agentrl.chat.formats.writing import with_thought
from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat
from agentrl.types import Message

BEGIN_ALL, END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"

_MARK = re.compile("|".join([BEGIN, END, END_ALL]))
_HEAD_END = re.compile(r"\{|" + _MARK.pattern)
_HEAD = re.compile(rf"([^<{{]*){SEPARATOR}(?:([^\n{{`<]+)\n\s*(?:```(?:json)?)?)?\s*(?=\{{)")


class DeepSeekV3(ToolFormat):
    """The marks around all calls of a turn have no meaning and are skipped."""

    name = "deepseek_v3"
    sign = re.compile("<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>")
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
        name = "" if head is None else (head[2] or head[1]).strip()
        if head is None or not name or not is_portable(name):
            return self.broken(
                source, body, "", f"a call must be written as name{SEPARATOR}{{...}}", marks=_MARK
            )
        read = read_json(source, head.end())
        if read is None:
            return None
        if read.error is not None:
            return self.broken(source, head.end(), name, read.error, marks=_MARK)
        return self._closed(source, name, read.value, read.end)

    def _closed(self, source: SampledText, name: str, arguments: object, position: int) -> ParsedPiece | None:
        end = skip_space(source.text, position)
        is_fenced = source.has(FENCE, end)
        if is_fenced:
            end = skip_space(source.text, end + len(FENCE))
        is_closed = source.has(END, end)
        if is_fenced is None or is_closed is None:
            return None
        if not is_closed:
            return self.broken(source, end, name, f"there is text between the JSON and {END}", marks=_MARK)
        return ParsedPiece(end + len(END), (call_with(name, arguments),))

    def write(self, message: Message) -> str:
        calls = "\n".join(
            f"{BEGIN}function{SEPARATOR}{call.name}\n{FENCE}json\n{write_json(call.arguments)}\n{FENCE}{END}"
            for call in message.tool_calls
        )
        return with_thought(
            message.reasoning, message.content + (f"{BEGIN_ALL}{calls}{END_ALL}" if calls else "")
        )
