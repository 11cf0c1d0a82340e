"""Typed and bounded access to fields of request bodies.

Anything else is a BadRequest that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request

from agentrl.extras.embedded.bounded_repr import shown

MAX_BODY_BYTES = 32 * 2**20
"""Many times the size of the largest batch of prompts within the limits."""
MAX_TEXT = 4096
"""Characters of a name, a version or a path; Linux's PATH_MAX."""
MAX_INTEGER = 2**31 - 1
"""Bound of counts, ports and ids. Beyond 64 bits, torch would raise in the thread that all requests share."""


class BadRequest(Exception):
    """The request is invalid. `is_flat` selects SGLang's error format for unknown sampling parameters."""

    def __init__(self, message: str, *, is_flat: bool = False, status: int = 400) -> None:
        super().__init__(message)
        self.is_flat = is_flat
        self.status = status


async def read_body(request: Request) -> Mapping[str, Any]:
    """Return the JSON object of the body.

    Raises:
        BadRequest: it is longer than MAX_BODY_BYTES, or not a JSON object.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise BadRequest(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def text_of(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    wanted = f"a string of at most {MAX_TEXT} characters without NUL"
    text: str = _field(body, name, default, _is_text, wanted)
    return text


def version_of(body: Mapping[str, Any], name: str) -> str | None:
    return None if body.get(name) is None else text_of(body, name)


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    values: list[Any] = _field(body, name, None, lambda value: isinstance(value, list), "a list")
    return values


def flag_of(body: Mapping[str, Any], name: str, default: bool) -> bool:
    flag: bool = _field(body, name, default, lambda value: type(value) is bool, "true or false")
    return flag


def number_of(body: Mapping[str, Any], name: str, default: float) -> float:
    return float(_field(body, name, default, _is_number, "a number"))


def integer_of(
    body: Mapping[str, Any],
    name: str,
    default: int | None = None,
    *,
    minimum: int = 0,
    maximum: int = MAX_INTEGER,
) -> int:
    integer: int = _field(
        body,
        name,
        default,
        lambda value: type(value) is int and minimum <= value <= maximum,
        f"an integer from {minimum} to {maximum}",
    )
    return integer


def _field(
    body: Mapping[str, Any], name: str, default: Any, is_right: Callable[[Any], bool], wanted: str
) -> Any:
    """Return a field, or its default if it is missing or null. Without a default it is required."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not is_right(value):
        raise BadRequest(f"`{name}` must be {wanted}, got {shown(value)}")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and "\0" not in value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def seconds_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise BadRequest(f"`timeout` must be a number of seconds from 0 to 86400, got {shown(text)}")
    return value
