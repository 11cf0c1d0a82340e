"""Config of the off-policy correction: importance weights and rejection stages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section


class RejectionConfig(Section):
    """One stage of rejection: tokens whose statistic of log rho' (proximal / behavior) is out of bounds leave
    the loss.
    """

    statistic: Literal["k1", "k2", "k3"] = Field(
        "k1",
        description="k1: log rho', with bounds on rho' itself; k2: its square / 2; k3: rho' - 1 - log rho'. "
        "k2 and k3 take only `upper`.",
    )
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        "sequence_mean",
        description="Unit of rejection: each token, or a whole sequence by the sum, mean or maximum over its "
        "tokens.",
    )
    lower: float | None = Field(None, gt=0, description="Lowest rho' that is kept; None: no lower bound.")
    upper: float | None = Field(
        None, gt=0, description="Highest rho' (k1) or statistic (k2, k3) that is kept; None: no upper bound."
    )

    @model_validator(mode="after")
    def _has_bounds(self) -> RejectionConfig:
        if self.statistic != "k1" and self.lower is not None:
            raise ValueError(
                f"statistic={self.statistic} is never negative and takes no lower bound "
                f"(lower={self.lower:g}); set only `upper`"
            )
        if self.lower is None and self.upper is None:
            raise ValueError("a stage without lower and upper rejects nothing; set at least one of them")
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower={self.lower:g} is not below upper={self.upper:g}")
        return self


class CorrectionConfig(Section):
    """Off-policy correction: how much a token weighs, and which tokens leave the loss, by rho' = proximal /
    behavior.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = Field(
        "token",
        description="Importance weight: rho' of the token, its product over the sequence, or its geometric "
        "mean over the sequence.",
    )
    cap: float = Field(2.0, gt=0, description="Upper bound of the weight.")
    floor: float | None = Field(None, gt=0, description="Lower bound of the weight; None: unbounded.")
    outside: Literal["truncate", "mask"] = Field(
        "truncate", description="A weight outside the bounds is clamped to the bound, or set to 0 (IcePop)."
    )
    self_normalize: bool = Field(
        False, description="Divide the weights by their mean over the accepted tokens of the whole update."
    )
    reject: dict[str, RejectionConfig] = Field(
        {}, description="Name -> rejection stage; a token must pass all stages."
    )
    m2po_threshold: float | None = Field(
        None,
        gt=0,
        description="Drop the tokens with the largest (log rho')^2 until the update's mean is at most this "
        "value; the last stage. None: off.",
    )
    opsm_delta: float | None = Field(
        None,
        gt=0,
        description="Leave a sequence with negative advantage out of the policy loss if its mean "
        "log(behavior / policy) exceeds this value, in nats; None: off.",
    )
    max_lag: int | None = Field(
        None,
        ge=0,
        description="Tokens older than this many versions are left out of the loss, while the rest of their "
        "group stays; None: only buffer.max_staleness applies.",
    )
    denominator: Literal["accepted", "original"] = Field(
        "accepted",
        description="Denominator of a mean over tokens: the tokens in the loss, or all action tokens, "
        "including rejected ones.",
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
