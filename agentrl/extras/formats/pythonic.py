"""Pythonic (Llama 4, Llama 3.2 lite, LFM2): `[f(a=1), g(b="x")]`, between `<|tool_call_start|>` and
`<|tool_call_end|>` or bare.
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.chat.formats.json_calls import TOO_DEEP, call_with, name_of, read_json, skip_space
from agentrl.chat.formats.writing import with_thought
from agentrl.chat.parsing import THINK, ParsedPiece, SampledText, ToolFormat, beginnings
from agentrl.extras.formats.python_literals import MoreText, NotPython, read_calls
from agentrl.types import Message, ToolCall

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
TAG = "<|python_tag|>"
FORM = "a call must be written as [name(key=value)], not as JSON"

# Without marks, a list of calls must begin a line or directly follow a mark, and must look like calls, not
# like a link or mathematics.
_LIST = r"""(?<=[\n>])[ \t]*+\[\s*+[^\W\d][\w.]*+\(\s*+(?:\)|["']|[^\W\d]\w*+\s*+=(?!=))"""
_PARTIAL_LIST = r"""(?<=[\n>])[ \t]*+(?:\[\s*+(?:[^\W\d][\w.]*+(?:\(\s*+(?:[^\W\d]\w*+\s*+=?)?)?)?)?"""
# Some models write the JSON of another format in place of the list.
_JSON = r'''(?<=[\n>])[ \t]*+\{\s*+"(?:name|type)"\s*+:\s*+"'''
_PARTIAL_JSON = r"""(?<=[\n>])[ \t]*+\{\s*+(?:"[a-z]*+(?:"\s*+(?::\s*+)?)?)?"""
_NEXT = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")


class Pythonic(ToolFormat):
    """Arguments are named Python literals; nothing is evaluated."""

    name = "pythonic"
    sign = re.compile(r"<\|tool_call_start\|>|<\|tool_list_start\|>|\[func_name1\(params_name1=")
    closing = CLOSE

    def __init__(self) -> None:
        super().__init__(OPEN)
        self.marks = (THINK, OPEN, TAG, "[", "{")
        self.opening = re.compile(rf"{THINK}|{re.escape(OPEN)}|{re.escape(TAG)}|{_LIST}|{_JSON}")
        self.partial = beginnings((THINK, OPEN, TAG), f"{_PARTIAL_LIST}|{_PARTIAL_JSON}")

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        if source.text.startswith(TAG, start):
            return ParsedPiece(start + len(TAG))
        if source.text.startswith("{", skip_space(source.text, start)):
            return self._json(source, start)
        is_marked = source.text.startswith(OPEN, start)
        try:
            calls, end = read_calls(
                source.text, start + len(OPEN) if is_marked else start, is_final=source.unfinished is not None
            )
        except MoreText:
            return None
        except NotPython as error:
            return self._broken(source, start, error)
        if is_marked:
            return self._closed(source, calls, end)
        return ParsedPiece(end, tuple(_call(*call) for call in calls))

    @staticmethod
    def _json(source: SampledText, start: int) -> ParsedPiece | None:
        """Read an object: a call that cannot be run if it names a tool that is shown, else text."""
        read = read_json(source, skip_space(source.text, start))
        if read is None:
            return None
        shown = {str(tool.get("function", {}).get("name")) for tool in source.tools}
        name = name_of(read.value)
        if read.error is None and name in shown and ("parameters" in read.value or "arguments" in read.value):
            return ParsedPiece(read.end, (ToolCall("", name, None, FORM),))
        if read.error == TOO_DEEP:  # the objects inside are too deep as well: reading each takes too long
            return (
                None if source.unfinished is None else ParsedPiece(len(source.text), text=source.text[start:])
            )
        end = read.end if read.error is None else skip_space(source.text, start) + 1
        return ParsedPiece(end, text=source.text[start:end])

    def _closed(
        self, source: SampledText, calls: list[tuple[str, dict[str, Any] | str]], end: int
    ) -> ParsedPiece | None:
        position = skip_space(source.text, end)
        is_closed = source.has(CLOSE, position)
        if is_closed is None:
            return None
        return ParsedPiece(position + len(CLOSE) if is_closed else end, tuple(_call(*call) for call in calls))

    def _broken(self, source: SampledText, start: int, error: NotPython) -> ParsedPiece | None:
        """Return a call that cannot be read.

        It ends at its closing mark, else at the next call, else with the turn.
        """
        mark = source.search(_NEXT, start + 1)
        if mark is None and source.unfinished is None:
            return None
        is_cut = mark is None and source.unfinished == self.unfinished(is_truncated=True)
        reason = (
            source.unfinished
            if is_cut
            else f"the calls are not a Python list of calls: {error} at character {error.position - start}"
        )
        stop = len(source.text) if mark is None else mark.end() if mark[0] == CLOSE else mark.start()
        return ParsedPiece(stop, (ToolCall("", error.name, None, reason),))

    def write(self, message: Message) -> str:
        calls = ", ".join(
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in (call.arguments or {}).items())})"
            for call in message.tool_calls
        )
        return with_thought(
            message.reasoning, "\n".join(filter(None, [message.content, f"[{calls}]" if calls else ""]))
        )


def _call(name: str, arguments: dict[str, Any] | str) -> ToolCall:
    return call_with(name, arguments) if isinstance(arguments, dict) else ToolCall("", name, None, arguments)
