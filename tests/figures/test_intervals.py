"""Intervals hold the truth as often as they say: exactly where outcomes can be counted, by simulated
evaluations elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, special, stats

from agentrl.figures.intervals import difference_interval, mean_interval, midp_interval, share_interval
from agentrl.figures.statistics import pass_at

NUM_EVALUATIONS = 2000


def population(pass_rate: float, k: int, concentration: float) -> tuple[float, float]:
    """Return (a, b) of the Beta distribution of difficulties, a + b = concentration, whose pass@k is
    `pass_rate`.
    """

    def excess(mean: float) -> float:
        a, b = mean * concentration, (1 - mean) * concentration
        return 1 - float(np.exp(special.betaln(a, b + k) - special.betaln(a, b))) - pass_rate

    mean = float(optimize.brentq(excess, 1e-6, 1 - 1e-6))
    return mean * concentration, (1 - mean) * concentration


def coverage(pass_rate: float, *, num_problems: int, n: int, k: int, concentration: float) -> float:
    """Return the share of simulated evaluations, each of its own problems, whose interval holds the
    population's pass@k.
    """
    rng = np.random.default_rng(0)
    difficulty = rng.beta(*population(pass_rate, k, concentration), size=(NUM_EVALUATIONS, num_problems))
    num_right = rng.binomial(n, difficulty)
    by_count = pass_at(np.full(n + 1, n), np.arange(n + 1))[:, k - 1]
    low, high = share_interval(by_count[num_right])
    return float(((low <= pass_rate) & (pass_rate <= high)).mean())


@pytest.mark.parametrize("num_problems", [30, 1319])
def test_with_one_attempt_each_the_interval_covers_what_it_says(num_problems):
    """Exactly, by the probability of each number of solved problems; however difficulties differ, this is
    binomial.
    """
    solved = np.arange(num_problems + 1.0)
    low, high = midp_interval(solved, num_problems)
    for probability in [0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9]:
        covered = stats.binom.pmf(solved, num_problems, probability)[
            (low <= probability) & (probability <= high)
        ].sum()
        assert covered >= (0.93 if 0.3 <= probability <= 0.7 else 0.9)
        assert covered <= 0.97


def check_coverage(num_problems: int, n: int, k: int, concentration: float) -> None:
    for rate in [0.1, 0.3, 0.5, 0.7, 0.9]:
        covered = coverage(rate, num_problems=num_problems, n=n, k=k, concentration=concentration)
        assert covered >= (0.93 if 0.3 <= rate <= 0.7 else 0.9), rate
        assert covered <= (0.97 if 0.3 <= rate <= 0.7 else 1.0), rate


@pytest.mark.parametrize(
    "concentration", [0.5, 2.0, 1e6]
)  # most problems all or nothing; a flat mixture; all alike
@pytest.mark.parametrize(("n", "k"), [(8, 1), (8, 8), (16, 8)])
def test_evaluations_of_30_problems_are_covered(n, k, concentration):
    check_coverage(30, n, k, concentration)


@pytest.mark.slow
@pytest.mark.parametrize("concentration", [0.5, 2.0, 1e6])
@pytest.mark.parametrize(("n", "k"), [(8, 1), (8, 8), (16, 8)])
def test_evaluations_of_1319_problems_are_all_covered(n, k, concentration):
    check_coverage(1319, n, k, concentration)


@pytest.mark.parametrize(("rate", "k"), [(0.1, 8), (0.5, 1), (0.7, 8)])  # the slow test has all of them
def test_evaluations_of_1319_problems_are_covered(rate, k):
    assert 0.93 <= coverage(rate, num_problems=1319, n=8, k=k, concentration=0.5) <= 0.97


def test_attempts_at_one_problem_are_not_counted_as_problems():
    """Of 30 problems half are always solved and half never: 8 attempts each say no more than one does."""
    values = np.repeat([0.0, 1.0], 15)
    low, high = share_interval(values)
    assert (low, high) == tuple(float(limit) for limit in midp_interval(np.array(15.0), 30))
    naive = 1.96 * np.sqrt(0.25 / 240)
    assert high - low > 2.5 * (2 * naive)


def test_midp_limits_solve_their_equation():
    """Against scipy's binomial and a root finder."""
    low, high = midp_interval(np.array([3.0, 0.0, 30.0]), 30)

    def upper_tail(probability: float) -> float:
        return float(stats.binom.sf(3, 30, probability) + stats.binom.pmf(3, 30, probability) / 2 - 0.025)

    assert low[0] == pytest.approx(optimize.brentq(upper_tail, 1e-6, 0.5), abs=1e-9)
    assert (low[1], high[2]) == (0.0, 1.0)
    # No success: half of (1-p)**30 is 0.025.
    assert high[1] == pytest.approx(1 - 0.05 ** (1 / 30))
    assert low[2] == pytest.approx(0.05 ** (1 / 30))


@pytest.mark.parametrize("values", [[0.5], [1.0], [0.0], [0.25, 0.25], [0.0, 0.125], [1.0] * 50, [0.5] * 400])
def test_an_interval_holds_its_estimate_and_is_never_a_point(values):
    low, high = share_interval(np.array(values))
    assert 0 <= low <= np.mean(values) <= high <= 1
    assert high > low


def test_intervals_of_failures_mirror_those_of_successes():
    values = np.random.default_rng(0).integers(0, 9, (20, 30)) / 8
    low, high = share_interval(values)
    mirrored_low, mirrored_high = share_interval(1 - values)
    np.testing.assert_allclose(low, 1 - mirrored_high, atol=1e-12)
    np.testing.assert_allclose(high, 1 - mirrored_low, atol=1e-12)


