"""Config of a run's reward model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.learner import FSDPConfig, LearnerConfig, refuse_uneven_copies
from agentrl.config.model import ModelConfig
from agentrl.config.section import Section

REWARD_MODEL = "reward_model"
"""The registered reward that calls the reward model."""


class RewardModelConfig(Section):
    """The reward model of a run: a role of its own, asked by the terms with `reward: reward_model` once per batch."""

    model: ModelConfig = ModelConfig()
    max_tokens: int | None = Field(None, ge=1, description="Longest conversation; None: as many tokens as the model has positions.")
    overlong: Literal["truncate", "skip"] = Field(
        "truncate",
        description="A longer one loses its beginning (share: `reward/<term>/truncated`), or the term does not apply to it "
        "(`reward/<term>/applied`).",
    )
    render: Literal["turns", "template"] = Field(
        "turns",
        description="The text that is scored. turns: as `agentrl rm` trains, each turn as a model would have sampled it, up to the token "
        "that ends the last one; template: what apply_chat_template gives, for models that were trained on that.",
    )
    world_size: int = Field(1, ge=1, description="Ranks, over which weights and conversations are spread.")
    threads: int = Field(1, ge=1, description="CPU threads of torch per rank.")
    microbatch_tokens: int = Field(16384, ge=1, description="Packed tokens per forward and rank; a longer conversation stands alone.")
    offload: Literal["none", "parameters"] = Field("none", description="parameters: the weights wait on the CPU for each forward.")
    fsdp: FSDPConfig = FSDPConfig()
    collective_timeout_s: float = Field(300.0, gt=0, description="A collective that takes longer lost a rank.")

    @property
    def is_used(self) -> bool:
        return bool(self.model.path)

    @property
    def as_learner(self) -> LearnerConfig:
        """The settings for ranks and sharding, in the form of a learner's config."""
        shared = ("world_size", "threads", "microbatch_tokens", "offload", "fsdp", "collective_timeout_s")
        return LearnerConfig(**{name: getattr(self, name) for name in shared})

    @model_validator(mode="after")
    def _is_frozen(self) -> RewardModelConfig:
        if self.model.lora.rank > 0:
            raise ValueError(f"reward_model.model.lora.rank={self.model.lora.rank}: the reward model is not trained here; leave it 0")
        return self

    @model_validator(mode="after")
    def _copies_are_even(self) -> RewardModelConfig:
        refuse_uneven_copies(self.fsdp, self.world_size)
        return self
