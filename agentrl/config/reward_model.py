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
    """The reward model of a run: a role of its own, asked by the terms with `reward: reward_model` once per
    batch.
    """

    model: ModelConfig = ModelConfig()
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum conversation length in tokens; None: the number of positions of the model.",
    )
    overlong: Literal["truncate", "skip"] = Field(
        "truncate",
        description="What to do with a longer conversation: cut its beginning (share: "
        "`reward/<term>/truncated`), or do not apply the term to it (`reward/<term>/applied`).",
    )
    render: Literal["turns", "template"] = Field(
        "turns",
        description="The text that is scored. turns: as in `agentrl rm`, each turn as a model would have "
        "sampled it, up to the token that ends the last turn; template: the output of "
        "apply_chat_template, for models that were trained on it.",
    )
    world_size: int = Field(
        1, ge=1, description="Number of ranks over which weights and conversations are distributed."
    )
    threads: int = Field(1, ge=1, description="CPU threads of torch per rank.")
    microbatch_tokens: int = Field(
        16384,
        ge=1,
        description="Packed tokens per forward pass and rank; a longer conversation is processed alone.",
    )
    offload: Literal["none", "parameters"] = Field(
        "none", description="parameters: the weights are kept on the CPU between forward passes."
    )
    fsdp: FSDPConfig = FSDPConfig()
    collective_timeout_s: float = Field(
        300.0, gt=0, description="Deadline of a collective; when it passes, a rank counts as lost."
    )

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
            raise ValueError(
                f"reward_model.model.lora.rank={self.model.lora.rank}: the reward model is not trained in "
                "this run; use 0"
            )
        return self

    @model_validator(mode="after")
    def _copies_are_even(self) -> RewardModelConfig:
        refuse_uneven_copies(self.fsdp, self.world_size)
        return self
