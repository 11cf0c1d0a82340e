"""Config of the algorithm: advantages, policy losses, the KL to a reference, and a teacher."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from agentrl.config.correction import CorrectionConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.config.estimators import GROUP as ESTIMATORS
from agentrl.config.estimators import Estimator, estimator_named
from agentrl.config.losses import GROUP as LOSSES
from agentrl.config.losses import Loss, loss_named
from agentrl.config.named_fields import NameIn
from agentrl.config.section import Section


class KLConfig(Section):
    """KL to the reference policy, in the loss or in the reward."""

    coefficient: float = Field(0.0, ge=0, description="0: no reference model is loaded.")
    place: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: a term of the loss; reward: taken from the reward of each action token, before "
        "advantages are estimated.",
    )
    estimator: Literal["k1", "k2", "k3", "abs", "k3_k2grad"] = Field(
        "k3_k2grad",
        description="Use k1 in the reward. k1 is refused in the loss, where its expected gradient is zero; "
        "in the reward, k3_k2grad equals k3.",
    )
    target: float | None = Field(
        None,
        gt=0,
        description="With place=reward: adapt the coefficient until the mean KL per action token reaches "
        "this value, in nats; None: fixed coefficient.",
    )
    horizon: int = Field(
        10000,
        ge=1,
        description="Number of trajectories over which the adapted coefficient can roughly double.",
    )
    off_policy_ratio: bool = Field(
        False,
        description="Multiply by the ratio policy / proximal, as if tokens were sampled from the current "
        "policy; this makes the gradient of k3 exact.",
    )

    @model_validator(mode="after")
    def _fits_its_place(self) -> KLConfig:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator=k1 in the loss has an expected gradient of zero; use k3_k2grad or k2, or "
                "place=reward"
            )
        if self.place == "loss" and self.target is not None:
            raise ValueError(
                f"target={self.target:g} adapts the coefficient of KL in the reward; use place=reward, or "
                "leave target out"
            )
        if self.target is not None and self.coefficient == 0:
            raise ValueError(
                f"target={self.target:g} cannot adapt a coefficient of 0; start with a coefficient above 0, "
                "such as 0.01"
            )
        return self


class ReinforceConfig(Section):
    """The importance weight of policy_loss=reinforce, made of the ratio policy / proximal."""

    weight: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="Ratio of the token, its product over the sequence, or its geometric mean over the "
        "sequence.",
    )
    cap: float | None = Field(None, gt=0, description="Upper bound of the weight; None: unbounded.")
    floor: float | None = Field(None, gt=0, description="Lower bound of the weight; None: unbounded.")
    outside: Literal["truncate", "mask"] = Field(
        "truncate", description="A weight outside the bounds is clamped to the bound, or set to 0 (IcePop)."
    )

    @model_validator(mode="after")
    def _has_a_band(self) -> ReinforceConfig:
        if self.floor is not None and self.cap is not None and self.floor >= self.cap:
            raise ValueError(f"floor={self.floor:g} is not below cap={self.cap:g}")
        return self


class SAPOConfig(Section):
    """Temperatures of the soft gate of policy_loss=sapo."""

    tau_positive: float = Field(1.0, gt=0, description="Temperature at positive advantage.")
    tau_negative: float = Field(
        1.05, gt=0, description="Temperature at negative advantage; a larger value fades faster."
    )


class ClipCovConfig(Section):
    """Which tokens policy_loss=clip_cov leaves out."""

    share: float = Field(
        2e-4, gt=0, lt=1, description="Share of the update's loss tokens to clip, at least one token."
    )
    lower: float = Field(1.0, description="Only tokens with a covariance above this value.")
    upper: float = Field(5.0, description="Only tokens with a covariance below this value.")


class KLCovConfig(Section):
    """Which tokens policy_loss=kl_cov holds back."""

    share: float = Field(
        2e-3,
        gt=0,
        lt=1,
        description="Share of the update's loss tokens to penalize, at least one: those with the largest "
        "covariance.",
    )
    coefficient: float = Field(1.0, gt=0, description="Weight of |log ratio| on these tokens.")


class DPPOConfig(Section):
    """The trust region of policy_loss=dppo_tv, in probability, and the bound of its ratio."""

    delta_low: float = Field(0.2, gt=0, le=1, description="Largest decrease of a token's probability.")
    delta_high: float = Field(0.2, gt=0, le=1, description="Largest increase of a token's probability.")
    cap: float | None = Field(
        20.0, gt=1, description="Upper bound of the ratio that weights a token; None: unbounded."
    )


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    advantage: Annotated[str, AfterValidator(NameIn("estimator", ESTIMATORS, takes_places=True))] = Field(
        "grpo", description="Advantage estimator (docs/algorithms.md)."
    )
    gamma: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Discount per action token (gae, reinforce_plus_plus) or per turn (gae_turn, turn_group, "
        "gigpo).",
    )
    lam: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Lambda of generalized advantage estimation, for estimators with a critic.",
    )
    bootstrap_truncated: bool = Field(
        False,
        description="With a critic: bootstrap a truncated attempt from the value of its end, instead of from "
        "0.",
    )
    singleton: Literal["zero", "raw"] = Field(
        "zero",
        description="Advantage of a group of one attempt, which has no baseline: zero, or raw, the unchanged "
        "reward.",
    )
    passk_k: int = Field(
        4,
        ge=1,
        description="k of pass_at_k: number of attempts of which at least one must be solved; at most "
        "rollout.group_size.",
    )
    solved_reward: float = Field(
        1.0, description="Lowest reward with which an attempt counts as solved, for pass_at_k."
    )
    step_weight: float = Field(
        1.0, ge=0, description="Weight of the step advantage, added to the episode's advantage, for gigpo."
    )
    segment_credit: Literal["all", "last"] = Field(
        "all",
        description="Tokens that get the advantages of an attempt with several segments (edited histories, "
        "restarts). all: those of every segment. last: those of the segment that began last; earlier ones "
        "get the advantage 0, and still count in means over tokens.",
    )
    conversation_credit: Literal["attempt", "own"] = Field(
        "attempt",
        description="Advantages of an attempt with several conversations (docs/agents.md). attempt: all "
        "tokens get those of the attempt, by the sum of all rewards. own: each conversation is credited "
        "as an attempt of its own, by the rewards on its own turns, and compared with those of the same "
        "name in the group.",
    )
    whiten: bool = Field(
        False,
        description="Finally whiten advantages over all action tokens of the batch; groups with equal "
        "rewards then no longer have advantage 0.",
    )
    policy_loss: Annotated[str, AfterValidator(NameIn("policy loss", LOSSES, takes_places=True))] = Field(
        "ppo_clip", description="Policy loss (docs/algorithms.md)."
    )
    loss_options: dict[str, Any] = Field({}, description="Keyword arguments of your own policy loss.")
    mode: Literal["auto", "decoupled", "bypass", "on_policy"] = Field(
        "auto",
        description="Where the proximal policy comes from; auto: on_policy when max_staleness=0 and one "
        "update per step, else decoupled.",
    )
    clip_low: float = Field(
        0.2,
        gt=0,
        le=1,
        description="The ratio is clipped below at 1 - clip_low (1: no clipping); gmpo: the log-ratio at "
        "-clip_low.",
    )
    clip_high: float = Field(
        0.2,
        gt=0,
        description="The ratio is clipped above at 1 + clip_high; gmpo: the log-ratio at clip_high.",
    )
    dual_clip: float | None = Field(
        3.0,
        gt=1,
        description="Bound of the loss at negative advantage, for ppo_clip and clip_cov; None: off.",
    )
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"] = (
        Field("token_mean", description="How token losses are aggregated into one number.")
    )
    constant_length: int | None = Field(
        None, ge=1, description="L_max of aggregation `constant`; None: agent.max_response_tokens."
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    distillation: DistillationConfig = DistillationConfig()
    reinforce: ReinforceConfig = ReinforceConfig()
    sapo: SAPOConfig = SAPOConfig()
    clip_cov: ClipCovConfig = ClipCovConfig()
    kl_cov: KLCovConfig = KLCovConfig()
    dppo_tv: DPPOConfig = DPPOConfig()

    @property
    def loss(self) -> Loss:
        return loss_named(self.policy_loss)

    @property
    def estimator(self) -> Estimator:
        return estimator_named(self.advantage)

    @model_validator(mode="after")
    def _fits_the_loss(self) -> AlgorithmConfig:
        if (objection := self.loss.objection(self)) is not None:
            raise ValueError(objection)
        self.loss.arguments(self)
        return self

    @model_validator(mode="after")
    def _can_credit_conversations(self) -> AlgorithmConfig:
        if self.conversation_credit == "attempt":
            return self
        if self.estimator.needs_whole_group:
            raise ValueError(
                f"conversation_credit=own, advantage={self.advantage}: it needs one value per attempt of a "
                "whole group, and not every attempt has every conversation; use grpo, rloo or another, or "
                "conversation_credit=attempt"
            )
        if self.bootstrap_truncated:
            raise ValueError(
                "conversation_credit=own, bootstrap_truncated=true: only one conversation of an attempt is "
                "cut off; use bootstrap_truncated=false"
            )
        return self
