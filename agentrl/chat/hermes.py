"""Tool calls in the Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in one turn."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from agentrl.chat.parsing import ParsedTurn, call_id
from agentrl.types import ToolCall

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def parse(text: str, *, turn: int, is_truncated: bool) -> ParsedTurn:
    """Split a sampled turn into its text and its calls. Never raises: a call that cannot be read carries an `error`.

    The JSON is read by a parser, not cut at the closing tag, so that an argument may contain `</tool_call>`.
    """
    unclosed = "the call was cut at the token limit" if is_truncated else f"the call is not closed by {CLOSE}"
    outside: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        outside.append(text[position:start])
        call, position = _read_call(text, start + len(OPEN), id=call_id(turn, len(calls)), unclosed=unclosed)
        calls.append(call)
    outside.append(text[position:])
    return ParsedTurn("".join(outside), tuple(calls))


def _read_call(text: str, start: int, *, id: str, unclosed: str) -> tuple[ToolCall, int]:
    """Return the call whose body begins at `start`, and where the text goes on after it."""
    body = _skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, body)
    except (ValueError, RecursionError) as error:
        stop, is_closed = _end_of_broken(text, body)
        reason = f"the call is not valid JSON: {_reason(error, body)}" if is_closed else unclosed
        return ToolCall(id, "", None, reason), stop
    end = _skip_space(text, end)
    if text.startswith(CLOSE, end):
        return _call(value, id), end + len(CLOSE)
    stop, is_closed = _end_of_broken(text, end)
    reason = f"there is text between the JSON and {CLOSE}" if is_closed else unclosed
    return ToolCall(id, _name_of(value), None, reason), stop


def _call(value: Any, id: str) -> ToolCall:
    name = _name_of(value)
    if not name:
        return ToolCall(id, "", None, 'a call must be a JSON object with "name" and "arguments"')
    if "arguments" not in value:
        return ToolCall(id, name, None, 'the call has no "arguments"')
    arguments = value["arguments"]
    if isinstance(arguments, str):  # some models write the object as a JSON string
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(id, name, None, f"the arguments are not valid JSON: {_reason(error, 0)}")
    if not isinstance(arguments, dict):
        return ToolCall(id, name, None, f"the arguments must be a JSON object, not {type(arguments).__name__}")
    if not _is_portable(arguments):
        return ToolCall(id, name, None, "the arguments hold half of a UTF-16 surrogate pair or a number out of range")
    return ToolCall(id, name, arguments)


def _end_of_broken(text: str, start: int) -> tuple[int, bool]:
    """Return where an unreadable call ends (its closing tag, else the next call, else the end), and whether it is closed."""
    close = text.find(CLOSE, start)
    following = text.find(OPEN, start)
    if close >= 0 and (following < 0 or close < following):
        return close + len(CLOSE), True
    return (following if following >= 0 else len(text)), False


def _name_of(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) and _is_portable(name) else ""


def _is_portable(value: Any) -> bool:
    """Tell whether `value` can travel as JSON in UTF-8; Python's parser also reads lone surrogates and 1e999."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _reason(error: ValueError | RecursionError, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - start}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


# strict=False: models write code with real line breaks into JSON strings
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
