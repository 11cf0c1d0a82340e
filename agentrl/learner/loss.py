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
from agentrl.algorithms.corrections import CorrectionStatistics, correction_metrics, correction_statistics
from agentrl.algorithms.kl import KL_ESTIMATORS, off_policy_kl
from agentrl.algorithms.policy_losses import PolicyLoss, PolicyTokens, opsm_keeps
from agentrl.config.schema import AlgorithmConfig
from agentrl.learner.batch import Floats, Microbatch, ScoredMicrobatch
from agentrl.learner.model import Policy
from agentrl.learner.policy_loss import bind_policy_loss

Mode = Literal["decoupled", "bypass", "on_policy"]

_CORRECTION = "correction/"
_REJECTED = "rejected/"
_ACTION_TOKENS = "action_tokens"


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
    def of(cls, microbatch: Microbatch, device: torch.device, accepted: NDArray[np.bool_] | None = None) -> LossTokens:
        """Return the tokens of the microbatch's loss_mask, or those that a correction accepted."""
        chosen = torch.tensor(microbatch.loss_mask if accepted is None else accepted)

        def to_device(column: NDArray[np.int64]) -> Tensor:
            return torch.tensor(column)[chosen].to(device)

        return cls(to_device(microbatch.predictor_positions), to_device(microbatch.targets), to_device(microbatch.sequence_ids), chosen)

    def select(self, column: Floats, like: Tensor) -> Tensor:
        return torch.tensor(column)[self.chosen].to(like)


