"""Reading of bodies that programs send: bounded in what they cost, and checked before anything is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import orjson
import pydantic

from agentrl.extras.gateway.turns import RequestError
from agentrl.types import JsonObject, Message, ToolCall

Parsed = TypeVar("Parsed", bound=pydantic.BaseModel)

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
"""OpenAI accepts 128."""
MAX_CALLS = 1024
"""Tool calls in one message."""
MAX_PARTS = 4096
"""Parts of one message's text."""
MAX_KEYS = 1024
"""Keys of a tool's top-level object. Its nested schema is not limited."""
MAX_STOPS = 64
"""Stop strings; OpenAI accepts 4."""
MAX_BRACKETS = 100_000
"""Opening brackets in a body, including those in texts. Three million empty lists fit into 8 MiB, and parsing
them holds the GIL for four seconds."""
MAX_DEPTH = 200
"""Levels of a call's arguments, and of a tool. JSON libraries of programs refuse 255, or a thousand."""


def read_json(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object.

    Raises:
        RequestError: it is none, has more than MAX_BRACKETS opening brackets, or tools of more than MAX_DEPTH
            levels.
    """
    if (num_brackets := body.count(b"[") + body.count(b"{")) > MAX_BRACKETS:
        raise RequestError(f"the body has {num_brackets} opening brackets; send at most {MAX_BRACKETS}")
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise RequestError(f"the body must be a JSON object, not {type(raw).__name__}")
    if num_brackets > MAX_DEPTH and _is_deep(raw.get("tools")):
        raise RequestError(f"tools: a tool has more than {MAX_DEPTH} nested levels; send a flatter schema")
    return raw


def _is_deep(tools: Any) -> bool:
    """Return whether a tool has more than MAX_DEPTH levels, without recursion."""
    level: list[Any] = [tools] if isinstance(tools, list) else []
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def validated(model: type[Parsed], raw: Any) -> Parsed:
    """Return `raw` as `model`.

    Raises:
        RequestError: a field is missing or wrong; the message names the first one.
    """
    try:
        return model.model_validate(raw)
    except pydantic.ValidationError as error:
        # The deepest: of a text or a list of parts, it names the part that is wrong.
        found = error.errors(include_url=False, include_input=False)
        first = max(reversed(found), key=lambda problem: len(problem["loc"]))
        path = ".".join(str(step) for step in first["loc"] if not _is_branch(step)) or "body"
        raise RequestError(f"{path}: {first['msg']}") from error


def _is_branch(step: str | int) -> bool:
    """Return whether a step of an error's place names an alternative of a union, and no field."""
    return isinstance(step, str) and (step == "str" or "[" in step)


def _small(value: Any) -> Any:
    """Reject a large object before pydantic copies it: pydantic copies before it checks the length."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise ValueError(f"it has {len(value)} keys; send at most {MAX_KEYS}")
    return value


Object = Annotated[dict[str, Any], pydantic.BeforeValidator(_small)]


class Strict(pydantic.BaseModel):
    """Parses a part of a request. Unknown fields are ignored, as compatible servers do."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)


Stops = str | Annotated[list[str], pydantic.Field(max_length=MAX_STOPS)]


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a request, without empty ones."""
    return tuple(text for text in ((stop,) if isinstance(stop, str) else stop or ()) if text)


def set_fields(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `names` that a request sets."""
    return {name: raw[name] for name in names if raw.get(name) is not None}


def read_arguments(id: str, name: str, text: str) -> ToolCall:
    """Return a call whose arguments are JSON in a text.

    Raises:
        RequestError: they are no JSON object, or none that can be sent.
    """
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return checked_call(id, name, arguments)


def checked_call(id: str, name: str, arguments: Any) -> ToolCall:
    """Return a call.

    Raises:
        RequestError: the arguments are no JSON object, or none that can be sent.
    """
    if not isinstance(arguments, dict) or not is_sendable(arguments):
        raise RequestError(f"the arguments of tool call {id[:100]!r} are not a JSON object")
    return ToolCall(id, name, arguments)


def is_sendable(value: Any, *, depth: int = MAX_DEPTH) -> bool:
    """Return whether programs can read `value` as JSON, and send it back.

    Models write what Python's reader accepts and others do not: NaN, half of a character, a thousand levels,
    numbers of a thousand digits.
    """
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, int | float):
        return abs(value) <= sys.float_info.max  # false for NaN
    if isinstance(value, Mapping):
        return depth > 0 and all(
            is_sendable(key) and is_sendable(item, depth=depth - 1) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return depth > 0 and all(is_sendable(item, depth=depth - 1) for item in value)
    return True


def named_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages; a tool message gets the name of the function that was called."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool":
            message = Message(
                "tool",
                message.content,
                tool_call_id=message.tool_call_id,
                name=names.get(message.tool_call_id or ""),
            )
        named.append(message)
    return tuple(named)


def function_schema(name: str, description: str | None, parameters: JsonObject) -> JsonObject:
    """Return the schema of a tool in the form that chat templates show."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": parameters}}


def event(data: Any, *, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
