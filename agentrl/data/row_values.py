"""The values of a row, as JSON has them: the same from Parquet, JSON lines, JSON text and `data.reader`."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from agentrl.data.row_place import RowPlace
from agentrl.types import JsonObject

MAX_DEPTH = 100
"""Levels of lists and objects. The JSON of requests and stored files ends at some 250."""

_LONG_NUMBER = re.compile(rb"\d{19}")


def decode_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Integers of any size are exact.

    Raises:
        ValueError: the text is not valid JSON; NaN and lone surrogates are not.
    """
    data = text.encode() if isinstance(text, str) else text
    try:
        value = orjson.loads(data)
    except ValueError:
        with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            json.loads(data, parse_constant=_no_number)
        raise
    if not _LONG_NUMBER.search(data):
        return value
    try:
        return json.loads(data)  # orjson reads integers beyond 64 bits as floats
    except RecursionError as error:
        raise ValueError("it has too many levels of lists and objects") from error


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON; use null or text")


def structure(value: Any) -> Any:
    """Return the list or object that a text is the JSON of; any other value as it is."""
    try:
        return decode_json(value) if _begins_structure(value) else value
    except ValueError:
        return value


def decoded(value: Any, place: RowPlace, field: str) -> Any:
    """Do the same for a field that has to be a list or an object. Blank text and `null` are None.

    Parquet columns have one type, so structures of different shapes are often stored as text.

    Raises:
        DataError: a text that begins like a list or an object is not valid JSON.
    """
    if isinstance(value, str) and value.strip() in ("", "null"):
        return None
    try:
        return decode_json(value) if _begins_structure(value) else value
    except ValueError as error:
        raise place.error(field, f"is not valid JSON ({error}): {shortened(value)}") from error


def _begins_structure(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith(("[", "{"))


def read_object(value: Any, place: RowPlace, field: str) -> JsonObject:
    """Return an object, or the object that is stored as JSON text, as `plain` returns it; None is {}.

    Raises:
        DataError: it is something else, or contains a value that `plain` refuses.
    """
    found = decoded(value, place, field)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise place.error(field, f"must be an object, is {shortened(value)}")
    result: JsonObject = plain(found, place, field)
    return result


def plain(value: Any, place: RowPlace, field: str, *, depth: int = 0) -> Any:
    """Return `value` as JSON has it: null, booleans, numbers, text, lists, and objects with text as keys.

    Dates and times become ISO 8601 text, decimal numbers, durations and UUIDs text, bytes base64 text, and
    numpy's values those of Python.

    Raises:
        DataError: a value has no such form; the message names the row and the field.
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise place.error(field, f"is {value}, which JSON does not have; use null or text")
        return value
    if depth == MAX_DEPTH:
        raise place.error(field[:80], f"has more than {MAX_DEPTH} levels of lists and objects")
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(plain(key, place, field, depth=depth + 1)): plain(
                item, place, f"{field}.{key}", depth=depth + 1
            )
            for key, item in value.items()
        }
    items = _items(value)
    if items is not None:
        return [plain(item, place, f"{field}[{index}]", depth=depth + 1) for index, item in enumerate(items)]
    text = _text(value)
    if text is None and isinstance(value, np.generic | np.ndarray):
        return plain(value.item(), place, field, depth=depth + 1)
    if text is None:
        problem = f"is of type {type(value).__name__}; use text, numbers, booleans, null, lists and objects"
        raise place.error(field, problem)
    return text


def _items(value: Any) -> list[Any] | tuple[Any, ...] | None:
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim else None
    return value if isinstance(value, (list, tuple)) else None


def _text(value: Any) -> str | None:
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    texts = (decimal.Decimal, datetime.timedelta, uuid.UUID, np.datetime64, np.timedelta64)
    return str(value) if isinstance(value, texts) else None


def shortened(value: Any) -> str:
    """Return a value for a message, at most 80 characters."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
