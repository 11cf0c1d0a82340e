"""Config of servers whose weights nobody publishes: those of opponents and of teachers."""

from __future__ import annotations

from pydantic import Field, model_validator

from agentrl.config.section import Section
from agentrl.config.server_urls import refuse_url


class FrozenServersConfig(Section):
    """Running servers with one frozen model."""

    urls: tuple[str, ...] = Field(
        (),
        description="URLs of running servers that speak SGLang's protocol, such as `python -m "
        "agentrl.serving.embedded`; all have the same weights, and the policy's tokenizer.",
    )
    api_key_env: str | None = Field(
        None,
        description="Name of the environment variable with the servers' API key; required for servers on "
        "other machines.",
    )
    tokenizer: str | None = Field(
        None,
        description="Folder with the servers' tokenizer; None: the folder that the servers name, which this "
        "machine must be able to read.",
    )

    @model_validator(mode="after")
    def _may_be_asked(self) -> FrozenServersConfig:
        for url in self.urls:
            if why := refuse_url(url, has_key=self.api_key_env is not None, variable="api_key_env"):
                raise ValueError(f"urls: {why}")
        return self
