"""Config of opponents: frozen models that speak in conversations of an attempt in place of the policy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, model_validator

from agentrl.config.frozen_servers import FrozenServersConfig

_NAME = re.compile(r"[\w-]+", re.ASCII)


class OpponentConfig(FrozenServersConfig):
    """A frozen model on servers of its own: an older version, a reference."""

    temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of the opponent, also in validation; 0: greedy."
    )

    refresh_steps: int | None = Field(
        None,
        ge=1,
        description="Replace the opponent by the policy after every so many steps; before the first time it "
        "is `model`, or without a path the policy as it starts. None: never.",
    )

    @property
    def is_started(self) -> bool:
        return bool(self.model.path) or self.refresh_steps is not None

    @model_validator(mode="before")
    @classmethod
    def _follows_on_own_servers(cls, values: Any) -> Any:
        # Before what the base says of `urls` beside a model: here there need not be any.
        given = values if isinstance(values, Mapping) else {}
        if given.get("urls") and given.get("refresh_steps") is not None:
            raise ValueError(
                f"refresh_steps={given['refresh_steps']!r} replaces the weights of servers that the run "
                f"starts, and urls={given['urls']!r} run already; remove one of them"
            )
        return values

    @model_validator(mode="after")
    def _has_servers(self) -> OpponentConfig:
        if not self.is_used:
            raise ValueError(
                "an opponent needs a model: set model.path to have servers started, or urls to attach to "
                "running ones"
            )
        return self


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name that keys, metrics and logs could not have."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"opponents: {name!r} cannot be the name of an opponent; use letters, digits, - and _"
            )


def opponent_key(name: str) -> str:
    """Return the config key of an opponent."""
    return f"agent.opponents.{name}"


def without_server(name: str, configured: Mapping[str, OpponentConfig]) -> str:
    """Return the line about an opponent that the config does not know."""
    key = opponent_key(name)
    return (
        f"opponent {name!r} has no server: set {key}.model.path or {key}.urls; configured: "
        f"{', '.join(sorted(configured)) or 'none'}"
    )
