"""Policy losses per action token, before aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to [-20, 20] before exp: e^20 is far above any cap, and finite in every dtype but float16."""


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """Bounds of the ratio, [1 - low, 1 + high], and of the loss at negative advantage (`dual`; None: off)."""

    low: float
    high: float
    dual: float | None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """losses_A: f[A], with gradient. ratios_A: f[A], detached. Masks bool[A]: where a clip decided the loss."""

    losses_A: Tensor
    ratios_A: Tensor
    is_clipped_low_A: Tensor
    is_clipped_high_A: Tensor
    is_clipped_dual_A: Tensor


class PolicyLossFunction(Protocol):
    def __call__(self, policy_A: Tensor, proximal_A: Tensor, advantages_A: Tensor, *, clip: ClipConfig) -> PolicyLoss: ...


def ppo_clip(policy_A: Tensor, proximal_A: Tensor, advantages_A: Tensor, *, clip: ClipConfig) -> PolicyLoss:
    """Return max(-rho A, -clip(rho) A), where A < 0 at most -dual * A, with rho = exp(policy - proximal).

    Args:
        policy_A: f[A], log-probabilities of the current policy, with gradient.
        proximal_A: f[A], log-probabilities of the proximal policy; no gradient flows into it.
        advantages_A: f[A].

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2019, arXiv:1912.09729, eq. 5.
    """
    ratios = torch.exp((policy_A - proximal_A.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    plain = -ratios * advantages_A
    clipped = -ratios.clamp(1 - clip.low, 1 + clip.high) * advantages_A
    losses = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    is_negative = advantages_A < 0
    is_dual = torch.zeros_like(is_negative)
    if clip.dual is not None:
        bound = -clip.dual * advantages_A
        is_dual = is_negative & (losses > bound)
        losses = torch.where(is_negative, torch.minimum(losses, bound), losses)
    return PolicyLoss(losses, ratios.detach(), is_clipped & is_negative, is_clipped & ~is_negative, is_dual)


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = {"ppo_clip": ppo_clip}
"""Registered name (`algorithm.policy_loss`) -> loss."""
