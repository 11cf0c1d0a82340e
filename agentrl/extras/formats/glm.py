"""GLM-4.5 and later: the name behind `<tool_call>`, then pairs of key and value without quotes.

<tool_call>name
<arg_key>key</arg_key>
<arg_value>value</arg_value>
</tool_call>

GLM-4.7 and GLM-5 write no line breaks between the tags.
"""

from __future__ import annotations

import json
import re

from agentrl.chat.formats.json_calls import call_with, is_portable, skip_space
from agentrl.chat.parsing import END_THINK, THINK, ParsedPiece, SampledText, ToolFormat
from agentrl.extras.formats.argument_types import swallowed, typed
from agentrl.types import Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"

_MARK = re.compile(f"{OPEN}|{CLOSE}")
_NAME = re.compile(r"([^<\n]*+)\s*+(?=<)")
_KEY = re.compile(rf"{KEY}([^<]*+){END_KEY}\s*+{VALUE}")
_KEY_END = re.compile(rf"{VALUE}|{_MARK.pattern}")
# A value may itself contain "</arg_value>". Only a closing tag that is followed by the next tag ends it.
_VALUE_END = re.compile(rf"{END_VALUE}\s*+(?={KEY}|{CLOSE})|(?P<lost>{CLOSE}\s*+{OPEN})")

_TAG = re.compile(rf"{KEY}([^<]*+){END_KEY}|{END_VALUE}")


class _Broken(Exception):
    """The call cannot be read.

    position: where the search for its end starts. reason None: the text ended before the call did.
    """

    def __init__(self, position: int, reason: str | None) -> None:
        self.position = position
        self.reason = reason


class Glm(ToolFormat):
    """Values are typed by the tool's schema, as in `qwen3_coder`."""

    name = "glm"
    sign = re.compile("<arg_key>")
    closing = CLOSE

    def __init__(self) -> None:
        super().__init__(OPEN)

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        begin, function = start + len(OPEN), ""
        head = _NAME.match(source.text, begin)
        if head is None and source.unfinished is None and source.search(_MARK, begin) is None:
            return None
        if head is not None and is_portable(head[1].strip()):
            function = head[1].strip()
        if not function:
            return self.broken(source, begin, "", f"{OPEN} must be followed by the name", marks=_MARK)
        assert head is not None, "the name is part of it"
        try:
            arguments, position = self._arguments(source, function, head.end())
        except _Broken as broken:
            if broken.reason is None:
                return self.cut(source, function)
            return self.broken(source, broken.position, function, broken.reason, marks=_MARK)
        return None if position is None else ParsedPiece(position, (call_with(function, arguments),))

    def _arguments(
        self, source: SampledText, function: str, start: int
    ) -> tuple[dict[str, object], int | None]:
        """Return the arguments and the position after the call; None if text to come decides."""
        found: dict[str, object] = {}
        position = start
        while True:
            position = skip_space(source.text, position)
            closes = source.has(CLOSE, position)
            if closes:
                return found, position + len(CLOSE)
            key = _KEY.match(source.text, position)
            if closes is None or (key is None and self._is_open(source, position)):
                return found, None
            if key is None:
                raise _Broken(position, f"expected {KEY}name{END_KEY} and {VALUE}, or {CLOSE}")
            end = source.search(_VALUE_END, key.end())
            if end is None:
                raise _Broken(key.end(), None)
            if end["lost"] is not None:
                raise _Broken(end.start(), f"the value of {key[1]!r} is not closed by {END_VALUE}")
            name, value = key[1].strip(), source.text[key.end() : end.start()]
            if (begun := swallowed(value, _TAG, source.tools, function)) is not None:
                follows = f"{KEY}{begun}{END_KEY} follows"
                raise _Broken(end.end(), f"the value of {name!r} is not closed by {END_VALUE}: {follows}")
            found[name] = typed(value, source.tools, function, name)
            position = end.end()

    @staticmethod
    def _is_open(source: SampledText, position: int) -> bool:
        """Return whether the tags of a key at `position` may still arrive."""
        return (
            source.unfinished is None
            and source.has(KEY, position) is not False
            and source.search(_KEY_END, position) is None
        )

    def write(self, message: Message) -> str:
        parts = [f"{THINK}{message.reasoning}{END_THINK}"] if message.reasoning else []
        parts += [message.content] if message.content else []
        return "\n".join([*parts, *map(_written, message.tool_calls)])


def _written(call: ToolCall) -> str:
    lines = [f"{OPEN}{call.name}"]
    for name, value in (call.arguments or {}).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"{KEY}{name}{END_KEY}", f"{VALUE}{text}{END_VALUE}"]
    return "\n".join([*lines, CLOSE])
