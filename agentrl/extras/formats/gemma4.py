"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true,null]}<tool_call|>`, and thoughts between
`<|channel>thought` and `<channel|>`.

Keys are bare, or between the quotes of a text. Objects and lists may be nested.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from agentrl.chat.formats.json_calls import MAX_DEPTH, MAX_DIGITS, call_with, is_portable, skip_space
from agentrl.chat.parsing import END_THINK, ParsedPiece, SampledText, ToolFormat, beginnings
from agentrl.types import JsonObject, Message

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
CHANNEL, END_CHANNEL = "<|channel>", "<channel|>"

_MARK = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")
_HEAD = re.compile(r"\s*+call:(?P<name>[^\s<>{}]++)\s*+\{")
_HEAD_END = re.compile(rf"\{{|{_MARK.pattern}")
_QUOTE = re.compile(re.escape(QUOTE))
_BARE_KEY = re.compile(r"[^\s<>{}\[\]:,]++")
_LITERAL = re.compile(r"-?+\d++(?:\.\d++)?+(?:[eE][+-]?+\d++)?+|[A-Za-z]\w*+")
_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NUMBER = re.compile(r"-?\d")
_LATEST = 64
"""A literal that ends this close to the end of the text may go on."""


class _Open(Exception):
    """The result depends on text to come."""


class _Broken(Exception):
    """The call cannot be read. reason None: the text ended before the call did."""

    def __init__(self, position: int, reason: str | None) -> None:
        self.position = position
        self.reason = reason


class Gemma4(ToolFormat):
    """A thought is a channel; the name of the channel, its first line, is left out."""

    name = "gemma4"
    sign = re.compile(r"<\|tool_call>call:")
    closing = CLOSE

    def __init__(self) -> None:
        super().__init__(OPEN, CHANNEL)
        ends = (END_THINK, END_CHANNEL)
        self.thought_end = re.compile("|".join(map(re.escape, ends)))
        self.partial_thought_end = beginnings(ends)

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        if source.text.startswith(CHANNEL, start):
            return self._thought(source, start + len(CHANNEL))
        body = start + len(OPEN)
        if source.search(_HEAD_END, body) is None and source.unfinished is None:
            return None
        head = _HEAD.match(source.text, body)
        if head is None or not is_portable(head["name"]):
            return self.broken(source, body, "", "a call must be written as call:name{...}", marks=_MARK)
        try:
            arguments, end = _object(source, head.end(), 1)
            end = skip_space(source.text, end)
            is_closed = source.has(CLOSE, end)
            if is_closed is False:
                raise _Broken(end, f"there is text between the arguments and {CLOSE}")
        except _Open:
            return None
        except _Broken as broken:
            if broken.reason is None:
                return self.cut(source, head["name"])
            return self.broken(source, broken.position, head["name"], broken.reason, marks=_MARK)
        if is_closed is None:
            return None
        return ParsedPiece(end + len(CLOSE), (call_with(head["name"], arguments),))

    @staticmethod
    def _thought(source: SampledText, start: int) -> ParsedPiece | None:
        """Skip the channel's name. Other channels than `thought` are thoughts, too."""
        named = source.has("thought", start)
        if named is None:
            return None
        end = start + len("thought") if named else start
        if named and end == len(source.text) and source.unfinished is None:
            return None  # a line break may follow
        return ParsedPiece(end + 1 if source.text.startswith("\n", end) else end, begins="reasoning")

    def write(self, message: Message) -> str:
        thought = f"{CHANNEL}thought\n{message.reasoning}\n{END_CHANNEL}" if message.reasoning else ""
        calls = "".join(
            f"{OPEN}call:{call.name}{_written(call.arguments or {})}{CLOSE}" for call in message.tool_calls
        )
        return thought + calls + message.content  # in the order of the template


# -------------------------------------------------------------------------------------------------- reading


