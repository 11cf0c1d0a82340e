"""Distributions from observed numbers: their mean, and what the attempts of a group share."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.simulation import DistributionConfig
from agentrl.extras.plan.samples import ObservedNumbers, group_share
from agentrl.extras.plan.workload import Drawn

ATTEMPTS = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.floats(0, 1000, allow_subnormal=False), min_size=1, max_size=4)),
    min_size=1,
    max_size=80,
)


def observed(attempts) -> ObservedNumbers:
    found = ObservedNumbers()
    for group, values in attempts:
        found.add(group, values)
    return found


@given(ATTEMPTS)
def test_a_distribution_has_the_mean_of_the_means_of_attempts(attempts) -> None:
    own = DistributionConfig.model_validate(observed(attempts).distribution())
    assert np.mean(own.values) == pytest.approx(np.mean([np.mean(v) for _, v in attempts]), rel=1e-4)
    assert list(own.values) == sorted(own.values)
    assert len(own.values) <= 64
    assert 0 <= own.group_share <= 1


def test_numbers_that_were_not_observed_are_zero() -> None:
    assert ObservedNumbers().distribution() == {"kind": "fixed", "mean": 0.0}


@pytest.mark.parametrize("planted", [0.0, 0.3, 0.7, 0.95])
def test_a_planted_share_is_given_back_from_groups_of_any_size(planted) -> None:
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(4000), rng.integers(1, 12, 4000))
    deviates = np.sqrt(planted) * rng.normal(size=4000)[groups]
    deviates += np.sqrt(1 - planted) * rng.normal(size=len(groups))
    assert group_share(np.exp(2 * deviates), groups) == pytest.approx(planted, abs=0.02)


@given(ATTEMPTS)
def test_only_the_order_of_numbers_counts(attempts) -> None:
    values = np.array([v for _, own in attempts for v in own])
    groups = np.array([group for group, own in attempts for _ in own])
    ranks = np.unique(values, return_inverse=True)[1].astype(np.float64)
    assert group_share(values, groups) == group_share(ranks, groups)


def test_groups_whose_attempts_are_equal_share_everything() -> None:
    assert group_share(np.repeat([3.0, 1.0, 2.0], 4), np.repeat([0, 1, 2], 4)) == 1.0
    assert group_share(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 2])) == 0.0  # no group has two
    assert group_share(np.full(6, 2.0), np.repeat([0, 1], 3)) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_drawn_samples_are_as_likely_as_each_other_and_shared_as_told(share) -> None:
    own = Drawn("samples", group_share=share, samples=tuple(range(8)))
    rng, groups, values = random.Random(5), [], []
    for group in range(4000):
        shared = rng.gauss(0, 1)
        values += [own.draw(rng, shared) for _ in range(4)]
        groups += [group] * 4
    counts = Counter(values)
    assert all(counts[value] / len(values) == pytest.approx(1 / 8, abs=0.02) for value in range(8))
    assert group_share(np.array(values), np.array(groups)) == pytest.approx(share, abs=0.03)
