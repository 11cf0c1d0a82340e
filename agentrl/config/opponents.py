"""Config of opponents: frozen models that speak in conversations of an attempt in place of the policy."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from agentrl.config.frozen_servers import FrozenServersConfig


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

    @model_validator(mode="after")
    def _has_servers(self) -> OpponentConfig:
        if not self.is_used:
            raise ValueError(
                "an opponent needs a model: set model.path to have servers started, or urls to attach to "
                "running ones"
            )
        return self


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
