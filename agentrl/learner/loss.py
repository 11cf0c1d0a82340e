"""From one scored microbatch to its part of the update's loss, and what the metrics need of it.

A loss tokens of the microbatch. `behavior`, `proximal`, `policy` and `ref` are log-probabilities, f[A].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.aggregation import Aggregation, UpdateCounts, token_scales
from agentrl.algorithms.corrections import correction_metrics, correction_statistics, token_weights
from agentrl.algorithms.kl import KL_ESTIMATORS
from agentrl.algorithms.policy_losses import POLICY_LOSSES, ClipConfig
from agentrl.config.schema import AlgorithmConfig
from agentrl.learner.batch import Floats, Microbatch, ScoredMicrobatch
from agentrl.learner.model import Policy

Mode = Literal["decoupled", "bypass", "on_policy"]

_CORRECTION = "correction/"


@dataclass(frozen=True, slots=True, eq=False)
class LossPart:
    """One microbatch's part of the loss (with gradient), sums over its loss tokens, and maxima; 0-d tensors by name."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The loss tokens of a microbatch on the device. Tokens out of the loss are not masked but absent: no logits are computed for
    them, so whatever they hold (an infinite logit times 0 is NaN) cannot reach a gradient."""

    predictors: Tensor
    targets: Tensor
    sequence_ids: Tensor
    chosen: Tensor  # bool[all action tokens]

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device) -> LossTokens:
        chosen = torch.tensor(microbatch.loss_mask)

        def to_device(column: NDArray[np.int64]) -> Tensor:
            return torch.tensor(column)[chosen].to(device)

        return cls(to_device(microbatch.predictor_positions), to_device(microbatch.targets), to_device(microbatch.sequence_ids), chosen)

    def select(self, column: Floats, like: Tensor) -> Tensor:
        return torch.tensor(column)[self.chosen].to(like)


class PolicyObjective:
    """The decoupled, bypass or on-policy objective with KL to the reference and an entropy bonus."""

    def __init__(self, algorithm: AlgorithmConfig, mode: Mode, *, temperature: float) -> None:
        self._aggregation = Aggregation(algorithm.aggregation, algorithm.constant_length)
        self._policy_loss = POLICY_LOSSES[algorithm.policy_loss]
        self._clip = ClipConfig(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
        self._algorithm = algorithm
        self._mode = mode
        self._temperature = temperature

    def part(self, policy: Policy, scored: ScoredMicrobatch, counts: UpdateCounts) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts` describes."""
        microbatch = scored.microbatch
        tokens = LossTokens.of(microbatch, policy.device)
        logprobs, entropies = policy.score(microbatch, tokens.predictors, tokens.targets, temperature=self._temperature)
        behavior = tokens.select(microbatch.behavior_logprobs, logprobs)
        proximal = self._proximal(scored, tokens, logprobs, behavior)
        weights = self._weights(proximal, behavior)
        advantages = tokens.select(microbatch.advantages, logprobs)
        policy_loss = self._policy_loss(logprobs, proximal, advantages, clip=self._clip)
        kl = self._kl(scored, tokens, logprobs)

        scales = token_scales(self._aggregation, tokens.sequence_ids, counts, dtype=logprobs.dtype)
        policy_part = (scales * weights * policy_loss.losses_A).sum()
        # The tokens were sampled by the behavior policy: what corrects the policy term corrects an expectation over them here.
        kl_part = (scales * weights * kl).sum()
        loss = policy_part - self._algorithm.entropy_coefficient * (scales * entropies).sum()
        loss = loss + self._algorithm.kl.coefficient * kl_part
        mismatch = (logprobs.detach() - behavior).abs()
        correction = correction_statistics(proximal, behavior, tokens.sequence_ids, cap=self._algorithm.correction.cap)
        sums = {
            "loss": loss,
            "policy_loss": policy_part,
            "kl": kl.sum(),
            "entropy": entropies.sum(),
            "ppo_kl": (proximal - logprobs).sum(),
            "ratio_mean": policy_loss.ratios_A.sum(),
            "clip_low": policy_loss.is_clipped_low_A.sum(),
            "clip_high": policy_loss.is_clipped_high_A.sum(),
            "clip_dual": policy_loss.is_clipped_dual_A.sum(),
            "mismatch_mean": mismatch.sum(),
            **{_CORRECTION + name: value for name, value in correction.sums.items()},
        }
        maxima = {"ratio_max": _largest(policy_loss.ratios_A), "mismatch_max": _largest(mismatch)}
        maxima |= {_CORRECTION + name: value for name, value in correction.maxima.items()}
        return LossPart(loss, sums, maxima)

    def _proximal(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, behavior: Tensor) -> Tensor:
        if self._mode == "bypass":
            return behavior
        if self._mode == "on_policy":
            return logprobs.detach()  # the ratio is exactly 1, with the gradient of the policy
        assert scored.proximal_logprobs is not None, "mode decoupled updates on scored microbatches"
        return tokens.select(scored.proximal_logprobs, logprobs)

    def _weights(self, proximal: Tensor, behavior: Tensor) -> Tensor:
        if self._mode != "decoupled" or self._algorithm.correction.weight == "none":
            return torch.ones_like(proximal)
        return token_weights(proximal, behavior, cap=self._algorithm.correction.cap)

    def _kl(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor) -> Tensor:
        if scored.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        return KL_ESTIMATORS[self._algorithm.kl.estimator](logprobs, tokens.select(scored.ref_logprobs, logprobs))


class SupervisedObjective:
    """Cross-entropy of the loss tokens, averaged over all of the update."""

    def part(self, policy: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts` describes."""
        tokens = LossTokens.of(microbatch, policy.device)
        logprobs, entropies = policy.score(microbatch, tokens.predictors, tokens.targets, temperature=1.0)
        scales = token_scales(Aggregation("token_mean"), tokens.sequence_ids, counts, dtype=logprobs.dtype)
        loss = -(scales * logprobs).sum()
        return LossPart(loss, {"loss": loss, "entropy": entropies.sum()}, {})


def finish_metrics(sums: Mapping[str, float], maxima: Mapping[str, float], *, num_tokens: int) -> dict[str, float]:
    """Turn global sums and maxima into metrics. The losses are sums already; everything else is a mean over loss tokens."""
    metrics = {name: value if name in ("loss", "policy_loss") else value / num_tokens for name, value in _without_correction(sums).items()}
    metrics |= _without_correction(maxima)
    correction_sums = _only_correction(sums)
    if correction_sums:
        metrics |= {_CORRECTION + k: v for k, v in correction_metrics(correction_sums, _only_correction(maxima)).items()}
    return metrics


def _without_correction(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(_CORRECTION)}


def _only_correction(values: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(_CORRECTION): value for name, value in values.items() if name.startswith(_CORRECTION)}


def _largest(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_tensor(-torch.inf)
