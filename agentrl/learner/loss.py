"""The loss of one scored microbatch: its part of the update's loss, and the sums that the metrics need.

A loss tokens of the microbatch; E loss tokens of its sequences that are in other microbatches. `behavior`,
`proximal`, `policy` and `ref` are log-probabilities, f[A].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.aggregation import Aggregation, UpdateCounts, token_scales
from agentrl.algorithms.corrections import CorrectionStatistics, correction_metrics, correction_statistics, log_products
from agentrl.algorithms.kl import KL_ESTIMATORS, off_policy_kl
from agentrl.algorithms.policy_losses import PolicyLoss, PolicyTokens, opsm_keeps
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.learner.batch import Correction, Elsewhere, Floats, Microbatch, Mode, ScoredMicrobatch
from agentrl.learner.model import Policy
from agentrl.learner.policy_loss import bind_policy_loss, sees_sequences
from agentrl.learner.spanning import Spanning

_CORRECTION = "correction/"
_REJECTED = "rejected/"
_ACTION_TOKENS = "action_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class LossPart:
    """One microbatch's part of the loss (with gradient), sums over its loss tokens, and maxima; 0-d, by name."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The loss tokens of a microbatch, on the device.

    Tokens outside the loss are absent instead of masked: no logits are computed for them. Otherwise an
    infinite logit times a mask of 0 would put NaN into the gradient.

    predictors, targets, sequence_ids: i64[A], see `Microbatch`.
    chosen: bool[all action tokens], True for the A loss tokens.
    ids_elsewhere: i64[E], sequences of the loss tokens in other microbatches.
    elsewhere: what is known of them; None if nothing was corrected.
    """

    predictors: Tensor
    targets: Tensor
    sequence_ids: Tensor
    chosen: Tensor
    ids_elsewhere: Tensor
    elsewhere: Elsewhere | None = None

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device, correction: Correction | None = None) -> LossTokens:
        """Return the tokens of the microbatch's loss_mask, or those that a correction accepted."""
        chosen = torch.tensor(microbatch.loss_mask if correction is None else correction.accepted)
        if correction is None:
            ids_elsewhere, elsewhere = _ids_elsewhere(microbatch), None
        else:
            elsewhere = correction.elsewhere
            ids_elsewhere = elsewhere.sequence_ids[elsewhere.accepted]

        def to_device(column: NDArray[np.int64]) -> Tensor:
            return torch.tensor(column)[chosen].to(device)

        predictors, targets = to_device(microbatch.predictor_positions), to_device(microbatch.targets)
        ids = to_device(microbatch.sequence_ids)
        return cls(predictors, targets, ids, chosen, torch.from_numpy(ids_elsewhere).to(device), elsewhere)

    def select(self, column: Floats, like: Tensor) -> Tensor:
        """Return f[A], the loss tokens of a column over all action tokens, in dtype and device of `like`."""
        return torch.tensor(column)[self.chosen].to(like)

    def whole_ids(self) -> Tensor:
        """Return i64[A + E], the sequence of each loss token here, then of those in other microbatches."""
        return torch.cat([self.sequence_ids, self.ids_elsewhere])

    def whole(self, own: Tensor, column: Floats | NDArray[np.bool_] | Tensor) -> Tensor:
        """Return f[A + E]: `own` (f[A]), then the loss tokens of a column of `elsewhere`."""
        assert self.elsewhere is not None
        return torch.cat([own, torch.as_tensor(column)[torch.from_numpy(self.elsewhere.accepted)].to(own)])


def _ids_elsewhere(microbatch: Microbatch) -> NDArray[np.int64]:
    num_sequences = len(microbatch.sample_indices)
    own = np.bincount(microbatch.sequence_ids[microbatch.loss_mask], minlength=num_sequences)
    return np.repeat(np.arange(num_sequences), microbatch.loss_lengths - own)


