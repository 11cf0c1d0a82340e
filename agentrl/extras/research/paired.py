"""A sign-flip test of whether two evaluations of the same problems differ, on the differences per problem.

Under the null hypothesis, each difference is as likely to have the opposite sign. The p-value is the share of
all sign patterns whose sum is at least as far from 0 as the observed sum. With one attempt per problem, this
is McNemar's exact test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_STEPS = 500_000_000
"""Maximum work for the exact distribution, about a second. Beyond it, sign patterns are sampled."""
NUM_SAMPLES = 10_000
_CHUNK = 2**22
"""Signs in memory at once."""


@dataclass(frozen=True, slots=True)
class SignFlip:
    """Two-sided p-value. `is_exact`: it covers all sign patterns, not NUM_SAMPLES sampled ones."""

    p_value: float
    is_exact: bool


def sign_flip_test(differences: Floats, *, num_attempts: int, seed: int = 0) -> SignFlip:
    """Test whether the mean of paired differences is 0.

    Args:
        differences: f64[P], one per problem: b's mean minus a's.
        num_attempts: a factor that makes all differences integers, such as n if both evaluations have n
            attempts of accuracy 0 or 1. If it does not (rewards with fractions), or if there are too many
            sums, sign patterns are sampled from `seed`.

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
    """Return the differences in the largest unit that makes them integers.

    Returns None if `num_attempts` does not make them integers.
    """
    if num_attempts > MAX_STEPS:
        return None
    units = np.rint(moved * num_attempts).astype(np.int64)
    if not units.all() or not np.allclose(units, moved * num_attempts, rtol=0, atol=1e-6):
        return None
    return units // math.gcd(*units.tolist())


def _exact(units: NDArray[np.int64]) -> float:
    """Return the p-value of integer differences from the exact distribution of their sum.

    The distribution is built up one sign at a time.
    """
    sizes = np.abs(units)
    reach = int(sizes.sum())
    # sum = 2 * (total of the plus side) - reach, so the distribution of the plus side on 0..reach is
    # sufficient.
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
        # Tolerance: sums of equal terms differ by rounding
        num_extreme += int((np.abs(signs @ moved) >= observed * (1 - 1e-12)).sum())
        left -= rows
    # The observed signs count as one more sample, so p is never 0 (Phipson and Smyth 2010).
    return (num_extreme + 1) / (NUM_SAMPLES + 1)
