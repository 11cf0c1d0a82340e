"""Estimators of the REINFORCE family, and the whitening shared with PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.advantages.groups import Groups
from agentrl.algorithms.advantages.scan import sums_to_go
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit, RunCredit, needed

VARIANCE_EPS = 1e-8


def whiten(values_R: Tensor, lengths_R: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8), var with Bessel's correction; equal values become exactly 0.

    The statistics must be over all action tokens of the global batch. Per rank or microbatch, each would use
    a different estimator.

    Args:
        values_R: f[R], one per token or, with `lengths_R` (i64[R]), one per run of tokens.
    """
    if lengths_R is None:
        if not len(values_R) or bool(values_R.min() == values_R.max()):
            return torch.zeros_like(values_R)
        return (values_R - values_R.mean()) / (values_R.var() + VARIANCE_EPS).sqrt()
    present_R = values_R[lengths_R > 0]
    if not len(present_R) or bool(present_R.min() == present_R.max()):
        return torch.zeros_like(values_R)
    num_tokens = lengths_R.sum()
    deviations_R = values_R - (lengths_R * values_R).sum() / num_tokens
    variance = (lengths_R * deviations_R**2).sum() / (num_tokens - 1)
    return deviations_R / (variance + VARIANCE_EPS).sqrt()


def reinforce_plus_plus(batch: ActionBatch, options: AdvantageOptions) -> Credit | RunCredit:
    """A_t = whitened G_t, with G_t = r_t + gamma G_{t+} over action tokens.

    It needs neither groups nor a critic. G does not reset at tool calls.

    Reads: gamma.
    Source: Hu 2025, arXiv:2501.03262.
    """
    if options.gamma < 1:
        return Credit(whiten(sums_to_go(batch.rewards_A, batch.num_tokens_N, options.gamma)))
    # Without discount, G changes only behind a reward.
    lengths_R, counts_N = _runs_between_rewards(batch)
    returns_R = sums_to_go(batch.rewards.sums(lengths_R), counts_N, 1.0)
    return RunCredit(whiten(returns_R, lengths_R), lengths_R)


def _runs_between_rewards(batch: ActionBatch) -> tuple[Tensor, Tensor]:
    """Cut each trajectory behind its rewards. Return the runs' lengths, i64[R], and numbers, i64[N]."""
    ends_N = batch.num_tokens_N.cumsum(0)
    cuts = torch.unique(torch.cat([batch.rewards.tokens_E + 1, ends_N]))
    counts_N = torch.bincount(torch.searchsorted(ends_N, cuts), minlength=len(ends_N))
    return torch.diff(cuts, prepend=cuts.new_zeros(1)), counts_N


def reinforce_plus_plus_baseline(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_t = whitened (R_i - mean_G), over the tokens of the batch; groups of equal outcomes are reset to 0.

    Long failures pull the mean over tokens below 0. Without the reset, whitening would push groups that carry
    no signal up or down.

    Reads: singleton.
    Source: Hu 2025, arXiv:2501.03262, the variant with a group baseline.
    """
    groups = Groups.of(batch)
    settled_N = groups.settle(groups.deviations, singleton=options.singleton)
    whitened_N = whiten(settled_N, batch.num_tokens_N)
    is_silent = (
        groups.is_constant if options.singleton == "zero" else groups.is_constant & (groups.sizes_N > 1)
    )
    return RunCredit(torch.where(torch.from_numpy(is_silent), 0.0, whitened_N), batch.num_tokens_N)


def remax(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = R_i - R(greedy), the outcome of a greedy attempt at the same task by the same version of the
    policy.

    Reads: greedy_rewards_N.
    Raises:
        ValueError: the batch has no greedy rewards.
    Source: Li et al. 2023, arXiv:2310.10505.
    """
    greedy = needed(
        batch.greedy_rewards_N, "remax", "greedy_rewards_N, the reward of a greedy attempt at each task"
    )
    return RunCredit(batch.outcomes_N - greedy, batch.num_tokens_N)
