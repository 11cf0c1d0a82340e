"""Fields of request bodies, read by type; what has another type is a BadRequest that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request

from agentrl.serving.embedded.requests import BadRequest


async def read_body(request: Request) -> Mapping[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def text_of(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise BadRequest(f"`{name}` must be a string, got {value!r}")
    return value


def version_of(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"`{name}` must be a string, got {value!r}")
    return value


def count_of(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or value < 0:
        raise BadRequest(f"`{name}` must be an integer of at least 0, got {value!r}")
    return value


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise BadRequest(f"`{name}` must be a list, got {value!r}")
    return value


def seconds_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise BadRequest(f"timeout must be a number of seconds between 0 and 86400, got {text!r}")
    return value
