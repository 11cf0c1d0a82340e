"""Statistics of n attempts at one problem: pass@k, majority vote of k, and best of k by reward.

All are exact expectations over subsets: k of the n attempts are drawn without replacement, all subsets
equally likely. Nothing is sampled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_VOTERS = 1000
"""With more attempts, the number of subsets exceeds the range of a float."""


def pass_at(num_attempts: NDArray[np.int64], num_right: NDArray[np.int64]) -> Floats:
    """Return the probability that at least one of k attempts is right, for every k.

    Computed as a product of ratios, so that no binomial coefficient can overflow.

    Args:
        num_attempts, num_right: i64[P], of each problem.

    Returns:
        f64[P, K], with K the largest number of attempts at a problem. Column k-1 is pass@k, NaN if a problem
        has fewer than k attempts.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    # Number of attempts drawn before this one, all of them wrong
    drawn = np.arange(max(num_attempts, default=0))
    left = (num_attempts[:, None] - drawn).astype(np.float64)
    wrong_left = np.maximum(left - num_right[:, None], 0)
    ratios = np.divide(wrong_left, left, out=np.full_like(left, np.nan), where=left > 0)
    return np.subtract(1.0, np.cumprod(ratios, axis=1))


def majority_at(answers: Sequence[str | None], accuracies: Sequence[float]) -> Floats:
    """Return the expected accuracy of the majority answer of k attempts, for every k: f64[n].

    Tied answers share the vote. An attempt without an answer has no vote; if no drawn attempt has an answer,
    the vote counts as wrong. The cost is milliseconds for 64 attempts and half a second for 512. Equal
    patterns of answers are computed once.

    Args:
        answers, accuracies: of the n <= MAX_VOTERS attempts, in any order.

    Source: Wang et al. 2022, arXiv:2203.11171 (self-consistency).
    """
    by_answer: defaultdict[str, list[float]] = defaultdict(list)
    for answer, accuracy in zip(answers, accuracies, strict=True):
        if answer is not None:
            by_answer[answer].append(accuracy)
    classes = tuple(sorted((len(found), sum(found) / len(found)) for found in by_answer.values()))
    return np.array(_vote(classes, len(answers)))


def best_of(rewards: Sequence[float], accuracies: Sequence[float]) -> Floats:
    """Return the expected accuracy of the attempt with the highest reward among k, for every k: f64[n].

    Attempts with tied rewards share the result.
    """
    by_reward: defaultdict[float, list[float]] = defaultdict(list)
    for reward, accuracy in zip(rewards, accuracies, strict=True):
        by_reward[reward].append(accuracy)
    expected, num_within, none_higher = np.zeros(len(rewards)), 0, np.zeros(len(rewards))
    for _, tied in sorted(by_reward.items()):
        num_within += len(tied)
        lower, none_higher = none_higher, _all_within(num_within, len(rewards))
        expected += (none_higher - lower) * (sum(tied) / len(tied))
    return expected


def _all_within(size: int, num: int) -> Floats:
    """Return f64[num]: the probability that k drawn attempts
    are all in a subset of `size`, for k = 1..num.
    """
    drawn = np.arange(num, dtype=np.float64)
    within: Floats = np.cumprod(np.maximum(size - drawn, 0) / (num - drawn), dtype=np.float64)
    return within


@lru_cache(maxsize=4096)
def _vote(classes: tuple[tuple[int, float], ...], num: int) -> tuple[float, ...]:
    """Return the expected accuracy of the vote of k, for k = 1..num.

    Subsets are counted by polynomial multiplication: from an answer class of `size` attempts, i are drawn in
    C(size, i) ways. For the largest count `top`, `counts[0, k, t]` is the number of ways to draw k attempts
    such that t classes reach `top` and none exceeds it. `counts[1, k, t]` is the sum of the accuracies of
    those t classes over the same draws; divided by t, it is the shared accuracy of the tied classes.

    Args:
        classes: (size, mean accuracy) of each answer.
        num: all attempts, including those without an answer.
    """
    silent = num - sum(size for size, _ in classes)
    subsets = np.array([float(math.comb(num, k)) for k in range(num + 1)])
    expected = np.zeros(num + 1)
    for top in range(1, max((size for size, _ in classes), default=0) + 1):
        most_tied = sum(size >= top for size, _ in classes)
        counts = np.zeros((2, num + 1, most_tied + 1))
        counts[0, 0, 0] = 1.0
        for size, accuracy in classes:
            counts = _drawn(counts, size, accuracy, top)
        # Attempts without an answer: each may be drawn or not, without a vote (multiply by 1 + x).
        for _ in range(silent):
            counts[:, 1:] += counts[:, :-1].copy()
        expected += (counts[1, :, 1:] / np.arange(1, most_tied + 1)).sum(axis=1)
    return tuple((expected / subsets)[1:].tolist())


def _drawn(counts: Floats, size: int, accuracy: float, top: int) -> Floats:
    """Return the counts after adding one class."""
    after = counts.copy()  # no attempt of the class is drawn
    for i in range(1, min(size, top) + 1):
        ways = math.comb(size, i) * counts[:, :-i]
        if i < top:
            after[:, i:] += ways
        else:
            after[:, i:, 1:] += ways[:, :, :-1]
            after[1, i:, 1:] += accuracy * ways[0, :, :-1]
    return after
