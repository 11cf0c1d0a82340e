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

    @model_validator(mode="after")
    def _has_servers(self) -> OpponentConfig:
        if not self.urls:
            raise ValueError("urls=[]: an opponent needs a server with the frozen model; name its URL")
        return self


def without_server(name: str, configured: Mapping[str, OpponentConfig]) -> str:
    """Return the line about an opponent that the config does not know."""
    return (
        f"opponent {name!r} has no server: set agent.opponents.{name}.urls; configured: "
        f"{', '.join(sorted(configured)) or 'none'}"
    )
