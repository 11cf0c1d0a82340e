"""Distributions from what was observed: their values, and how much of them the attempts of a group share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SLICES = 64
"""Values that stand for all that were observed."""


@dataclass(slots=True)
class ObservedNumbers:
    """Numbers, each with the group of its attempt and a weight.

    Several numbers of one attempt weigh 1 together: a simulated attempt draws their number first, then each.
    """

    values: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def add(self, group: int, values: Sequence[float]) -> None:
        """Add the numbers of an attempt."""
        self.values += values
        self.weights += [1 / len(values)] * len(values)
        self.groups += [group] * len(values)

    def distribution(self) -> dict[str, Any]:
        """Return a distribution of kind `samples` with the same mean (see `DistributionConfig`)."""
        if not self.values:
            return {"kind": "fixed", "mean": 0.0}
        values_N, weights_N = np.asarray(self.values, np.float64), np.asarray(self.weights)
        order_N = np.argsort(values_N)
        means = [float(f"{mean:.6g}") for mean in _slices(values_N[order_N], weights_N[order_N])]
        share = group_share(values_N, np.asarray(self.groups))
        return {"kind": "samples", "values": means, "group_share": round(share, 3)}


def _slices(ordered_N: NDArray[np.float64], weights_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of at most `_SLICES` parts of equal weight; a number may belong to two of them."""
    num = min(_SLICES, len(ordered_N))
    ends_N = np.append(0.0, np.cumsum(weights_N))
    places = np.linspace(0, ends_N[-1], num + 1)
    sums = np.interp(places, ends_N, np.append(0.0, np.cumsum(weights_N * ordered_N)))
    return np.diff(sums) / np.diff(places)


def group_share(values_N: NDArray[np.float64], groups_N: NDArray[np.int64]) -> float:
    """Return the intraclass correlation of the values' normal scores, in [0, 1].

    One-way analysis of variance with groups of unequal sizes (Donner, 1986): (MSB - MSW) / (MSB + (n0 - 1)
    MSW). 0 if all values are equal, or no group has two.
    """
    _, owners_N, sizes_G = np.unique(groups_N, return_inverse=True, return_counts=True)
    num, num_groups = len(values_N), len(sizes_G)
    if num_groups < 2 or num == num_groups or np.ptp(values_N) == 0:
        return 0.0
    scores_N = _normal_scores(values_N)
    means_G = np.bincount(owners_N, scores_N) / sizes_G
    between = float(sizes_G @ (means_G - scores_N.mean()) ** 2) / (num_groups - 1)
    within = float(((scores_N - means_G[owners_N]) ** 2).sum()) / (num - num_groups)
    typical_size = (num - float(sizes_G @ sizes_G) / num) / (num_groups - 1)
    total = between + (typical_size - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else 0.0


def _normal_scores(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return normal quantiles of the values' ranks; equal values share the rank in their middle."""
    _, places_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(values_N)
    quantile = NormalDist().inv_cdf
    return np.array([quantile(middle) for middle in middles])[places_N]
