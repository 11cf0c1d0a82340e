"""Off-policy correction: importance weights and statistics of the ratio of proximal to behavior policy.

rho' = proximal / behavior in this whole file, never its inverse. Rejection of tokens:
`agentrl.algorithms.rejection`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.log_ratios import bounded
from agentrl.algorithms.rules import WeightRule


def importance_weights(log_ratios: Tensor, sequence_ids: Tensor, rule: WeightRule) -> Tensor:
    """Return the weight of each token, f64[A].

    Args:
        log_ratios: f64[A], log rho' = proximal - behavior of all action tokens of a microbatch, without
            gradient.
        sequence_ids: i64[A], any labels. All tokens of a sequence must be in the same call.

    Source: Ionides 2008, "Truncated importance sampling"; per token, against the sampling server's
    log-probabilities: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; `mask`: Ling Team 2025 (IcePop), arXiv:2510.18855.
    """
    weights = raw_weights(log_ratios, sequence_ids, rule)
    low = 0.0 if rule.floor is None else rule.floor
    if rule.outside == "mask":
        return torch.where((weights >= low) & (weights <= rule.cap), weights, 0.0)
    return weights.clamp(min=low, max=rule.cap)


def raw_weights(log_ratios: Tensor, sequence_ids: Tensor, rule: WeightRule) -> Tensor:
    """Return the weights of `importance_weights` before `cap` and `floor`; only exp's argument is clamped."""
    return _bounded_exp(LEVELS[rule.level](log_ratios, sequence_ids))


def _per_sequence(log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
    index = torch.unique(sequence_ids, return_inverse=True)[1]
    return log_products(log_ratios, sequence_ids)[index]


def _geometric(log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
    _, index, lengths = torch.unique(sequence_ids, return_inverse=True, return_counts=True)
    return _per_sequence(log_ratios, sequence_ids) / lengths[index]


LEVELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratios, _: log_ratios,
    "sequence": _per_sequence,
    "geometric": _geometric,
}
"""Registered name (`algorithm.correction.weight`) -> the log of the raw weight of each token."""


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionStatistics:
    """Statistics to add (`sums`) or maximize (`maxima`) over microbatches and ranks; 0-d float64 tensors."""

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def log_products(log_ratios: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return f64[S], the sum of `log_ratios` (f64[A]) over each sequence; `sequence_ids` (i64[A]) are any
    labels.
    """
    labels, index = torch.unique(sequence_ids, return_inverse=True)
    return log_ratios.new_zeros(len(labels)).index_add_(0, index, log_ratios)


def correction_statistics(
    proximal_A: Tensor, behavior_A: Tensor, log_products_S: Tensor, *, cap: float
) -> CorrectionStatistics:
    """Compute what `correction_metrics` needs from the tokens of one microbatch, on untruncated weights.

    log_products_S: f64[S], log of the product of weights over each sequence (see `log_products`). Each
    sequence is passed in exactly one call.
    """
    log_ratios = (proximal_A - behavior_A).detach().double()
    weights = _bounded_exp(log_ratios)
    truncated = weights.clamp(max=cap)
    sequence_weights = _bounded_exp(log_products_S)
    sums = {
        "tokens": weights.new_tensor(len(weights)),
        "sequences": weights.new_tensor(len(log_products_S)),
        "behavior": behavior_A.double().sum(),
        "proximal": proximal_A.detach().double().sum(),
        "k3": (weights - 1 - log_ratios).sum(),
        "weight": weights.sum(),
        "weight_squared": weights.square().sum(),
        "truncated": truncated.sum(),
        "truncated_squared": truncated.square().sum(),
        "above_cap": (weights > cap).double().sum(),
        "sequence_weight_squared": sequence_weights.square().sum(),
    }
    return CorrectionStatistics(sums, {"weight": largest(weights)})


def correction_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Turn global sums and maxima of `correction_statistics` into metrics. All tokens of the update have
    equal weight.

    kl_*: KL(behavior || proximal) by the estimators k1 and k3.
    chi2_*: E[rho'^2] - 1 under the behavior policy, per token and per sequence (product of its weights).
    ess*: effective sample size as a share, (sum w)^2 / (n sum w^2) in (0, 1], of raw and truncated weights.
    """
    tokens, sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    behavior, proximal = sums["behavior"] / tokens, sums["proximal"] / tokens
    return {
        "kl_k1": behavior - proximal,
        "kl_k3": sums["k3"] / tokens,
        "chi2_token": sums["weight_squared"] / tokens - 1.0,
        "chi2_sequence": sums["sequence_weight_squared"] / sequences - 1.0,
        "ess": _effective_share(sums["weight"], sums["weight_squared"], tokens),
        "ess_truncated": _effective_share(sums["truncated"], sums["truncated_squared"], tokens),
        "weight_mean": sums["weight"] / tokens,
        "weight_max": maxima["weight"],
        "above_cap": sums["above_cap"] / tokens,
        "behavior_perplexity": _exp(-behavior),
        "proximal_perplexity": _exp(-proximal),
        "perplexity_ratio": _exp(behavior - proximal),
    }


def _bounded_exp(log_ratios: Tensor) -> Tensor:
    return torch.exp(bounded(log_ratios))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _effective_share(total: float, squares: float, count: float) -> float:
    return total * total / (count * squares) if squares > 0 else 1.0


def largest(values: Tensor) -> Tensor:
    """Return the maximum, 0-d; -inf without values."""
    return values.max() if len(values) else values.new_tensor(-math.inf)
