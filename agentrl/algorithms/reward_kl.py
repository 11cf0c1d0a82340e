"""KL to the reference in the reward: each action token pays for going astray, before any advantage is estimated."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from agentrl.algorithms.compact import ActionBatch

ERROR_LIMIT = 0.2
"""Largest relative error the coefficient answers to at once: one odd batch must not throw it off."""


def penalize(batch: ActionBatch, kl_A: Tensor, *, coefficient: float) -> ActionBatch:
    """Return the batch with r_t - coefficient * kl_t on every action token, whatever the loss will make of the token.

    Args:
        kl_A: f[A], an estimate of KL(policy || ref) per token, in nats, such as `kl.k1` of the log-probabilities at the step's start.
        coefficient: at least 0; 0 changes nothing.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    return replace(batch, rewards_A=batch.rewards_A - coefficient * kl_A.to(batch.rewards_A.dtype))


def adapt_coefficient(coefficient: float, kl: float, *, target: float, num_sequences: int, horizon: int) -> float:
    """Return the coefficient after a batch: times 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon.

    A fixed coefficient is one that is never passed through here.

    Args:
        kl: mean over the batch of the KL that `target` is meant for (per token, or summed per sequence), in nats.
        target: > 0. horizon: sequences in which the coefficient may about double, > 0.

    Raises:
        ValueError: target or horizon is not positive.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"an adaptive KL coefficient needs target > 0 and horizon > 0; got target={target:g}, horizon={horizon}")
    error = min(max(kl / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * (1.0 + error * num_sequences / horizon)
