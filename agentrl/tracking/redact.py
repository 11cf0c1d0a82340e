"""Replaces secrets in a config before it is sent to a tracker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BLANK = "***"

# Judged by the end of the name: `token` is a secret; `max_response_tokens` and `data_source_key` are not. A
# name that ends in `_env` is the name of an environment variable, which is no secret.
_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|passw(or)?d|passphrase|secret|token|credentials?|authorization)$",
    re.I,
)
_URL_USER = re.compile(r"(?<=://)[^/?#\s]+(?=@)")


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which values with secret-like names, and users and passwords in URLs, are `***`."""
    return {
        name: BLANK if _SECRET_NAME.search(str(name)) and value is not None else _redact_value(value)
        for name, value in config.items()
    }


def without_users(text: str) -> str:
    """Return the text with `***` for user and password of each URL."""
    return _URL_USER.sub(BLANK, text)


def _redact_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_redact_value(item) for item in value]
    if isinstance(value, str):
        return without_users(value)
    return value
