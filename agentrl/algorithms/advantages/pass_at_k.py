"""Estimators that maximize the chance that at least one of k attempts succeeds."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.advantages.groups import Floats, Groups
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, RunCredit


def grpo_passk(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """Give the best attempt of a group R_max - R_second, and all others 0.

    If several attempts tie for the best, all get 0.

    Reads: singleton.
    Source: the leave-one-out advantage of max_i R_i; Tang et al. 2025, arXiv:2503.19595.
    """
    groups = Groups.of(batch)
    # max over all minus max over the others: R_max - R_second for a unique best attempt, 0 for every other
    # one.
    is_best = groups.values_N >= groups.maxima(groups.values_N) - groups.tolerance
    is_alone = groups.sums(is_best.astype(groups.values_N.dtype)) == 1
    seconds = groups.maxima(np.where(is_best, -np.inf, groups.values_N))
    margins = np.where(is_best & is_alone & np.isfinite(seconds), groups.values_N - seconds, 0)
    return groups.credit(batch, margins, options)


def pass_at_k(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """Return the expected advantage over all subsets of k attempts, in closed form.

    Of n attempts f failed (R_i < solved_reward). A subset of k succeeds if at least one of its attempts does.
    The mean over subsets is p = 1 - C(f, k) / C(n, k), their std is s = sqrt(p (1 - p)). An attempt's
    advantage is the mean over the subsets that contain it: (1 - p) / s if it succeeded, (1 - p - C(f-1, k-1)
    / C(n-1, k-1)) / s if it failed; 0 where s = 0.

    Reads: passk_k, solved_reward, singleton.
    Raises:
        ValueError: a group of two or more has fewer than k attempts.
    Source: Chen et al. 2025, arXiv:2508.10751, the analytical derivation.
    """
    groups, k = Groups.of(batch), options.passk_k
    _check_sizes(groups, batch, k)
    is_solved = groups.values_N >= options.solved_reward - groups.tolerance
    failed = groups.sums((~is_solved).astype(groups.values_N.dtype))
    # all_fail = 1 - p. others_fail: the chance that the k - 1 others drawn with a failed attempt fail too.
    all_fail = _share_of_subsets(failed, groups.sizes_N, k)
    others_fail = _share_of_subsets(failed - 1, groups.sizes_N - 1, k - 1)
    stds = np.sqrt(all_fail * (1 - all_fail))
    advantages = np.where(is_solved, all_fail, all_fail - others_fail) / np.where(stds > 0, stds, 1)
    return groups.credit(batch, np.where(stds > 0, advantages, 0), options)


def _share_of_subsets(some_N: Floats, all_N: Floats, k: int) -> Floats:
    """Return C(some, k) / C(all, k), as the product of (some - j) / (all - j): no factorial, hence no
    overflow.
    """
    drawn = np.arange(k, dtype=some_N.dtype)
    return (np.maximum(some_N[:, None] - drawn, 0) / np.maximum(all_N[:, None] - drawn, 1)).prod(axis=1)


def _check_sizes(groups: Groups, batch: ActionBatch, k: int) -> None:
    is_small = (groups.sizes_N < k) & (groups.sizes_N > 1)
    if is_small.any():
        label, size = int(batch.group_N.numpy()[is_small][0]), int(groups.sizes_N[is_small][0])
        raise ValueError(
            f"pass_at_k with k={k} needs groups of at least {k} attempts, but group {label} has {size}"
        )
