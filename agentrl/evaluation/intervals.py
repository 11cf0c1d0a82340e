"""95 % confidence intervals of a mean over problems, which are a sample: what another sample of such problems might have shown.

Attempts at one problem succeed and fail together, so problems are what is counted, each as one value, its mean over attempts.
benchmarks/coverage.py measures how often these intervals hold the truth (docs/results/coverage.json).
"""

from __future__ import annotations

import numpy as np
import scipy  # its parts are loaded when they are first used
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
_TAIL = (1 - CONFIDENCE) / 2

UNSEEN = 0.1
"""Share of one problem at the far end that a limit allows for beyond those seen.

Without it an interval close to 0 or 1 is too short when hardly any problem differs: 80 % instead of 95 % hold the truth at pass@8
of 0.97 from 16 attempts at 30 problems. 0.1 gives 94-97 % there and 93-97 % wherever else was simulated; 0.25 exceeds 97 %.
"""


def share_interval(values: Floats) -> tuple[Floats, Floats]:
    """Return the limits for the mean of `values` over a population of problems: an exact one where it exists.

    Where all values are 0 or 1 they count successes: the mid-P binomial interval. Otherwise Wilson's interval for as many
    independent attempts as would have the variance that is seen between the problems, with Student's quantile.

    Args:
        values: f64[..., P] in [0, 1], P > 0: one per problem; leading axes are evaluations of their own.

    Returns:
        low, high: f64[...] in [0, 1].

    Source: Wilson 1927; Lancaster 1961 for the mid-P; Korn and Graubard 1998 for the effective number of attempts.
    """
    num = values.shape[-1]
    mean = values.mean(axis=-1)
    if num == 1:
        # One problem says nothing of how much problems differ: it counts as one attempt.
        low, high = _wilson(mean, np.ones_like(mean), float(scipy.special.ndtri(1 - _TAIL)))
    else:
        quantile = float(scipy.special.stdtrit(num - 1, 1 - _TAIL))
        low, _ = _wilson(mean, _effective_number(values, mean, far_end=0.0), quantile)
        _, high = _wilson(mean, _effective_number(values, mean, far_end=1.0), quantile)
    is_count = ((values == 0) | (values == 1)).all(axis=-1)
    if is_count.any():
        exact_low, exact_high = midp_interval(np.rint(mean * num), num)
        low, high = np.where(is_count, exact_low, low), np.where(is_count, exact_high, high)
    return low, high


def midp_interval(successes: Floats, num: int) -> tuple[Floats, Floats]:
    """Return the limits of a binomial probability by the mid-P rule: an outcome counts half against itself.

    It covers 95 % on average over probabilities, where Clopper-Pearson's covers at least 95 % of each and is wider for it.

    Args:
        successes: f64[...], whole numbers from 0 to `num`.

    Returns:
        low, high: f64[...].
    """
    found, places = np.unique(successes, return_inverse=True)
    # By symmetry the upper limit of x successes is one minus the lower limit of as many failures.
    low, mirrored = _midp_low(found, num), _midp_low(num - found, num)
    return low[places].reshape(successes.shape), (1 - mirrored)[places].reshape(successes.shape)


def mean_interval(values: Floats) -> tuple[float, float] | None:
    """Return Student's limits for the mean of values that have no bounds (tokens, turns); f64[P], one per problem.

    None: there is one problem, which says nothing of others.
    """
    num = len(values)
    if num < 2:
        return None
    half = float(scipy.special.stdtrit(num - 1, 1 - _TAIL)) * float(values.std(ddof=1)) / num**0.5
    return float(values.mean()) - half, float(values.mean()) + half


def difference_interval(differences: Floats) -> tuple[Floats, Floats]:
    """Return the limits for the mean of paired differences over a population of problems.

    Where all differences are -1, 0 or 1 (one attempt each): Bonett and Price's interval, which holds close to the ends too. Otherwise
    Student's, with the same allowance for unseen problems as `share_interval`.

    Args:
        differences: f64[..., P] in [-1, 1], P > 0: one per problem.

    Returns:
        low, high: f64[...] in [-1, 1].

    Source: Bonett and Price 2012, Adjusted Wald confidence interval for a difference of binomial proportions based on paired data.
    """
    num, total = differences.shape[-1], differences.sum(axis=-1)
    # One problem more that is won and one that is lost.
    adjusted = total / (num + 2)
    spread = ((differences**2).sum(axis=-1) + 2) / (num + 2) - adjusted**2
    half = float(scipy.special.ndtri(1 - _TAIL)) * np.sqrt(spread / (num + 2))
    low, high = adjusted - half, adjusted + half
    if num > 1:
        mean, variance = differences.mean(axis=-1), differences.var(axis=-1, ddof=1)
        quantile = float(scipy.special.stdtrit(num - 1, 1 - _TAIL))
        is_count = np.isin(differences, (-1, 0, 1)).all(axis=-1)
        low = np.where(is_count, low, mean - quantile * np.sqrt((variance + UNSEEN * (mean + 1) ** 2 / num) / num))
        high = np.where(is_count, high, mean + quantile * np.sqrt((variance + UNSEEN * (mean - 1) ** 2 / num) / num))
    return np.clip(low, -1, 1), np.clip(high, -1, 1)


def _effective_number(values: Floats, mean: Floats, *, far_end: float) -> Floats:
    """Return how many independent attempts would have the variance of the mean; never fewer than there are problems."""
    num = values.shape[-1]
    variance = values.var(axis=-1, ddof=1) + UNSEEN * (mean - far_end) ** 2 / num
    effective = np.divide(mean * (1 - mean) * num, variance, out=np.full_like(mean, num), where=variance > 0)
    # No values in [0, 1] vary more than 0s and 1s do: a smaller number is noise.
    return np.maximum(effective, num)


def _wilson(mean: Floats, num: Floats, quantile: float) -> tuple[Floats, Floats]:
    square = quantile**2
    centre = mean + square / (2 * num)
    half = quantile * np.sqrt(mean * (1 - mean) / num + square / (4 * num**2))
    scale = 1 + square / num
    return np.clip((centre - half) / scale, 0, 1), np.clip((centre + half) / scale, 0, 1)


def _midp_low(successes: Floats, num: int) -> Floats:
    """Return where P(X > x) + P(X = x) / 2 is half of what an interval may miss, by bisection; 0 for no success."""
    low, high = np.zeros_like(successes), np.ones_like(successes)
    below = np.maximum(successes - 1, 0)
    for _ in range(60):  # to the last bit of a float
        middle = (low + high) / 2
        at_most, less = scipy.special.bdtr(successes, num, middle), scipy.special.bdtr(below, num, middle)
        is_small = 1 - (at_most + less) / 2 < _TAIL
        low, high = np.where(is_small, middle, low), np.where(is_small, high, middle)
    return np.where(successes == 0, 0.0, low)