def _object(source: SampledText, start: int, depth: int) -> tuple[dict[str, Any], int]:
    """Read the members behind a `{`; return them and the position after the `}`."""
    found: dict[str, Any] = {}
    position = _next(source, start)
    if source.text[position] == "}":
        return found, position + 1
    while True:
        key, position = _key(source, position)
        position = _next(source, position)
        if source.text[position] != ":":
            raise _Broken(position, f"expected : behind the key {key!r}")
        found[key], position = _value(source, position + 1, depth)
        position = _next(source, position)
        if source.text[position] == "}":
            return found, position + 1
        if source.text[position] != ",":
            raise _Broken(position, f"expected , or }} behind the value of {key!r}")
        position = _next(source, position + 1)


def _list(source: SampledText, start: int, depth: int) -> tuple[list[Any], int]:
    """Read the items behind a `[`; return them and the position after the `]`."""
    found: list[Any] = []
    position = _next(source, start)
    if source.text[position] == "]":
        return found, position + 1
    while True:
        item, position = _value(source, position, depth)
        found.append(item)
        position = _next(source, position)
        if source.text[position] == "]":
            return found, position + 1
        if source.text[position] != ",":
            raise _Broken(position, "expected , or ] behind an item of a list")
        position += 1


def _value(source: SampledText, start: int, depth: int) -> tuple[Any, int]:
    position = _next(source, start)
    if _is_quote(source, position):
        return _text(source, position + len(QUOTE))
    first = source.text[position]
    if first in "{[":
        if depth >= MAX_DEPTH:
            raise _Broken(position, f"the arguments are nested too deeply, at most {MAX_DEPTH} levels")
        return (_object if first == "{" else _list)(source, position + 1, depth + 1)
    literal = _LITERAL.match(source.text, position)
    end = position if literal is None else literal.end()
    if source.unfinished is None and end >= len(source.text) - _LATEST and _may_go_on(source, end):
        raise _Open
    if literal is None or not (literal[0] in _LITERALS or _NUMBER.match(literal[0])):
        error = f"a value must be a number, true, false, null, a list, an object, or {QUOTE}text{QUOTE}"
        raise _Broken(position, error)
    return _of_literal(literal[0]), end


def _may_go_on(source: SampledText, end: int) -> bool:
    """Return whether nothing but parts of a literal is behind `end`."""
    return not source.text[end:].strip("+-.eE0123456789")


def _of_literal(text: str) -> Any:
    if text in _LITERALS:
        return _LITERALS[text]
    if len(text) > MAX_DIGITS:
        return math.inf  # refused with the whole call, as JSON's
    return float(text) if set(text) & set(".eE") else int(text)


def _key(source: SampledText, position: int) -> tuple[str, int]:
    if _is_quote(source, position):
        return _text(source, position + len(QUOTE))
    key = _BARE_KEY.match(source.text, position)
    if key is None:
        raise _Broken(position, "expected a key or }")
    return key[0], key.end()


def _text(source: SampledText, start: int) -> tuple[str, int]:
    end = source.search(_QUOTE, start)
    if end is None:
        raise _Open if source.unfinished is None else _Broken(start, None)
    return source.text[start : end.start()], end.end()


def _is_quote(source: SampledText, position: int) -> bool:
    is_quote = source.has(QUOTE, position)
    if is_quote is None:
        raise _Open
    return is_quote


def _next(source: SampledText, start: int) -> int:
    """Return the next position that is no white space."""
    position = skip_space(source.text, start)
    if position == len(source.text):
        raise _Open if source.unfinished is None else _Broken(position, None)
    return position


# -------------------------------------------------------------------------------------------------- writing


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return _members(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value)


def _members(values: JsonObject) -> str:
    """Return an object: the template sorts its keys without regard to case, and so does the model."""
    ordered = sorted(values.items(), key=lambda item: item[0].lower())
    return "{" + ",".join(f"{_named(key)}:{_written(value)}" for key, value in ordered) + "}"


def _named(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}"
