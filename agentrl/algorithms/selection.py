"""Token selection of Clip-Cov and KL-Cov: tokens by the covariance of log-probability and advantage.

The papers select by the current policy within one mini-batch on one device. Here tokens are selected once,
before the update. The log-probabilities are those of the proximal policy (of the behavior policy if there is
no other), and the sums and order statistics are over ALL microbatches and ranks. The first update therefore
selects as in the papers, and neither packing nor the number of ranks changes the selection. Attempts at one
task often begin with the same tokens, so equal covariances are common, and rounding noise must not choose
among them.

Source: Cui et al. 2025, arXiv:2505.22617.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.log_ratios import ROUNDING, off_rounding


def covariances(
    logprobs: Tensor, advantages: Tensor, *, mean_logprob: float, mean_advantage: float
) -> Tensor:
    """Return (log p - mean log p)(A - mean A), f64[A], in multiples of ROUNDING.

    The means are over all loss tokens of the update.
    """
    return off_rounding((logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage))


def largest_first(covariances_A: Tensor, fair_keys_A: Tensor) -> Tensor:
    """Return f64[A], sort keys: the largest covariance has the smallest key; fair keys in [0, 1) break
    ties.
    """
    return fair_keys_A - torch.round(covariances_A / ROUNDING)


def num_selected(share: float, num_tokens: int) -> int:
    """Return how many of `num_tokens` loss tokens to select for a share: rounded down, but at least one."""
    return min(num_tokens, max(1, math.floor(share * num_tokens)))


def smallest_cut(keys: Tensor, count: int) -> float:
    """Return the (count + 1)-th smallest of `keys` (f64[N], of all ranks). Smaller keys are selected.

    Returns inf if there are at most `count` keys. Ties at the bound are all excluded, so the order of the
    batch does not matter.
    """
    if count >= len(keys):
        return math.inf
    return float(torch.sort(keys).values[count])


def fair_keys(
    sample_indices: NDArray[np.int64], places: NDArray[np.int64], token_ids: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return f64[A], one pseudo-random number in [0, 1) per token that depends only on the token's identity.

    Args:
        sample_indices: i64[A], index of the token's sequence in the batch.
        places: i64[A], index of the token among the action tokens of its sequence.
        token_ids: i64[A].

    The mixer is the finalizer of SplitMix64 (Steele et al. 2014).
    """
    state = np.zeros(len(token_ids), np.uint64)
    with np.errstate(over="ignore"):
        for column in (sample_indices, places, token_ids):
            state = _mix(state + column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
