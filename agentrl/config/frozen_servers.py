"""Config of servers whose weights nobody publishes: those of opponents and of teachers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.section import Section
from agentrl.config.server_urls import refuse_url
from agentrl.config.storage_fields import PathOrURL


class FrozenModelConfig(Section):
    """A model that is served and not trained. Dtype, code and library are those of `model`."""

    path: PathOrURL = Field(
        "",
        description="Local folder, hub id or URL of a model with the policy's tokenizer, "
        "for which servers are started; empty: none are.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id; None: its main branch."
    )


@dataclass(frozen=True, slots=True)
class FrozenPlan:
    """Servers to start for a frozen model.

    key: of the config section that names the model.
    name: of its servers and their logs.
    rollout: how they are started; `rollout.num_servers` of them.
    """

    key: str
    name: str
    model: ModelConfig
    rollout: RolloutConfig


class FrozenServersConfig(Section):
    """Servers with one frozen model: those that are started for `model`, or those that run at `urls`."""

    model: FrozenModelConfig = FrozenModelConfig()
    num_servers: int | None = Field(
        None,
        ge=1,
        description="Number of servers to start for `model`, of the kind rollout.backend; None: 1.",
    )
    sglang_args: dict[str, Any] = Field(
        {}, description="Arguments of its SGLang servers, in addition to or in place of rollout.sglang.args."
    )
    urls: tuple[str, ...] = Field(
        (),
        description="In place of `model`: URLs of running servers that speak SGLang's protocol, such as "
        "`python -m agentrl.extras.embedded`; all have the same weights, and the policy's tokenizer.",
    )
    api_key_env: str | None = Field(
        None,
        description="Name of the environment variable with the API key of `urls`; required for servers on "
        "other machines.",
    )
    tokenizer: str | None = Field(
        None,
        description="Folder with the tokenizer of `urls`; None: the folder that the servers name, which this "
        "machine must be able to read.",
    )

    @property
    def is_used(self) -> bool:
        return bool(self.urls) or self.is_started

    @property
    def is_started(self) -> bool:
        """Whether the run starts the servers."""
        return bool(self.model.path)

    @property
    def num_started(self) -> int:
        """`num_servers` with None resolved; 0 if the servers run already."""
        return (self.num_servers or 1) if self.is_started else 0

    def plan(self, key: str, name: str, *, policy: ModelConfig, rollout: RolloutConfig) -> FrozenPlan:
        """Return how to start the servers: as those of the policy, apart from what belongs to its weights. A
        model without a path is the policy as it starts.

        key, name: as of FrozenPlan. policy, rollout: the sections `model` and `rollout`.
        """
        assert self.is_started, "there is nothing to start"
        own = {"path": self.model.path, "revision": self.model.revision, "tokenizer_path": None}
        own = own if self.model.path else {}
        weights = rollout.weights.model_copy(update={"adapter": "merged", "delta": False})
        arguments = {**rollout.sglang.args, **self.sglang_args}
        servers = {
            "num_servers": self.num_started,
            "urls": (),
            "api_key_env": None,
            "colocated": False,
            "replay_experts": False,
            "weights": weights,
            "sglang": rollout.sglang.model_copy(update={"args": arguments}),
        }
        return FrozenPlan(
            key,
            re.sub(r"[^\w.-]", "_", name),
            policy.model_copy(update={**own, "lora": LoRAConfig()}),
            rollout.model_copy(update=servers),
        )

    @model_validator(mode="after")
    def _has_one_source(self) -> FrozenServersConfig:
        if self.is_started and self.urls:
            raise ValueError(
                f"model.path={self.model.path!r} and urls={list(self.urls)} name two models; set model.path "
                "to have servers started, or urls to attach to running ones; attached ones are never replaced"
            )
        given = {
            "num_servers": (self.num_servers, self.is_started, "model.path"),
            "sglang_args": (self.sglang_args, self.is_started, "model.path"),
            "model.revision": (self.model.revision, self.is_started, "model.path"),
            "api_key_env": (self.api_key_env, not self.is_started, "urls"),
            "tokenizer": (self.tokenizer, not self.is_started, "urls"),
        }
        for name, (value, fits, needed) in given.items():
            if value and not fits:
                raise ValueError(
                    f"{name}={value!r} has no effect without {needed}; set {needed}, or remove it"
                )
        return self

    @model_validator(mode="after")
    def _may_be_asked(self) -> FrozenServersConfig:
        for url in self.urls:
            if why := refuse_url(url, has_key=self.api_key_env is not None, variable="api_key_env"):
                raise ValueError(f"urls: {why}")
        return self
