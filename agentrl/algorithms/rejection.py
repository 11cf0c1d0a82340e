"""Rejection: which tokens the off-policy correction keeps in the loss.

It changes the loss mask, never a reward or an advantage. rho' = proximal / behavior in this whole file;
bounds apply to rho', never to its inverse. Log-ratios are f64[A] of all action tokens of one microbatch.
`sequence_ids` (i64[A], any labels) group the tokens by sequence; all tokens of a sequence must be in the same
call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.log_ratios import bounded


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Keep a token iff lower <= statistic <= upper; None: no such bound.

    statistic: k1 is log rho', and its bounds are given as rho'. k2 and k3 are never negative and have an
    upper bound only.
    level: `token` tests each token alone. `sequence_sum`, `sequence_mean` and `sequence_max` (the most
    extreme token) keep or reject all tokens of a sequence together.
    """

    statistic: str
    level: str
    lower: float | None
    upper: float | None


def accepts(log_ratios: Tensor, sequence_ids: Tensor, rule: RejectionRule) -> Tensor:
    """Return bool[A], True where the token is kept. A NaN log-ratio is always rejected.

    Source: Liu et al. 2025, "When speed kills stability" (sequence and geometric masks); k1 to k3: Schulman
    2020.
    """
    values = STATISTICS[rule.statistic](log_ratios)
    in_logs = rule.statistic == "k1"
    low, high = (
        None if bound is None else math.log(bound) if in_logs else bound for bound in (rule.lower, rule.upper)
    )
    if rule.level == "token":
        return _within(values, low, high)
    if rule.level == "sequence_max":
        return _all_of_sequence(_within(values, low, high), sequence_ids)
    return _within(_per_sequence(values, sequence_ids, is_mean=rule.level == "sequence_mean"), low, high)


def k1(log_ratios: Tensor) -> Tensor:
    """Return log rho'."""
    return log_ratios


def k2(log_ratios: Tensor) -> Tensor:
    """Return half the squared log rho'."""
    return log_ratios.square() / 2


def k3(log_ratios: Tensor) -> Tensor:
    """Return rho' - 1 - log rho', an estimate of KL(behavior || proximal)."""
    return torch.exp(bounded(log_ratios)) - 1 - log_ratios


STATISTICS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Registered name (`algorithm.correction.reject.<name>.statistic`) -> statistic per token."""


def second_moment_cut(squares: Tensor, threshold: float) -> float:
    """Drop the largest values until the mean of the rest is at most `threshold`; return the largest one kept.

    Returns -inf if none may remain. Equal values are kept or dropped together, so the result does not depend
    on the order of the batch.

    Args:
        squares: f64[N], (behavior - proximal)^2 of all tokens of the update, in any order.

    Source: Zheng et al. 2025 (M2PO), arXiv:2510.01161.
    """
    ordered, _ = torch.sort(torch.where(torch.isnan(squares), torch.inf, squares))
    means = torch.cumsum(ordered, 0) / torch.arange(1, len(ordered) + 1, dtype=ordered.dtype)
    # Cut only between different values, so that equal ones stay together.
    is_last_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    is_last_of_equals[:-1] = ordered[1:] != ordered[:-1]
    # Running means of sorted values are non-decreasing, so the values that fit form a prefix.
    fits = ordered[(means <= threshold) & is_last_of_equals]
    return float(fits[-1]) if len(fits) else -math.inf


def _within(values: Tensor, low: float | None, high: float | None) -> Tensor:
    kept = ~torch.isnan(values)
    if low is not None:
        kept &= values >= low
    if high is not None:
        kept &= values <= high
    return kept


def _per_sequence(values: Tensor, sequence_ids: Tensor, *, is_mean: bool) -> Tensor:
    labels, index, lengths = torch.unique(sequence_ids, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(labels)).index_add_(0, index, values)
    return (sums / lengths if is_mean else sums)[index]


def _all_of_sequence(kept: Tensor, sequence_ids: Tensor) -> Tensor:
    labels, index = torch.unique(sequence_ids, return_inverse=True)
    return (kept.new_zeros(len(labels), dtype=torch.int64).index_add_(0, index, (~kept).long()) == 0)[index]
