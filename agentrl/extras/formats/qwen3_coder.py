"""Qwen3-Coder, Qwen3.5, Nemotron 3: XML inside of `<tool_call>`, and values without quotes.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from agentrl.chat.formats.json_calls import call_with, is_portable, skip_space
from agentrl.chat.formats.writing import with_thought
from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat
from agentrl.extras.formats.argument_types import swallowed, typed
from agentrl.types import Message, ToolCall

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_NAME = re.compile(r"([^<>\n]*)>")
_NAME_END = re.compile(r"[<>\n]")
_TAG = re.compile(f"{OPEN}|{CLOSE}|{FUNCTION}")

# A value may itself contain "</parameter>", in code that writes such calls. Only a closing tag that is
# followed by the next tag ends the value. The other alternatives match a value whose closing tag is missing.
_VALUE_END = re.compile(
    rf"(?P<end></parameter>\s*+(?={PARAMETER}|{END_FUNCTION}))|(?={END_FUNCTION}\s*+{CLOSE})|(?P<lost>{CLOSE}\s*+{OPEN})"
)


# Also as other formats of calls write it: <parameter name="key">.
_PARAMETER_TAG = re.compile(rf"""<parameter(?:\s++name)?\s*+=\s*+["']?([^<>"'\n]*+)["']?>|{END_PARAMETER}""")


class _Open(Exception):
    """The result depends on text to come."""


class _Broken(Exception):
    """The call cannot be read."""

    def __init__(self, position: int, reason: str | None) -> None:
        """`reason` None: the text ended before the call did."""
        self.position = position
        self.reason = reason


class Qwen3Coder(ToolFormat):
    """`<tool_call>` is optional: these models sometimes omit it."""

    name = "qwen3_coder"
    sign = re.compile(r"<function=(?:.|\n)*<parameter=")
    closing = END_FUNCTION

    def __init__(self) -> None:
        super().__init__(OPEN, FUNCTION)

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        function = ""
        try:
            position = start
            if source.text.startswith(OPEN, start):
                position = skip_space(source.text, start + len(OPEN))
                _expect(source, FUNCTION, position, f"{OPEN} must be followed by {FUNCTION}name>")
            function, position = _name(source, position + len(FUNCTION), FUNCTION)
            spans, position = _parameters(source, position)
            end = skip_space(source.text, position)
            closes = source.has(CLOSE, end)
        except _Open:
            return None
        except _Broken as broken:
            return self._broken(source, broken, function)
        if closes is None:
            return None
        return ParsedPiece(end + len(CLOSE) if closes else position, (_call(source, function, spans),))

    def _broken(self, source: SampledText, broken: _Broken, name: str) -> ParsedPiece | None:
        """Return a call that cannot be read.

        It ends at its closing tag, else at the next call, else with the turn.
        """
        tag = source.search(_TAG, broken.position)
        if tag is not None:
            error = broken.reason or self.unfinished(is_truncated=False)
            return ParsedPiece(
                tag.end() if tag[0] == CLOSE else tag.start(), (ToolCall("", name, None, error),)
            )
        return self.cut(source, name)

    def write(self, message: Message) -> str:
        lines = [message.content] if message.content else []
        for call in message.tool_calls:
            lines += [OPEN, f"{FUNCTION}{call.name}>", *_written(call.arguments or {}), END_FUNCTION, CLOSE]
        return with_thought(message.reasoning, "\n".join(lines))


def _expect(source: SampledText, literal: str, position: int, error: str) -> None:
    is_there = source.has(literal, position)
    if is_there is None:
        raise _Open
    if not is_there:
        raise _Broken(position, error)


def _name(source: SampledText, start: int, tag: str) -> tuple[str, int]:
    """Return the name that ends with `>`, and the next position."""
    match = _NAME.match(source.text, start)
    if match is not None and (name := match[1].strip()) and is_portable(name):
        return name, match.end()
    end = source.search(_NAME_END, start)
    if end is None and source.unfinished is None:
        raise _Open
    raise _Broken(start, None if end is None else f"{tag} must be followed by a name and >")


def _parameters(source: SampledText, start: int) -> tuple[list[tuple[str, int, int]], int]:
    """Return (name, start, end) of each value, and the position after the function's closing tag."""
    spans: list[tuple[str, int, int]] = []
    position = start
    while True:
        position = skip_space(source.text, position)
        ends = source.has(END_FUNCTION, position)
        if ends:
            return spans, position + len(END_FUNCTION)
        if ends is None:
            raise _Open
        _expect(source, PARAMETER, position, f"expected {PARAMETER}name> or {END_FUNCTION}")
        name, value = _name(source, position + len(PARAMETER), PARAMETER)
        end = source.search(_VALUE_END, value)
        if end is None:
            if source.unfinished is None:
                raise _Open
            raise _Broken(value, None)
        if end["lost"] is not None:
            raise _Broken(end.start(), f"the value of {name!r} is not closed by </parameter>")
        spans.append((name, value, end.start()))
        position = end.end()


def _call(source: SampledText, function: str, spans: list[tuple[str, int, int]]) -> ToolCall:
    arguments: dict[str, Any] = {}
    for name, start, end in spans:
        # One line break at each end of a value belongs to the tags.
        value = source.text[start:end].removeprefix("\n").removesuffix("\n")
        is_closed = source.text.startswith(END_PARAMETER, end)
        if (following := _following(source, function, name, value, is_closed=is_closed)) is not None:
            error = f"the value of {name!r} is not closed by {END_PARAMETER}: {following} follows"
            return ToolCall("", function, None, error)
        arguments[name] = typed(value, source.tools, function, name)
    return call_with(function, arguments)


def _following(source: SampledText, function: str, name: str, value: str, *, is_closed: bool) -> str | None:
    """Return the tag that shows that a value should have ended before it; None if there is none."""
    begun = swallowed(value, _PARAMETER_TAG, source.tools, function)
    if begun is not None:
        return f"{PARAMETER}{begun}>"
    if is_closed:  # other tags are text
        return None
    if value.endswith(wrong := f"</{name}>"):
        return wrong
    tag = _TAG.search(value)
    return None if tag is None else tag[0]


def _written(arguments: Any) -> Iterator[str]:
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"{PARAMETER}{name}>\n{text}\n</parameter>"
