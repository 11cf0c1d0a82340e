"""Typed options: parses a plugin's `config` into a pydantic model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.errors import ConfigError


class Options(BaseModel):
    """Base class of a plugin's options. Unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


OptionsT = TypeVar("OptionsT", bound=Options)


def read_options(kind: type[OptionsT], config: Mapping[str, Any], *, plugin: str) -> OptionsT:
    """Parse `config` as `kind`. `plugin` names the plugin in errors ("tool 'search'").

    Raises:
        ConfigError: a key is unknown, missing or has a wrong value; the message lists the valid keys.
    """
    try:
        return kind(**config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "config"
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{plugin}: {key}: {message}; the keys are {', '.join(kind.model_fields)}"
        ) from error


def secret(variable: str | None, *, plugin: str) -> str | None:
    """Return the API key in the environment variable `variable`; None if `variable` is None.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"{plugin}: api_key_env={variable!r}: this environment variable is not set")
    return os.environ[variable]
