"""The critic's loss: squared error of values and returns per action token, before aggregation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-12
"""A variance of returns below this share of their mean square is only rounding noise."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueLoss:
    """Loss and clip mask per token.

    losses_A: f[A], with gradient. is_clipped_A: bool[A], True where the clip determined the loss.
    """

    losses_A: Tensor
    is_clipped_A: Tensor


def value_loss(
    values_A: Tensor, old_values_A: Tensor, returns_A: Tensor, *, cliprange: float | None
) -> ValueLoss:
    """Return (V - R)^2 / 2; with clipping, the larger of it and (clip(V, V_old - c, V_old + c) - R)^2 / 2.

    A value further than c from V_old therefore has no gradient, unless its gradient leads back.

    Args:
        values_A: f[A], with gradient, in the reward's unit.
        old_values_A: f[A], of the critic at the start of the step.
        returns_A: f[A], the regression targets.
        cliprange: c > 0 in the reward's unit; None: no clipping.

    Source: Schulman et al. 2017, OpenAI Baselines PPO2; Huang et al. 2022, "The 37 implementation details of
    PPO", detail 9.
    """
    plain = (values_A - returns_A).square() / 2
    if cliprange is None:
        return ValueLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
    moved = values_A - old_values_A
    # Within the bound use the value itself: old + (value - old) differs by rounding, and noise would decide
    # what counts as clipped.
    bounded = torch.where(
        moved.abs() <= cliprange, values_A, old_values_A + moved.detach().clamp(-cliprange, cliprange)
    )
    clipped = (bounded - returns_A).square() / 2
    return ValueLoss(torch.maximum(plain, clipped), clipped.detach() > plain.detach())


def value_moments(values_A: Tensor, returns_A: Tensor) -> dict[str, Tensor]:
    """Return the sums over tokens that `explained_variance` needs, 0-d float64.

    They add up over microbatches and ranks.
    """
    returns = returns_A.detach().double()
    errors = returns - values_A.detach().double()
    return {
        "error_mean": errors.sum(),
        "error_square": errors.square().sum(),
        "return_mean": returns.sum(),
        "return_square": returns.square().sum(),
    }


def explained_variance(
    *, error_mean: float, error_square: float, return_mean: float, return_square: float
) -> float:
    """Return 1 - Var(R - V) / Var(R) from means over all tokens.

    1 is perfect, 0 is no better than a constant. NaN if R is constant.
    """
    variance = return_square - return_mean**2
    # For equal returns E[R^2] - E[R]^2 is not exactly 0 but rounding error.
    if variance <= ROUNDING * return_square:
        return math.nan
    return 1.0 - (error_square - error_mean**2) / variance
