"""Generalized advantage estimation: the estimators that need a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.advantages.scan import following, sums_to_go
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit, needed, repeat


def gae(batch: ActionBatch, options: AdvantageOptions) -> Credit:
    """Estimate advantages and returns over action tokens.

    d_t = r_t + gamma V_{t+} - V_t and A_t = d_t + gamma lam A_{t+}, where t+ is the next action token of the
    trajectory. So the value after a tool call bootstraps the last token before it. The value after the last
    token is 0, or `values_after_N` if the attempt was truncated and `bootstrap_truncated` is set. Returns are
    A_t + V_t.

    Reads: values_A, values_after_N; gamma, lam, bootstrap_truncated.
    Raises:
        ValueError: the batch lacks a column that the estimator reads.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    values = needed(batch.values_A, "gae", "values_A, a critic's estimate before each token")
    return _over(batch.rewards_A, values, batch.num_tokens_N, _last_values(batch, options, "gae"), options)


def gae_turn(batch: ActionBatch, options: AdvantageOptions) -> Credit:
    """Estimate advantages and returns over turns, equal for all tokens of a turn.

    The recursion of `gae` with one step per turn. The reward of a turn is the sum over its tokens, its value
    is the value before its first token, and gamma and lam apply per turn. Each token gets the return of its
    turn.

    Reads: values_A, values_after_N; gamma, lam, bootstrap_truncated.
    Raises:
        ValueError: the batch lacks a column that the estimator reads.
    Source: Zhou et al. 2024, arXiv:2402.19446, with the utterance as the action; the recursion is that of
    `gae`.
    """
    values = needed(batch.values_A, "gae_turn", "values_A, a critic's estimate before each token")
    lengths_K = batch.turns.lengths_K
    rewards_K = batch.turn_rewards_K
    values_K = values[lengths_K.cumsum(0) - lengths_K]
    credit_K = _over(
        rewards_K, values_K, batch.turns.counts_N, _last_values(batch, options, "gae_turn"), options
    )
    assert credit_K.returns_A is not None
    return Credit(repeat(credit_K.advantages_A, lengths_K), repeat(credit_K.returns_A, lengths_K))


def _over(
    rewards: Tensor, values: Tensor, lengths_N: Tensor, last_N: Tensor | None, options: AdvantageOptions
) -> Credit:
    # TD residuals d_t; the advantages are their sums discounted by gamma * lam (eq. 16).
    errors = rewards + options.gamma * following(values, lengths_N, last_N) - values
    advantages = sums_to_go(errors, lengths_N, options.gamma * options.lam)
    return Credit(advantages, advantages + values)


def _last_values(batch: ActionBatch, options: AdvantageOptions, estimator: str) -> Tensor | None:
    if not options.bootstrap_truncated or not bool(batch.is_truncated_N.any()):
        return None
    after = needed(
        batch.values_after_N,
        estimator,
        "values_after_N, a critic's estimate behind the last token of truncated attempts",
    )
    return torch.where(batch.is_truncated_N, after, 0.0)
