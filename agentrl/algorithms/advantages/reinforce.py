"""Estimators of the REINFORCE family, and the whitening shared with PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.advantages.groups import Groups
from agentrl.algorithms.advantages.scan import sums_to_go
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit, needed

VARIANCE_EPS = 1e-8


def whiten(values_A: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8), var with Bessel's correction; equal values become exactly 0.

    The statistics must be over all action tokens of the global batch. Per rank or microbatch, each would use
    a different estimator.
    """
    if not len(values_A) or bool(values_A.min() == values_A.max()):
        return torch.zeros_like(values_A)
    return (values_A - values_A.mean()) / (values_A.var() + VARIANCE_EPS).sqrt()


def reinforce_plus_plus(batch: ActionBatch, options: AdvantageOptions) -> Credit:
    """A_t = whitened G_t, with G_t = r_t + gamma G_{t+} over action tokens.

    It needs neither groups nor a critic. G does not reset at tool calls.

    Reads: gamma.
    Source: Hu 2025, arXiv:2501.03262.
    """
    return Credit(whiten(sums_to_go(batch.rewards_A, batch.num_tokens_N, options.gamma)))


def reinforce_plus_plus_baseline(batch: ActionBatch, options: AdvantageOptions) -> Credit:
    """A_t = whitened (R_i - mean_G), over the tokens of the batch; groups of equal outcomes are reset to 0.

    Long failures pull the mean over tokens below 0. Without the reset, whitening would push groups that carry
    no signal up or down.

    Reads: singleton.
    Source: Hu 2025, arXiv:2501.03262, the variant with a group baseline.
    """
    groups = Groups.of(batch)
    whitened_A = whiten(batch.over_tokens(groups.settle(groups.deviations, singleton=options.singleton)))
    is_silent = (
        groups.is_constant if options.singleton == "zero" else groups.is_constant & (groups.sizes_N > 1)
    )
    return Credit(torch.where(batch.over_tokens(torch.from_numpy(is_silent)), 0.0, whitened_A))


def remax(batch: ActionBatch, options: AdvantageOptions) -> Credit:
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
    return Credit(batch.over_tokens(batch.outcomes_N - greedy))
