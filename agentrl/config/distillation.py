"""Config of on-policy distillation: a teacher scores what the policy sampled."""

from __future__ import annotations

from pydantic import Field, model_validator

from agentrl.config.frozen_servers import FrozenServersConfig
from agentrl.config.section import Section
from agentrl.config.storage_fields import PathOrURL

TEACHER_SERVERS = "algorithm.distillation.servers"
"""Config key of the teacher's servers."""


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores each sampled token (docs/algorithms.md)."""

    teacher: PathOrURL = Field(
        "",
        description="Local folder, hub id or URL (agentrl docs storage) of a causal model with the policy's "
        "tokenizer, which the learner's ranks load beside the policy; empty: no teacher, or that of "
        "`servers`.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id; None: its main branch."
    )
    coefficient: float = Field(
        1.0,
        gt=0,
        description="Advantage subtracted per nat of log policy - log teacher of the sampled token.",
    )
    gamma: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Discount per action token, with which a token also answers for later tokens of its "
        "trajectory; 0: each token answers for itself, 1: for the whole rest.",
    )
    with_rewards: bool = Field(
        True,
        description="Add to the advantages of the rewards; false: only the teacher teaches, and rewards are "
        "only reported.",
    )

    servers: FrozenServersConfig = FrozenServersConfig()
    timeout_s: float = Field(
        60.0, gt=0, description="Deadline in which the teacher's servers score one attempt, retries included."
    )

    @property
    def is_used(self) -> bool:
        return bool(self.teacher) or self.asks_servers

    @property
    def asks_servers(self) -> bool:
        """Whether the teacher is on servers of its own, in place of the learner's ranks."""
        return self.servers.is_used

    @property
    def replaces_rewards(self) -> bool:
        """Whether advantages come from the teacher alone."""
        return self.is_used and not self.with_rewards

    @model_validator(mode="after")
    def _has_a_teacher(self) -> DistillationConfig:
        if not self.is_used and not self.with_rewards:
            raise ValueError("with_rewards=false leaves nothing to learn from without a teacher; set teacher")
        if self.teacher and self.asks_servers:
            raise ValueError(f"teacher={self.teacher!r} and servers name two teachers; set one of them")
        return self
