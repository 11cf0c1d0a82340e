"""pass@k, the vote of k and the best of k against every subset, written out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.figures.statistics import MAX_VOTERS, best_of, majority_at, pass_at

Tries = list[tuple[str | None, float, float]]
"""(answer, accuracy, reward) of each attempt at one problem."""

TRIES = st.lists(
    st.tuples(
        st.sampled_from([None, "1", "2", "3"]),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from([-1.0, 0.0, 2.0]),
    ),
    min_size=1,
    max_size=7,
)


def over_subsets(
    tries: Tries, value: Callable[[Sequence[tuple[str | None, float, float]]], float]
) -> list[float]:
    """Return the mean of `value` over all subsets of k attempts, for every k."""
    return [
        float(np.mean([value(chosen) for chosen in itertools.combinations(tries, k)]))
        for k in range(1, len(tries) + 1)
    ]


def any_right(chosen: Sequence[tuple[str | None, float, float]]) -> float:
    return float(any(accuracy == 1.0 for _, accuracy, _ in chosen))


def voted(chosen: Sequence[tuple[str | None, float, float]]) -> float:
    votes = Counter(answer for answer, _, _ in chosen if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return (
        float(np.mean([np.mean([a for answer, a, _ in chosen if answer == winner]) for winner in winners]))
        if winners
        else 0.0
    )


def best(chosen: Sequence[tuple[str | None, float, float]]) -> float:
    highest = max(reward for _, _, reward in chosen)
    return float(np.mean([accuracy for _, accuracy, reward in chosen if reward == highest]))


@settings(max_examples=60, deadline=None)
@given(TRIES)
def test_each_is_the_mean_over_all_subsets(tries: Tries):
    answers, accuracies, rewards = zip(*tries, strict=True)
    num_right = sum(accuracy == 1.0 for accuracy in accuracies)
    np.testing.assert_allclose(
        pass_at(np.array([len(tries)]), np.array([num_right]))[0], over_subsets(tries, any_right), atol=1e-12
    )
    np.testing.assert_allclose(majority_at(answers, accuracies), over_subsets(tries, voted), atol=1e-12)
    np.testing.assert_allclose(best_of(rewards, accuracies), over_subsets(tries, best), atol=1e-12)


def test_pass_at_k_is_exact_for_many_attempts():
    """Where binomial coefficients have hundreds of digits: against fractions."""
    found = pass_at(np.array([1000]), np.array([3]))[0]
    failing, expected = Fraction(1), []
    for drawn in range(1000):
        failing *= Fraction(max(997 - drawn, 0), 1000 - drawn)
        expected.append(float(1 - failing))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_pass_at_k_is_unknown_beyond_the_attempts_of_a_problem():
    with np.errstate(all="raise"):
        found = pass_at(np.array([2, 4]), np.array([1, 0]))
    assert np.isnan(found[0, 2:]).all()
    np.testing.assert_allclose(found[0, :2], [0.5, 1.0])
    np.testing.assert_array_equal(found[1], [0.0, 0.0, 0.0, 0.0])
    assert pass_at(np.array([], int), np.array([], int)).shape == (0, 0)


def test_pass_at_k_is_unbiased():
    """The mean over evaluations is the probability that one of k fresh attempts is right, which 1 - (1 -
    c/n)**k is not.
    """
    probability, n, k = 0.2, 8, 4
    num_right = np.random.default_rng(0).binomial(n, probability, 40_000)
    truth = 1 - (1 - probability) ** k
    assert pass_at(np.full(40_000, n), num_right)[:, k - 1].mean() == pytest.approx(truth, abs=0.005)
    assert (1 - (1 - num_right / n) ** k).mean() < truth - 0.02


def test_the_best_by_accuracy_passes_when_any_does():
    accuracies = [0.0, 1.0, 0.0, 1.0, 0.0]
    np.testing.assert_allclose(
        best_of(accuracies, accuracies), pass_at(np.array([5]), np.array([2]))[0], atol=1e-12
    )


def test_a_vote_of_all_is_its_winner_and_ties_share():
    assert majority_at(["7", "7", "3"], [1.0, 1.0, 0.0])[-1] == 1.0
    assert majority_at(["7", "3"], [1.0, 0.0])[-1] == 0.5
    assert majority_at(["7", None, None], [1.0, 0.0, 0.0])[-1] == 1.0  # who says nothing has no vote
    np.testing.assert_array_equal(majority_at([None, None], [0.0, 0.0]), [0.0, 0.0])


def test_a_vote_of_64_takes_no_subsets():
    """C(64, 32) subsets have 18 digits; the law of large numbers says what the vote of many comes to."""
    answers = ["right"] * 30 + ["wrong"] * 20 + [None] * 14
    found = majority_at(answers, [float(answer == "right") for answer in answers])
    assert found[0] == pytest.approx(30 / 64)
    assert found[-1] == 1.0
    assert np.all(np.diff(found[2::2]) >= -1e-12)


def test_a_vote_of_as_many_as_a_float_can_count():
    answers = ["right"] * 600 + ["wrong"] * (MAX_VOTERS - 600)
    found = majority_at(answers, [float(answer == "right") for answer in answers])
    assert np.isfinite(found).all()
    assert (found[0], found[-1]) == (pytest.approx(0.6), pytest.approx(1.0))
