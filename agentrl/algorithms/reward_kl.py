"""KL penalty in the reward: each action token pays for diverging from the reference.

The penalty is applied before advantages are estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algorithms.compact import ActionBatch, TokenRewards
from agentrl.algorithms.kl import KL_ESTIMATORS, KLEstimator, k1

REWARD_KL_ESTIMATORS: Mapping[str, KLEstimator] = {"k1": k1, **KL_ESTIMATORS}
"""Registered name (`algorithm.kl.estimator`) -> estimator usable in the reward."""

ERROR_LIMIT = 0.2
"""Bound on the relative error in one adaptation: a single unusual batch must not change the coefficient
much.
"""


def penalize(batch: ActionBatch, kl_A: Tensor, *, coefficient: float) -> ActionBatch:
    """Return the batch with rewards r_t - coefficient * kl_t on every action token.

    This includes tokens that are later masked out of the loss.

    Args:
        kl_A: f[A], an estimate of KL(policy || ref) per token, in nats, such as `kl.k1` of the
            log-probabilities at the step's start.
        coefficient: at least 0; 0 changes nothing.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    return batch.with_rewards(batch.rewards_A - coefficient * kl_A.to(batch.rewards_A.dtype))


def penalize_turns(batch: ActionBatch, kl_K: Tensor, *, coefficient: float) -> ActionBatch:
    """Return the batch with the penalty of each turn on the turn's last token.

    It has the same rewards per turn and per trajectory as `penalize`, without a number per token.

    Args:
        kl_K: f[K], the sum of `penalize`'s kl_A over the tokens of each turn.
    """
    rewards, last_K = batch.rewards, batch.turns.lengths_K.cumsum(0) - 1
    tokens = torch.cat([rewards.tokens_E, last_K])
    values = torch.cat([rewards.values_E, -coefficient * kl_K.to(rewards.values_E.dtype)])
    order = torch.argsort(tokens, stable=True)
    return replace(batch, rewards=TokenRewards(tokens[order], values[order]))


def adapt_coefficient(
    coefficient: float, kl: float, *, target: float, num_sequences: int, horizon: int
) -> float:
    """Return coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon).

    Call it after each batch; not for a fixed coefficient.

    Args:
        kl: batch mean of the KL that `target` refers to (per token, or summed per sequence), in nats.
        target: > 0. horizon: sequences in which the coefficient changes by a factor of at most about e^0.2 =
            1.2, > 0.

    Raises:
        ValueError: target or horizon is not positive.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(
            f"an adaptive KL coefficient needs target > 0 and horizon > 0; got target={target:g}, "
            f"horizon={horizon}"
        )
    error = min(max(kl / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * (1.0 + error * num_sequences / horizon)
