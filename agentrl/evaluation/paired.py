"""Are two evaluations of the same problems different? A sign-flip test of the differences per problem.

If they were not, each difference might as well have had the other sign: the p-value is the share of all ways to choose the signs whose
sum is as far from 0 as the one found. With one attempt per problem this is McNemar's exact test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_STEPS = 500_000_000
"""Of the exact distribution, about a second; more are sampled."""
NUM_SAMPLES = 10_000
_CHUNK = 2**22
"""Signs in memory at once."""


@dataclass(frozen=True, slots=True)
class SignFlip:
    """Two-sided p-value; `is_exact`: of all choices of signs, not of NUM_SAMPLES of them."""

    p_value: float
    is_exact: bool


def sign_flip_test(differences: Floats, *, num_attempts: int, seed: int = 0) -> SignFlip:
    """Test whether the mean of paired differences is 0.

    Args:
        differences: f64[P], one per problem: a's mean minus b's.
        num_attempts: a number that makes all differences whole, such as n where both have n attempts of accuracy 0 or 1; where it
            does not (rewards that give parts of 1), or sums are too many, signs are sampled from `seed`.

    Source: Fisher 1935; Phipson and Smyth 2010 for the p-value of samples, which is never 0.
    """
    moved = differences[differences != 0]
    if not len(moved):
        return SignFlip(1.0, True)
    units = _whole(moved, num_attempts)
    if units is None or len(units) * int(np.abs(units).sum()) > MAX_STEPS:
        return SignFlip(_sampled(moved, np.random.default_rng(seed)), False)
    return SignFlip(_exact(units), True)


def _whole(moved: Floats, num_attempts: int) -> NDArray[np.int64] | None:
    """Return the differences in the largest unit that makes all of them whole, or None when `num_attempts` does not."""
    if num_attempts > MAX_STEPS:
        return None
    units = np.rint(moved * num_attempts).astype(np.int64)
    if not units.all() or not np.allclose(units, moved * num_attempts, rtol=0, atol=1e-6):
        return None
    return units // math.gcd(*units.tolist())


def _exact(units: NDArray[np.int64]) -> float:
    """Return the p-value of whole differences from the distribution of their sum, built up one sign at a time."""
    sizes = np.abs(units)
    reach = int(sizes.sum())
    # A sum is 2 * (what got a plus) - reach, so the distribution of the plus side, on 0..reach, is enough.
    plus = np.zeros(reach + 1)
    plus[0] = 1.0
    for size in sizes.tolist():
        plus *= 0.5
        plus[size:] += plus[: len(plus) - size].copy()
    sums = 2 * np.arange(reach + 1) - reach
    return min(1.0, float(plus[np.abs(sums) >= abs(int(units.sum()))].sum()))


def _sampled(moved: Floats, rng: np.random.Generator) -> float:
    observed = abs(float(moved.sum()))
    num_extreme, left = 0, NUM_SAMPLES
    while left:
        rows = min(left, max(1, _CHUNK // len(moved)))
        signs = rng.integers(0, 2, (rows, len(moved)), dtype=np.int8) * 2.0 - 1.0
        num_extreme += int((np.abs(signs @ moved) >= observed * (1 - 1e-12)).sum())  # sums of equal terms differ by rounding
        left -= rows
    return (num_extreme + 1) / (NUM_SAMPLES + 1)
