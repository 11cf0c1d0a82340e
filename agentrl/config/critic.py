"""Config of PPO's value model."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.learner import OptimizerConfig
from agentrl.config.model import LoRAConfig
from agentrl.config.section import Section


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule, of the critic."""

    lr: float = Field(
        1e-5, gt=0, description="Peak learning rate; a critic takes a larger one than the policy."
    )


class CriticModelConfig(Section):
    """What the critic starts from; everything else is as in `model`."""

    path: str | None = Field(
        None,
        description="Folder or hub id: a causal model gets a value head initialized to 0, a sequence "
        "classifier (such as one trained by `agentrl rm`) keeps its head; None: model.path.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id; None: its main branch."
    )
    lora: LoRAConfig = LoRAConfig()


class CriticConfig(Section):
    """The value model of PPO: its own weights and optimizer; `learner` says how it is spread and packed."""

    enabled: bool | None = Field(
        None,
        description="None: enabled if algorithm.advantage is gae or gae_turn; true: for your own estimator "
        "that reads values.",
    )
    model: CriticModelConfig = CriticModelConfig()
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    cliprange_value: float | None = Field(
        0.5,
        gt=0,
        description="Clip range of the value per step, in the reward's unit; None: plain squared error.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Number of first steps in which only the critic learns and the policy does not change.",
    )
    epochs_per_step: int | None = Field(
        None, ge=1, description="Passes of the critic over each batch; None: learner.epochs_per_step."
    )
