"""Estimators that compare the attempts of a group by outcome: one advantage per trajectory.

All action tokens of a trajectory get its advantage. R_i is the total reward of trajectory i, n the size of
its group. For every estimator, a group of equal outcomes has advantage exactly 0, and a group of one has 0
or, with `singleton: raw`, R_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, RunCredit

Floats = NDArray[np.floating]

STD_EPS = 1e-6
"""Keeps the advantages of nearly equal outcomes finite; the usual value in GRPO implementations."""
MEAN_EPS = 1e-6
ROUNDING_ULPS = 16
"""Outcomes that differ by at most this many ulps of the batch's largest outcome are equal."""


class Groups:
    """Values and their groups. Every result is per member, f[N], so formulas read as in the papers.

    NumPy rather than torch: on a few hundred numbers its operations take a third of the time.
    """

    def __init__(self, values_N: Tensor, labels: Sequence[Tensor]) -> None:
        """`labels`: one or more i64[N]; two members share a group if they agree in all of them."""
        self.values_N: Floats = values_N.numpy()
        self.index_N = _places(labels[0].numpy())
        for label_N in labels[1:]:
            # One number per combination of labels: indices are below len(label_N).
            self.index_N = _places(self.index_N * len(label_N) + _places(label_N.numpy()))
        sizes = np.bincount(self.index_N)
        self.count = len(sizes)
        self.sizes_N: Floats = sizes[self.index_N].astype(self.values_N.dtype)
        self._order = self.index_N.argsort(kind="stable")
        self._starts = sizes.cumsum() - sizes

    @classmethod
    def of(cls, batch: ActionBatch) -> Groups:
        """Group the outcomes of the batch's trajectories."""
        return cls(batch.outcomes_N, [batch.group_N])

    def sums(self, values_N: Floats) -> Floats:
        return self._over_groups(np.add, values_N)

    def maxima(self, values_N: Floats) -> Floats:
        return self._over_groups(np.maximum, values_N)

    def minima(self, values_N: Floats) -> Floats:
        return self._over_groups(np.minimum, values_N)

    def _over_groups(self, operation: np.ufunc, values_N: Floats) -> Floats:
        if not self.count:  # reduceat fails on empty arrays
            return values_N
        members: Floats = operation.reduceat(values_N[self._order], self._starts)
        return members[self.index_N]

    @cached_property
    def means(self) -> Floats:
        return self.sums(self.values_N) / self.sizes_N

    @cached_property
    def deviations(self) -> Floats:
        return self.values_N - self.means

    @property
    def stds(self) -> Floats:
        """With Bessel's correction; 0 for a group of one."""
        return np.sqrt(self.sums(self.deviations**2) / np.maximum(self.sizes_N - 1, 1))

    @property
    def tolerance(self) -> float:
        """Largest difference due to rounding alone: 0.1 + 0.2 and 0.3 are the same outcome."""
        return (
            ROUNDING_ULPS * float(np.finfo(self.values_N.dtype).eps) * float(np.abs(self.values_N).max())
            if self.count
            else 0.0
        )

    @cached_property
    def is_constant(self) -> NDArray[np.bool_]:
        # Compare extremes, not the variance: the mean of equal values such as 0.1 may differ from them in the
        # last bit, and dividing that bit by a tiny std would turn it into advantages near 1.
        return self.maxima(self.values_N) - self.minima(self.values_N) <= self.tolerance

    def settle(self, advantages_N: Floats, *, singleton: Literal["zero", "raw"]) -> Tensor:
        """Return f[N], the advantages with constant groups set to exactly 0.

        Groups of one are set as `singleton` says.
        """
        settled = np.where(self.is_constant, 0, advantages_N)
        return torch.from_numpy(
            settled if singleton == "zero" else np.where(self.sizes_N == 1, self.values_N, settled)
        )

    def credit(self, batch: ActionBatch, advantages_N: Floats, options: AdvantageOptions) -> RunCredit:
        """Return the settled advantages on every action token of their trajectories."""
        return RunCredit(self.settle(advantages_N, singleton=options.singleton), batch.num_tokens_N)


def _places(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(labels, return_inverse=True)[1]


def grpo(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = (R_i - mean_G) / (std_G + 1e-6), std with Bessel's correction.

    Reads: singleton.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    groups = Groups.of(batch)
    return groups.credit(batch, groups.deviations / (groups.stds + STD_EPS), options)


def dr_grpo(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = R_i - mean_G. Use with the aggregation `constant`.

    Without the division by std, a group gains no weight as its outcomes approach each other.

    Reads: singleton.
    Source: Liu et al. 2025, arXiv:2503.20783.
    """
    groups = Groups.of(batch)
    return groups.credit(batch, groups.deviations, options)


def rloo(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = R_i - mean of the other members = n / (n - 1) (R_i - mean_G).

    The baseline excludes R_i, hence adds no bias.

    Reads: singleton.
    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    groups = Groups.of(batch)
    return groups.credit(
        batch, groups.deviations * groups.sizes_N / np.maximum(groups.sizes_N - 1, 1), options
    )


def opo(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = R_i - sum_G(len R) / sum_G(len), len in action tokens.

    The baseline has minimal variance if the squared norm of a gradient grows in proportion to the length.

    Reads: singleton.
    Source: Hao et al. 2025, arXiv:2505.23585.
    """
    groups = Groups.of(batch)
    lengths = batch.num_tokens_N.numpy().astype(groups.values_N.dtype)
    # The baseline of least variance is E[|g|^2 R] / E[|g|^2]; |g|^2 is taken as proportional to the length.
    baselines = groups.sums(lengths * groups.values_N) / np.maximum(groups.sums(lengths), 1)
    return groups.credit(batch, groups.values_N - baselines, options)


def gpg(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = (R_i - mean_G) * B / B', for B groups in the batch, B' of them with unequal outcomes.

    The factor compensates for constant groups, which contribute no gradient but count in the mean.

    Reads: singleton.
    Source: Chu et al. 2025, arXiv:2504.02546.
    """
    groups = Groups.of(batch)
    num_unequal = len(np.unique(groups.index_N[~groups.is_constant]))
    return groups.credit(batch, groups.deviations * (groups.count / max(num_unequal, 1)), options)


def max_rl(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = (R_i - mean_G) / (mean_G + 1e-6): the rarer success is, the more it weighs.

    Reads: singleton.
    Raises:
        ValueError: an outcome is negative. The group mean could then be 0 or flip the sign of every
            advantage.
    Source: "Maximum likelihood reinforcement learning", 2026, arXiv:2602.02710.
    """
    groups = Groups.of(batch)
    if (groups.values_N < -groups.tolerance).any():
        raise ValueError(
            "max_rl divides by a group's mean outcome and needs outcomes of at least 0; one is "
            f"{groups.values_N.min():g}"
        )
    return groups.credit(batch, groups.deviations / (groups.means + MEAN_EPS), options)
