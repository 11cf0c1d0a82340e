"""Advantage estimators over compact trajectories: context tokens do not exist here, so they neither discount nor earn.

An estimator gets one number per trajectory and says one; the caller lays it on the trajectory's action tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]

_STD_EPS = 1e-6  # DeepSeekMath, arXiv:2402.03300: keeps groups of nearly equal rewards finite


def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Normalise each reward by the mean and the standard deviation (Bessel) of its group.

    A group of one, or of equal rewards, says nothing about which attempt was better: its advantages are exactly 0.

    Args:
        rewards: f[N], outcome reward of each trajectory.
        group_ids: i64[N], equal for trajectories of one group; any order.

    Returns:
        f[N], dtype of `rewards`.

    Raises:
        ValueError: the shapes differ, or a reward is not finite.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    groups = _Groups(rewards, group_ids)
    deviations = rewards - groups.means()[groups.index]
    variances = groups.sums(deviations.square()) / (groups.sizes - 1).clamp(min=1)
    advantages = deviations / (variances.sqrt() + _STD_EPS)[groups.index]
    return torch.where(groups.is_constant()[groups.index], 0.0, advantages)


ESTIMATORS: Mapping[str, Estimator] = {"grpo": grpo}
"""Registered name (`algorithm.advantage`) -> estimator."""


class _Groups:
    """Sums over groups by a dense index."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        if rewards.shape != group_ids.shape or rewards.ndim != 1:
            raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be two vectors of one length")
        if not bool(torch.isfinite(rewards).all()):
            raise ValueError(f"reward {rewards[~torch.isfinite(rewards)][0].item()} is not finite")
        self.rewards = rewards
        ids, self.index = torch.unique(group_ids, return_inverse=True)
        self.count = len(ids)
        self.sizes = torch.bincount(self.index, minlength=self.count).to(rewards.dtype)

    def sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add_(0, self.index, values)

    def means(self) -> Tensor:
        return self.sums(self.rewards) / self.sizes

    def is_constant(self) -> Tensor:
        # By extremes, not by the variance: the mean of equal rewards such as 0.1 may differ from them in the last bit,
        # and dividing that bit by a tiny std would make noise of size one out of nothing.
        low = self.rewards.new_full((self.count,), float("inf")).scatter_reduce(0, self.index, self.rewards, "amin")
        high = self.rewards.new_full((self.count,), float("-inf")).scatter_reduce(0, self.index, self.rewards, "amax")
        return low == high