class PolicyObjective:
    """The decoupled, bypass or on-policy objective with KL to the reference and an entropy bonus."""

    def __init__(self, algorithm: AlgorithmConfig, mode: Mode, *, temperature: float) -> None:
        self._aggregation = Aggregation(algorithm.aggregation, algorithm.constant_length, algorithm.correction.denominator)
        self._policy_loss = bind_policy_loss(algorithm)
        self._algorithm = algorithm
        self._mode = mode
        self._temperature = temperature

    def part(self, policy: Policy, scored: ScoredMicrobatch, counts: UpdateCounts) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts` describes."""
        microbatch = scored.microbatch
        tokens = LossTokens.of(microbatch, policy.device, scored.correction.accepted)
        logprobs, entropies = policy.score(microbatch, tokens.predictors, tokens.targets, temperature=self._temperature)
        behavior = tokens.select(microbatch.behavior_logprobs, logprobs)
        proximal = self._proximal(scored, tokens, logprobs, behavior)
        weights = tokens.select(scored.correction.weights, logprobs)
        policy_tokens = self._policy_tokens(scored, tokens, logprobs, proximal)
        policy_loss = self._policy_loss(policy_tokens)
        kept = self._kept(policy_tokens)
        kl = self._kl(scored, tokens, logprobs, proximal)

        original_ids = torch.tensor(microbatch.sequence_ids, device=policy.device)
        scales = token_scales(self._aggregation, tokens.sequence_ids, counts, dtype=logprobs.dtype, original_ids=original_ids)
        policy_part = (scales * weights * torch.where(kept, policy_loss.losses_A, 0.0)).sum()
        # The tokens were sampled by the behavior policy: what corrects the policy term corrects an expectation over them here.
        kl_part = self._algorithm.kl.coefficient * (scales * weights * kl).sum()
        loss = policy_part + kl_part - self._algorithm.entropy_coefficient * (scales * entropies).sum()
        mismatch = (logprobs.detach() - behavior).abs()
        statistics = self._statistics(scored, tokens, proximal, behavior)
        sums = {
            "loss": loss,
            "policy_loss": policy_part,
            "kl": kl.sum(),
            "entropy": entropies.sum(),
            "ppo_kl": (proximal - logprobs).sum(),
            **_clip_sums(policy_loss),
            "mismatch_mean": mismatch.sum(),
            **_prefixed(statistics.sums),
            **self._rejected(scored, ~kept, like=logprobs),
        }
        maxima = {"ratio_max": _largest(policy_loss.ratios_A), "mismatch_max": _largest(mismatch), **_prefixed(statistics.maxima)}
        return LossPart(loss, sums, maxima)

    def _proximal(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, behavior: Tensor) -> Tensor:
        if self._mode == "bypass":
            return behavior
        if self._mode == "on_policy":
            return logprobs.detach()  # the ratio is exactly 1, with the gradient of the policy
        assert scored.proximal_logprobs is not None, "mode decoupled updates on scored microbatches"
        return tokens.select(scored.proximal_logprobs, logprobs)

    def _policy_tokens(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, proximal: Tensor) -> PolicyTokens:
        selected = scored.correction.is_selected
        return PolicyTokens(
            policy=logprobs,
            proximal=proximal,
            advantages=tokens.select(scored.microbatch.advantages, logprobs),
            sequence_ids=tokens.sequence_ids,
            is_selected=None if selected is None else torch.tensor(selected)[tokens.chosen].to(logprobs.device),
        )

    def _kept(self, tokens: PolicyTokens) -> Tensor:
        delta = self._algorithm.correction.opsm_delta
        return torch.ones_like(tokens.advantages, dtype=torch.bool) if delta is None else opsm_keeps(tokens, delta=delta)

    def _kl(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, proximal: Tensor) -> Tensor:
        if scored.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        ref, name = tokens.select(scored.ref_logprobs, logprobs), self._algorithm.kl.estimator
        if self._algorithm.kl.off_policy_ratio:
            return off_policy_kl(name, logprobs, ref, proximal)
        return KL_ESTIMATORS[name](logprobs, ref)

    def _statistics(self, scored: ScoredMicrobatch, tokens: LossTokens, proximal: Tensor, behavior: Tensor) -> CorrectionStatistics:
        """Measure all action tokens where they are scored: over the accepted ones alone, rejection would look like agreement."""
        cap = self._algorithm.correction.cap
        if self._mode != "decoupled":
            return correction_statistics(proximal, behavior, tokens.sequence_ids, cap=cap)
        columns = (scored.proximal_logprobs, scored.microbatch.behavior_logprobs, scored.microbatch.sequence_ids)
        proximal, behavior, ids = (torch.tensor(column, device=proximal.device) for column in columns)
        return correction_statistics(proximal, behavior, ids, cap=cap)

    def _rejected(self, scored: ScoredMicrobatch, is_dropped: Tensor, *, like: Tensor) -> dict[str, Tensor]:
        """Count tokens by stage, of all action tokens."""
        counts: dict[str, float] = dict(scored.correction.rejected)
        counts["all"] = scored.num_action_tokens - scored.num_loss_tokens
        if self._algorithm.correction.opsm_delta is not None:
            counts["opsm"] = float(is_dropped.sum())
        counts[_ACTION_TOKENS] = scored.num_action_tokens
        return {_REJECTED + name: like.new_tensor(float(count)) for name, count in counts.items()}


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
    """Turn global sums and maxima into metrics.

    The losses are sums already; what was rejected is a share of all action tokens; everything else is a mean over loss tokens.
    """
    own = _without(sums, _CORRECTION, _REJECTED)
    metrics = {name: value if name in ("loss", "policy_loss") else value / num_tokens for name, value in own.items()}
    metrics |= _without(maxima, _CORRECTION)
    correction_sums = _only(sums, _CORRECTION)
    if correction_sums:
        metrics |= {_CORRECTION + k: v for k, v in correction_metrics(correction_sums, _only(maxima, _CORRECTION)).items()}
    rejected = _only(sums, _REJECTED)
    if rejected:
        action_tokens = max(rejected.pop(_ACTION_TOKENS), 1.0)
        metrics |= {_CORRECTION + _REJECTED + stage: count / action_tokens for stage, count in rejected.items()}
    return metrics


def _prefixed(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_CORRECTION + name: value for name, value in values.items()}


def _without(values: Mapping[str, float], *prefixes: str) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(prefixes)}


def _only(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _clip_sums(loss: PolicyLoss) -> dict[str, Tensor]:
    return {
        "ratio_mean": loss.ratios_A.sum(),
        "clip_low": loss.is_clipped_low_A.sum(),
        "clip_high": loss.is_clipped_high_A.sum(),
        "clip_dual": loss.is_clipped_dual_A.sum(),
    }


def _largest(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_tensor(-torch.inf)
