"""Config of opponents: frozen models that speak in conversations of an attempt in place of the policy."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from agentrl.config.section import Section
from agentrl.config.server_urls import refuse_url


class OpponentConfig(Section):
    """A frozen model on servers of its own, which nobody publishes to: an older version, a reference."""

    urls: tuple[str, ...] = Field(
        (),
        description="URLs of running servers that speak SGLang's protocol, such as those of `agentrl serve`; "
        "all have the same weights, and the policy's tokenizer.",
    )
    api_key_env: str | None = Field(
        None,
        description="Name of the environment variable with the servers' API key; required for servers on "
        "other machines.",
    )
    temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of the opponent, also in validation; 0: greedy."
    )
    tokenizer: str | None = Field(
        None,
        description="Folder with the servers' tokenizer; None: the folder that the servers name, which this "
        "machine must be able to read.",
    )

    @model_validator(mode="after")
    def _has_servers(self) -> OpponentConfig:
        if not self.urls:
            raise ValueError(
                "urls=[]: an opponent needs a server; start one with the frozen model, and name it"
            )
        for url in self.urls:
            if why := refuse_url(url, has_key=self.api_key_env is not None, variable="api_key_env"):
                raise ValueError(f"urls: {why}")
        return self


def without_server(name: str, configured: Mapping[str, OpponentConfig]) -> str:
    """Return the line about an opponent that the config does not know."""
    return (
        f"opponent {name!r} has no server: set agent.opponents.{name}.urls; configured: "
        f"{', '.join(sorted(configured)) or 'none'}"
    )
