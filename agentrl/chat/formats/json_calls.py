"""JSON inside sampled text: reading it from a start position, checking it, and writing it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.parsing import SampledText
from agentrl.types import JsonObject, ToolCall

MAX_DEPTH = 64
"""Deeper values are refused. Python's parsers and validators
recurse, and the depth they reach depends on the caller.
"""

MAX_DIGITS = 4000
"""Python refuses to convert longer integers, because the conversion takes quadratic time."""

FIRST_WINDOW = 1024
"""Characters given to the decoder first. Its errors count lines from the start of its input, so thousands of
broken calls in one text would take quadratic time.
"""

LOOKAHEAD = 16
"""An error this close to the end of the text may be caused by an incomplete number, literal or escape."""


@dataclass(frozen=True, slots=True)
class Json:
    """A value that ends before `end`.

    With an `error` there is no value, and the search for the call's end starts at `end`.
    """

    value: Any
    end: int
    error: str | None = None


def read_json(source: SampledText, start: int) -> Json | None:
    """Read the value that begins at `start`; None if more text could change the answer.

    Accepts unescaped line breaks in strings, which models write into code.
    """
    text, window = source.text, FIRST_WINDOW
    while True:
        piece = text[start : start + window]
        is_whole = start + len(piece) == len(text)
        answer = _decode(piece, start, is_final=is_whole and source.unfinished is not None)
        if answer is not None or is_whole:
            return answer
        window *= 4


def _decode(piece: str, start: int, *, is_final: bool) -> Json | None:
    try:
        value, end = _DECODER.raw_decode(piece)
    except json.JSONDecodeError as error:
        is_open = error.pos >= len(piece) - LOOKAHEAD or error.msg.startswith("Unterminated")
        reason = f"the call is not valid JSON: {error.msg} at character {error.pos}"
        return None if is_open and not is_final else Json(None, start, reason)
    except RecursionError:
        return Json(None, start, TOO_DEEP)
    if piece[end - 1] not in '}]"' and end >= len(piece) - LOOKAHEAD and not is_final:
        return None  # more digits may follow
    if is_too_deep(value, piece[:end]):
        return Json(None, start, TOO_DEEP)
    return Json(value, start + end)


TOO_DEEP = f"the call is not valid JSON: nested too deeply, at most {MAX_DEPTH} levels"


def is_too_deep(value: Any, written: str) -> bool:
    """Return whether `value`, read from the text `written`, has more than MAX_DEPTH levels."""
    if written.count("[") + written.count("{") + written.count("(") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def call_of(value: Any, *, keys: Sequence[str] = ("arguments",)) -> ToolCall:
    """Return the call that a JSON value describes.

    The value needs a "name", and the arguments under one of `keys`; the first that exists counts.
    """
    name = name_of(value)
    if not name:
        return ToolCall("", "", None, f'a call must be a JSON object with "name" and "{keys[0]}"')
    key = next((key for key in keys if key in value), None)
    if key is None:
        return ToolCall("", name, None, f'the call has no "{keys[0]}"')
    return call_with(name, value[key])


def call_with(name: str, arguments: Any) -> ToolCall:
    """Return the call of `name`, with an `error` unless `arguments` are an object that JSON can represent.

    Models write null or nothing for a tool without parameters.
    """
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):  # some models write the object as a JSON string
        read = read_json(SampledText(arguments.strip(), "", ()), 0)
        assert read is not None, "a whole text is read to its end"
        if read.error is None and read.end < len(arguments.strip()):
            return ToolCall(
                "", name, None, f"the arguments are not valid JSON: Extra data at character {read.end}"
            )
        if read.error is not None:
            return ToolCall("", name, None, read.error.replace("the call is", "the arguments are"))
        arguments = read.value
    if not isinstance(arguments, dict):
        return ToolCall(
            "", name, None, f"the arguments must be a JSON object, not {type(arguments).__name__}"
        )
    if not is_portable(arguments):
        return ToolCall(
            "", name, None, "the arguments contain half of a UTF-16 surrogate pair, or a number out of range"
        )
    return ToolCall("", name, arguments)


def name_of(value: Any) -> str:
    """Return the "name" of a JSON object; "" if there is none."""
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) and (name.isascii() or is_portable(name)) else ""


def begun_name(text: str, start: int) -> str:
    """Return the name in a call at `start` whose JSON cannot be read; "" if the name is missing too."""
    match = _BEGUN.match(text, start)
    return match[1] if match else ""


def is_portable(value: Any) -> bool:
    """Return whether `value` can be sent as JSON in UTF-8.

    Python's parser also reads lone surrogates, NaN and 1e999.
    """
    try:
        _ENCODER.encode(value).encode()
    except (ValueError, RecursionError):
        return False
    return True


def skip_space(text: str, position: int) -> int:
    """Return the first position after white space."""
    match = _SPACE.match(text, position)
    assert match is not None, "nothing is white space as well"
    return match.end()


def write_json(value: JsonObject | None) -> str:
    """Return arguments as models write them: JSON with unescaped unicode."""
    return json.dumps(dict(value or {}), ensure_ascii=False)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"([\w.-]{1,64})"')
_SPACE = re.compile(r"\s*")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else math.inf


def _constant(_: str) -> float:
    return math.nan  # the whole call is refused later: JSON has no such number


_DECODER = json.JSONDecoder(parse_int=_integer, parse_constant=_constant, strict=False)
