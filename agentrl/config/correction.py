"""Config of the off-policy correction: importance weights and rejection stages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section


class RejectionConfig(Section):
    """One stage of rejection: tokens whose statistic of log rho' (proximal / behavior) is out of bounds leave the loss."""

    statistic: Literal["k1", "k2", "k3"] = Field(
        "k1", description="k1: log rho', with bounds on rho' itself; k2: its square / 2; k3: rho' - 1 - log rho'; those know `upper` alone."
    )
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        "sequence_mean", description="What is judged: each token, or a whole sequence by the sum, the mean or the farthest of its tokens."
    )
    lower: float | None = Field(None, gt=0, description="Lowest rho' that is kept; None: no such bound.")
    upper: float | None = Field(None, gt=0, description="Highest rho' (k1) or statistic (k2, k3) that is kept; None: no such bound.")

    @model_validator(mode="after")
    def _has_bounds(self) -> RejectionConfig:
        if self.statistic != "k1" and self.lower is not None:
            raise ValueError(
                f"statistic={self.statistic} is never negative and has no lower bound (is {self.lower:g}); write `upper` alone"
            )
        if self.lower is None and self.upper is None:
            raise ValueError("a stage without lower and upper rejects nothing; write one of them")
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower={self.lower:g} is not below upper={self.upper:g}")
        return self


class CorrectionConfig(Section):
    """Off-policy correction: how much a token weighs, and which tokens leave the loss, by rho' = proximal / behavior."""

    weight: Literal["none", "token", "sequence", "geometric"] = Field(
        "token", description="Importance weight: rho' of the token, its product over the sequence, or its geometric mean there."
    )
    cap: float = Field(2.0, gt=0, description="Upper bound of the weight.")
    floor: float | None = Field(None, gt=0, description="Lower bound of the weight; None: none.")
    outside: Literal["truncate", "mask"] = Field("truncate", description="A weight out of bounds is cut to the bound, or 0 (IcePop).")
    self_normalize: bool = Field(False, description="Divide the weights by their mean over the accepted tokens of the whole update.")
    reject: dict[str, RejectionConfig] = Field({}, description="Name -> stage of rejection; a token must pass all of them.")
    m2po_threshold: float | None = Field(
        None,
        gt=0,
        description="Drop the largest (log rho')^2 until their mean over the update is at most this; last of the stages. None: off.",
    )
    opsm_delta: float | None = Field(
        None,
        gt=0,
        description="Leave a sequence of negative advantage out of the policy loss when its mean log(behavior / policy) is above, in nats; "
        "None: off.",
    )
    max_lag: int | None = Field(
        None,
        ge=0,
        description="Tokens older than so many versions leave the loss, the rest of their group stays; None: buffer.max_staleness alone.",
    )
    denominator: Literal["accepted", "original"] = Field(
        "accepted", description="Tokens that a mean over tokens counts: those in the loss, or all action tokens, rejected ones included."
    )

    @property
    def has_comparison(self) -> bool:
        """Whether a stage compares the learner at the start of the step with the behavior policy."""
        return bool(self.reject) or self.m2po_threshold is not None

    @model_validator(mode="after")
    def _has_a_band(self) -> CorrectionConfig:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"floor={self.floor:g} is not below cap={self.cap:g}")
        return self
