"""Typed and bounded access to fields of request bodies.

Anything else is a BadRequest that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request

from agentrl.serving.embedded.bounded_repr import shown

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
    value = body.get(name)
    if value is None and default is not None:
        return default
    return _text(value, name)


def version_of(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    return None if value is None else _text(value, name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or "\0" in value:
        raise BadRequest(
            f"`{name}` must be a string of at most {MAX_TEXT} characters without NUL, got {shown(value)}"
        )
    return value


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise BadRequest(f"`{name}` must be a list, got {shown(value)}")
    return value


def flag_of(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise BadRequest(f"`{name}` must be true or false, got {shown(value)}")
    return value


def number_of(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadRequest(f"`{name}` must be a number, got {shown(value)}")
    return float(value)


def integer_of(
    body: Mapping[str, Any],
    name: str,
    default: int | None = None,
    *,
    minimum: int = 0,
    maximum: int = MAX_INTEGER,
) -> int:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not minimum <= value <= maximum:
        raise BadRequest(f"`{name}` must be an integer from {minimum} to {maximum}, got {shown(value)}")
    return value


def seconds_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise BadRequest(f"`timeout` must be a number of seconds from 0 to 86400, got {shown(text)}")
    return value