@pytest.mark.parametrize("num", [2, 3, 4])
def test_means_without_bounds_have_students_interval(num):
    values = np.array([100.0, 140.0, 90.0, 200.0])[:num]
    expected = stats.t.interval(0.95, num - 1, loc=values.mean(), scale=stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected)


def test_one_value_has_no_interval():
    assert mean_interval(np.array([100.0])) is None


@pytest.mark.parametrize("n", [1, 8])
def test_differences_are_covered(n):
    rng = np.random.default_rng(2)
    difficulty = rng.beta(1.0, 1.0, (NUM_EVALUATIONS, 60))
    improved = difficulty + (1 - difficulty) * 0.2
    low, high = difference_interval(rng.binomial(n, improved) / n - rng.binomial(n, difficulty) / n)
    assert 0.93 <= ((low <= 0.1) & (high >= 0.1)).mean() <= 0.97


def test_intervals_of_differences_mirror_and_allow_for_an_unseen_problem():
    differences = np.array([0.25, -0.5, 0.5, 0.125])
    low, high = difference_interval(differences)
    mirrored_low, mirrored_high = difference_interval(-differences)
    assert (low, high) == pytest.approx((-mirrored_high, -mirrored_low))
    # A tenth of a problem at the far end adds to the variance between the four.
    variance = differences.var(ddof=1) + 0.1 * (differences.mean() + 1) ** 2 / 4
    assert low == pytest.approx(differences.mean() - stats.t.ppf(0.975, 3) * np.sqrt(variance / 4))


def test_equal_evaluations_are_not_surely_equal():
    low, high = difference_interval(np.zeros(30))
    assert low < -0.03 < 0.03 < high
    low, high = difference_interval(np.full(30, 0.125))
    assert low < 0.125 < high
    assert difference_interval(np.array([0.25]))[0] < 0


@pytest.mark.parametrize(
    ("won", "lost", "num"), [(4, 1, 10), (0, 3, 5), (3, 0, 5), (0, 0, 4), (2, 2, 4), (1, 0, 1)]
)
def test_counts_of_problems_won_and_lost_have_bonetts_and_prices_interval(won, lost, num):
    """With one problem more won, and one more lost."""
    first, second = (won + 1) / (num + 2), (lost + 1) / (num + 2)
    half = stats.norm.ppf(0.975) * np.sqrt((first + second - (first - second) ** 2) / (num + 2))
    low, high = difference_interval(np.repeat([1.0, -1.0, 0.0], [won, lost, num - won - lost]))
    assert low == pytest.approx(max(first - second - half, -1))
    assert high == pytest.approx(min(first - second + half, 1))


@pytest.mark.parametrize("values", [[0.5, 0.25, -0.5, 0.0], [0.75, 1.0], [-1.0, -0.5, -1.0], [0.5] * 3])
def test_other_differences_have_students_interval_with_an_allowance(values):
    found = np.array(values)
    num, mean = len(values), found.mean()
    quantile = stats.t.ppf(0.975, num - 1)
    low, high = difference_interval(np.stack([found, found]))
    for bound, limit, sign in ((low, -1, -1), (high, 1, 1)):
        variance = found.var(ddof=1) + 0.1 * (mean - limit) ** 2 / num
        expected = mean + sign * quantile * np.sqrt(variance / num)
        assert bound.tolist() == pytest.approx([max(-1, min(1, expected))] * 2)


@pytest.mark.parametrize("values", [[0.5, 0.25, 0.75, 0.0], [0.25, 1.0], [0.1, 0.0, 0.0], [0.5] * 3])
def test_other_shares_have_wilsons_interval_with_an_effective_number(values):
    """A bound p solves (p - mean)^2 = t^2 p (1 - p) / n; n gives the variance between problems."""
    found = np.array(values)
    num, mean = len(values), found.mean()
    quantile = stats.t.ppf(0.975, num - 1)
    low, high = share_interval(np.stack([found, found]))
    for bound, far_end in ((low, 0), (high, 1)):
        variance = found.var(ddof=1) + 0.1 * (mean - far_end) ** 2 / num
        effective = max(mean * (1 - mean) * num / variance, num)
        for p in bound:
            assert (p - mean) ** 2 == pytest.approx(quantile**2 * p * (1 - p) / effective)
            assert abs(p - far_end) < abs(mean - far_end)


def test_intervals_of_several_evaluations_are_those_of_each():
    stacked = np.array([[0.0, 1.0, 1.0], [0.0, 0.5, 1.0], [0.0, 0.0, 0.0]])
    with np.errstate(all="raise"):
        together = np.stack(share_interval(stacked), axis=1)
    assert together.tolist() == [list(map(float, share_interval(values))) for values in stacked]


def test_rounding_moves_no_bound_out_of_the_possible_shares():
    near_one = 1 - np.arange(1, 200)[:, None] / 2**41 * [1, 1, 1, 1, 1]
    for shares in (near_one, 1 - near_one):
        low, high = share_interval(shares)
        assert (low >= 0).all()
        assert (high <= 1).all()


def test_one_problem_counts_as_one_attempt():
    for mean in (0.25, 0.5):
        for p in share_interval(np.array([mean])):
            assert (p - mean) ** 2 == pytest.approx(stats.norm.ppf(0.975) ** 2 * p * (1 - p))
