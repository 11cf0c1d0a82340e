"""Config of the curriculum: which task is drawn next."""

from __future__ import annotations

import math

from pydantic import Field, field_validator

from agentrl.config.section import Section


class CurriculumConfig(Section):
    """Which task is drawn next. By default every task once per epoch, in the order of `data.shuffle`
    (docs/data.md).
    """

    source_weights: dict[str, float] = Field(
        {},
        description="`data_source: weight`, a share of the groups relative to the sum; every source of the "
        "training data needs one. {}: all tasks form one pool, and each source is drawn in "
        "proportion to its tasks.",
    )
    by_pass_rate: bool = Field(
        False,
        description="Draw tasks more often the closer the pass rate of their recent attempts is to "
        "`target_pass_rate`, after each task was drawn once.",
    )
    target_pass_rate: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Pass rate with weight 1. With 0.5, a pass rate p has weight 4 p (1 - p), the variance "
        "of a group's rewards.",
    )
    pass_rate_decay: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Weight that earlier attempts keep when the task's next group is complete; 0: only the "
        "newest group counts, 1: all groups count equally.",
    )
    floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Smallest weight; a task that always or never passes is drawn at least once in 2 / floor "
        "epochs.",
    )

    @property
    def is_used(self) -> bool:
        return bool(self.source_weights) or self.by_pass_rate

    @property
    def summary(self) -> str:
        """A description of the resulting order, in words."""
        parts = []
        if self.source_weights:
            total = sum(self.source_weights.values())
            parts.append(
                "groups from "
                + ", ".join(f"{name} {weight / total:.1%}" for name, weight in self.source_weights.items())
            )
        if self.by_pass_rate:
            parts.append(
                f"once each, then by pass rate: most often near {self.target_pass_rate:g}, other "
                f"tasks at least {self.floor:g} times as often"
            )
        return "; ".join(parts) or "every task once per epoch"

    @field_validator("source_weights")
    @classmethod
    def _weights_are_positive(cls, weights: dict[str, float]) -> dict[str, float]:
        for source, weight in weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(
                    f"data.curriculum.source_weights.{source}={weight:g} must be a positive "
                    "number; to leave a source out, remove its files from data.train_files"
                )
        return weights