class PolicyObjective:
    """The decoupled, bypass or on-policy objective, with KL to the reference and an entropy bonus.

    Source: decoupled PPO: Hilton et al. 2021, arXiv:2110.00641.
    """

    def __init__(self, algorithm: AlgorithmConfig, mode: Mode, *, temperature: float) -> None:
        self._aggregation = Aggregation(algorithm.aggregation, algorithm.constant_length, algorithm.correction.denominator)
        self._policy_loss = bind_policy_loss(algorithm)
        self._algorithm = algorithm
        self._mode = mode
        self._temperature = temperature

    @property
    def needs_scores(self) -> bool:
        """Whether the ratio or rejection needs the policy's log-probabilities from the start of the step."""
        return self._mode == "decoupled" or (self._mode == "bypass" and self._algorithm.correction.has_comparison)

    @torch.no_grad()
    def logprobs_of_split_sequences(self, policy: Policy, minibatch: Sequence[ScoredMicrobatch]) -> list[Tensor | None]:
        """Return per microbatch the current policy's log-probabilities at the tokens of `elsewhere`, f64[E].

        A collective. None if no rank has such tokens, or if the loss of a token depends on that token alone;
        otherwise this costs one more forward.
        """
        nothing: list[Tensor | None] = [None for _ in minibatch]
        if not sees_sequences(self._algorithm):
            return nothing
        spanning = Spanning.find([scored.microbatch for scored in minibatch])
        if spanning.is_empty:
            return nothing
        devices = [policy.device] if policy.device.type == "cuda" else []
        # Restored afterwards, so the forward with gradient draws the same dropout.
        with torch.random.fork_rng(devices=devices):
            own = [self._logprobs(policy, scored.microbatch) for scored in minibatch]
        policy.reshard()
        return [table[:, 0] for table in spanning.gather(own)]

    def part(self, policy: Policy, scored: ScoredMicrobatch, counts: UpdateCounts, policy_elsewhere: Tensor | None = None) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts` describes.

        policy_elsewhere: f64[E] from `logprobs_of_split_sequences`, or None.
        """
        microbatch = scored.microbatch
        tokens = LossTokens.of(microbatch, policy.device, scored.correction)
        logprobs, entropies = policy.score(microbatch, tokens.predictors, tokens.targets, temperature=self._temperature)
        behavior = tokens.select(microbatch.behavior_logprobs, logprobs)
        proximal = self._proximal(scored, tokens, logprobs, behavior)
        weights = tokens.select(scored.correction.weights, logprobs)
        whole_scales = self._scales(scored, tokens, counts, dtype=logprobs.dtype)
        scales = whole_scales[: len(logprobs)]
        if policy_elsewhere is None:
            policy_tokens, whole_behavior = self._policy_tokens(scored, tokens, logprobs, proximal), behavior
            whole_weights = scales * weights
        else:
            policy_tokens = self._whole_tokens(scored, tokens, logprobs, proximal, policy_elsewhere)
            whole_behavior = tokens.whole(behavior, scored.correction.elsewhere.behavior_logprobs)
            whole_weights = whole_scales * tokens.whole(weights, scored.correction.elsewhere.weights)
        whole_loss = self._policy_loss(policy_tokens)
        kept = self._kept(policy_tokens, whole_behavior)
        kl = self._kl(scored, tokens, logprobs, proximal)

        terms = whole_weights * torch.where(kept, whole_loss.losses_A, 0.0)
        policy_part, others = terms[: len(logprobs)].sum(), terms[len(logprobs) :].sum()
        policy_loss, kept = whole_loss.first(len(logprobs)), kept[: len(logprobs)]
        # The tokens were sampled by the behavior policy, so the KL term is an expectation under it too and
        # needs the same importance weights as the policy term.
        kl_part = self._algorithm.kl.coefficient * (scales * weights * kl).sum()
        loss = policy_part + kl_part - self._algorithm.entropy_coefficient * (scales * entropies).sum()
        # A sequence-level loss of tokens elsewhere also depends on the tokens here. Its value is counted in
        # their own microbatch; add 0 with that gradient here. The gradients over all microbatches then sum to
        # the full one.
        loss = loss + (others - others.detach())
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

    def _logprobs(self, policy: Policy, microbatch: Microbatch) -> Tensor:
        predictors = torch.tensor(microbatch.predictor_positions, device=policy.device)
        targets = torch.tensor(microbatch.targets, device=policy.device)
        logprobs, _ = policy.score(microbatch, predictors, targets, temperature=self._temperature)
        return logprobs.cpu()[:, None]

    def _scales(self, scored: ScoredMicrobatch, tokens: LossTokens, counts: UpdateCounts, *, dtype: torch.dtype) -> Tensor:
        """Return f[A + E], the scale of each loss token here and in other microbatches."""
        original = np.concatenate([scored.microbatch.sequence_ids, scored.correction.elsewhere.sequence_ids])
        ids = tokens.whole_ids()
        return token_scales(self._aggregation, ids, counts, dtype=dtype, original_ids=torch.tensor(original).to(ids))

    def _proximal(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, behavior: Tensor) -> Tensor:
        if self._mode == "bypass":
            return behavior
        if self._mode == "on_policy":
            return logprobs.detach()  # the ratio is exactly 1, and its gradient is that of log policy
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

    def _whole_tokens(
        self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, proximal: Tensor, policy_elsewhere: Tensor
    ) -> PolicyTokens:
        own, elsewhere = self._policy_tokens(scored, tokens, logprobs, proximal), scored.correction.elsewhere
        is_selected = own.is_selected
        return PolicyTokens(
            policy=tokens.whole(own.policy, policy_elsewhere),
            proximal=tokens.whole(own.proximal, policy_elsewhere if self._mode == "on_policy" else elsewhere.proximal_logprobs),
            advantages=tokens.whole(own.advantages, elsewhere.advantages),
            sequence_ids=tokens.whole_ids(),
            is_selected=None if is_selected is None else tokens.whole(is_selected, elsewhere.is_selected),
        )

    def _kept(self, tokens: PolicyTokens, behavior: Tensor) -> Tensor:
        delta = self._algorithm.correction.opsm_delta
        return torch.ones_like(tokens.advantages, dtype=torch.bool) if delta is None else opsm_keeps(tokens, behavior, delta=delta)

    def _kl(self, scored: ScoredMicrobatch, tokens: LossTokens, logprobs: Tensor, proximal: Tensor) -> Tensor:
        if scored.ref_logprobs is None:
            return torch.zeros_like(logprobs)
        ref, name = tokens.select(scored.ref_logprobs, logprobs), self._algorithm.kl.estimator
        if self._algorithm.kl.off_policy_ratio:
            return off_policy_kl(name, logprobs, ref, proximal)
        return KL_ESTIMATORS[name](logprobs, ref)

    def _statistics(self, scored: ScoredMicrobatch, tokens: LossTokens, proximal: Tensor, behavior: Tensor) -> CorrectionStatistics:
        """Measure all scored action tokens. Over accepted tokens alone, rejection would look like agreement."""
        cap = self._algorithm.correction.cap
        if scored.proximal_logprobs is None:
            # The log product of a split sequence is not known here, since its other segments are in other
            # microbatches. Leave such sequences out.
            is_whole = ~torch.tensor(scored.microbatch.is_split, device=proximal.device)[tokens.sequence_ids]
            products = log_products((proximal - behavior).detach().double()[is_whole], tokens.sequence_ids[is_whole])
            return correction_statistics(proximal, behavior, products, cap=cap)
        columns = (scored.proximal_logprobs, scored.microbatch.behavior_logprobs, scored.correction.log_products)
        proximal, behavior, products = (torch.tensor(column, device=proximal.device) for column in columns)
        return correction_statistics(proximal, behavior, products, cap=cap)

    def _rejected(self, scored: ScoredMicrobatch, is_dropped: Tensor, *, like: Tensor) -> dict[str, Tensor]:
        """Return the number of rejected tokens by stage, and the number of all action tokens."""
        counts: dict[str, float] = dict(scored.correction.rejected)
        counts["all"] = scored.num_action_tokens - scored.num_loss_tokens
        if self._algorithm.correction.opsm_delta is not None:
            counts["opsm"] = float(is_dropped.sum())
        counts[_ACTION_TOKENS] = scored.num_action_tokens
        return {_REJECTED + name: like.new_tensor(float(count)) for name, count in counts.items()}


class SupervisedObjective:
    """Cross-entropy, averaged over all loss tokens of the update."""

    def part(self, policy: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts` describes."""
        tokens = LossTokens.of(microbatch, policy.device)
        logprobs, entropies = policy.score(microbatch, tokens.predictors, tokens.targets, temperature=1.0)
        scales = token_scales(Aggregation("token_mean"), tokens.sequence_ids, counts, dtype=logprobs.dtype)
        loss = -(scales * logprobs).sum()
        return LossPart(loss, {"loss": loss, "entropy": entropies.sum()}, {})


def finish_metrics(sums: Mapping[str, float], maxima: Mapping[str, float], *, num_tokens: int) -> dict[str, float]:
    """Turn global sums and maxima into metrics.

    The losses are already complete sums, rejected tokens become shares of all action tokens, and all other
    sums become means over loss tokens.
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
