"""Laws of the off-policy correction: independent float64 loops, bounds on the right side, global statistics
that no packing changes.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.corrections import (
    LEVELS,
    correction_metrics,
    correction_statistics,
    importance_weights,
    log_products,
)
from agentrl.algorithms.kl import KL_ESTIMATORS
from agentrl.algorithms.rejection import STATISTICS, RejectionRule, accepts, second_moment_cut
from agentrl.algorithms.rules import WeightRule
from agentrl.algorithms.selection import covariances, fair_keys, largest_first, num_selected, smallest_cut
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.buffer import BufferConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.schema import Config

seeds = st.integers(0, 2**31)
SEQUENCE_LEVELS = ("sequence_sum", "sequence_mean", "sequence_max")


def f64(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def case(seed, num_tokens=24):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.5, num_tokens), np.sort(rng.integers(0, 5, num_tokens)) * 3


def metrics_of(statistics):
    return correction_metrics(
        {k: float(v) for k, v in statistics.sums.items()}, {k: float(v) for k, v in statistics.maxima.items()}
    )


# ---------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outside", ["truncate", "mask"])
@given(seed=seeds, cap=st.floats(0.8, 3.0), floor=st.none() | st.floats(0.1, 0.7))
@settings(max_examples=25)
def test_weights_equal_a_loop(level, outside, seed, cap, floor):
    logs, ids = case(seed)
    expected = []
    for t, own in ((t, logs[ids == ids[t]]) for t in range(len(logs))):
        raw = math.exp({"token": logs[t], "sequence": own.sum(), "geometric": own.mean()}[level])
        if outside == "mask":
            expected.append(raw if (floor or 0.0) <= raw <= cap else 0.0)
        else:
            expected.append(max(floor or 0.0, min(cap, raw)))
    got = importance_weights(f64(logs), torch.tensor(ids), WeightRule(level, cap, floor, outside))
    np.testing.assert_allclose(got, expected, rtol=1e-11)


def test_the_bounds_of_a_weight_are_on_proximal_over_behavior_and_not_on_its_inverse():
    logs, ids = (
        f64([math.log(4), -math.log(4)]),
        torch.tensor([0, 1]),
    )  # 4 times as likely as when sampled, and a quarter
    assert importance_weights(logs, ids, WeightRule("token", cap=2.0)).tolist() == pytest.approx([2.0, 0.25])
    assert importance_weights(logs, ids, WeightRule("token", cap=5.0, floor=0.5)).tolist() == pytest.approx(
        [4.0, 0.5]
    )
    assert importance_weights(
        logs, ids, WeightRule("token", cap=5.0, floor=0.5, outside="mask")
    ).tolist() == pytest.approx([4.0, 0.0])


def test_a_weight_at_its_bound_is_within_it():
    logs, ids = f64([0.0, 0.0]), torch.tensor([0, 1])
    for rule in (WeightRule("token", 1.0, 1.0, "mask"), WeightRule("token", 1.0, outside="mask")):
        assert importance_weights(logs, ids, rule).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_equal_policies_weigh_1(level):
    assert (
        importance_weights(f64([0.0] * 4), torch.tensor([0, 0, 1, 2]), WeightRule(level, cap=2.0)).tolist()
        == [1.0] * 4
    )


# -------------------------------------------------------------------------------------------------- rejection

FORMULAS = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}


def is_kept(logs, own, t, statistic, level, lower, upper):
    """One token by the definition: bounds of k1 are on rho', those of k2 and k3 on the statistic itself."""
    values = [FORMULAS[statistic](x) for x in own]
    judged = {
        "token": [FORMULAS[statistic](logs[t])],
        "sequence_sum": [sum(values)],
        "sequence_mean": [sum(values) / len(values)],
        "sequence_max": values,
    }[level]
    judged = [math.exp(v) for v in judged] if statistic == "k1" else judged
    return all((lower is None or v >= lower) and (upper is None or v <= upper) for v in judged)


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", ["token", *SEQUENCE_LEVELS])
@given(seed=seeds, lower=st.none() | st.floats(0.3, 0.95), upper=st.floats(0.02, 1.6))
@settings(max_examples=25)
def test_rejection_equals_a_loop(statistic, level, seed, lower, upper):
    logs, ids = case(seed)
    upper, lower = (upper + 1, lower) if statistic == "k1" else (upper, None)
    expected = [
        is_kept(logs, logs[ids == ids[t]], t, statistic, level, lower, upper) for t in range(len(logs))
    ]
    got = accepts(f64(logs), torch.tensor(ids), RejectionRule(statistic, level, lower, upper))
    assert got.tolist() == expected


@pytest.mark.parametrize("level", ["token", *SEQUENCE_LEVELS])
def test_asymmetric_bounds_act_on_proximal_over_behavior(level):
    """Bounds [0.6, 1.4] keep 0.65 and 1.35; on the inverse they would keep neither 0.65 (1.54) nor drop 0.58
    (1.72) alone.
    """
    ratios = [0.65, 1.35, 0.58, 1.45, 1.65]
    kept = accepts(f64(np.log(ratios)), torch.arange(5), RejectionRule("k1", level, 0.6, 1.4))
    assert kept.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("level", ["token", *SEQUENCE_LEVELS])
def test_a_statistic_at_its_bound_is_kept(level):
    logs, ids = f64([math.log(0.5), math.log(2.0)]), torch.arange(2)
    assert accepts(logs, ids, RejectionRule("k1", level, 0.5, 2.0)).all()
    assert accepts(f64([1.0, -1.0]), ids, RejectionRule("k2", level, None, 0.5)).all()


def test_a_log_ratio_that_is_not_a_number_is_rejected_and_never_taken_for_on_policy():
    logs, ids = f64([math.nan, 0.0, 0.0, math.inf, -math.inf]), torch.tensor([0, 0, 1, 2, 3])
    for statistic in STATISTICS:
        assert accepts(logs, ids, RejectionRule(statistic, "token", None, 2.0))[0].item() is False
        assert accepts(logs, ids, RejectionRule(statistic, "sequence_mean", None, 2.0)).tolist()[:3] == [
            False,
            False,
            True,
        ]
    assert accepts(logs, ids, RejectionRule("k1", "token", 0.5, 2.0)).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", ["token", *SEQUENCE_LEVELS])
def test_equal_policies_are_never_rejected(statistic, level):
    lower = 0.999 if statistic == "k1" else None
    assert accepts(
        f64([0.0] * 4), torch.tensor([0, 0, 1, 2]), RejectionRule(statistic, level, lower, 1.001)
    ).all()


@given(st.lists(st.sampled_from([0.0, 0.01, 0.04, 0.25, 1.0, 9.0]), max_size=20), st.floats(0.001, 4.0))
def test_m2po_drops_the_largest_and_no_more_than_it_must(values, threshold):
    cut = second_moment_cut(f64(values), threshold)
    kept = [v for v in values if v <= cut]
    assert not kept or sum(kept) / len(kept) <= threshold * (1 + 1e-12)
    rest = sorted(v for v in values if v > cut)
    if rest:  # with the next smallest ones, which are equal, it would be too much
        more = kept + [v for v in rest if v == rest[0]]
        assert sum(more) / len(more) > threshold * (1 - 1e-12)


@pytest.mark.parametrize(
    ("squares", "threshold", "cut"),
    [
        ([], 1.0, -math.inf),
        ([4.0], 1.0, -math.inf),
        ([1.0, 1.0], 1.0, 1.0),
        ([1.0, 0.0, 1.0], 0.5, 0.0),  # one of the equal ones would fit
        ([1.0, math.nan], 2.0, 1.0),
        ([3.0, 0.0], 1.5, 3.0),
    ],
)
def test_the_cut_of_m2po_by_hand(squares, threshold, cut):
    assert second_moment_cut(f64(squares), threshold) == cut


# -------------------------------------------------------------------------------------------------- selection


def split_mix(state: int) -> int:
    """The finalizer of SplitMix64, in whole numbers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_fair_keys_are_those_of_split_mix_on_any_machine():
    golden = 0x9E3779B97F4A7C15
    assert split_mix(golden) == 0xE220A8397B1DCDAF  # the generator's first number from seed 0
    for columns in ((0, 0, 0), (3, 17, 151_935), (2**40, 5, 1)):
        state = 0
        for number in columns:
            state = split_mix((state + number + golden) % 2**64)
        [key] = fair_keys(*(np.array([number]) for number in columns))
        assert key == (state >> 11) / 2**53


def test_a_share_of_tokens_is_at_least_one_and_ties_stay_out():
    assert [num_selected(0.002, n) for n in (0, 1, 499, 1000, 1999)] == [0, 1, 1, 2, 3]
    keys = f64([3.0, 1.0, 2.0, 2.0, 5.0])
    assert (keys < smallest_cut(keys, 1)).tolist() == [False, True, False, False, False]
    assert int((keys < smallest_cut(keys, 2)).sum()) == 1  # the second and third smallest are equal
    assert (keys < smallest_cut(keys, 5)).all()


def test_covariances_are_deviations_multiplied():
    p, a = np.array([-1.0, -2.0, -0.5]), np.array([4.0, 3.0, 1.5])  # no mean is 0
    got = covariances(f64(p), f64(a), mean_logprob=p.mean(), mean_advantage=a.mean())
    np.testing.assert_allclose(got, (p - p.mean()) * (a - a.mean()), atol=1e-4)
    assert got.sum() / 2 == pytest.approx(np.cov(p, a)[0, 1], abs=1e-4)


def test_the_largest_covariances_are_chosen_and_no_rounding_noise_among_equal_ones():
    deviations, fair = np.array([0.5, 0.5, 0.5, -1.0, 2.0]), f64([0.9, 0.1, 0.5, 0.0, 0.99])
    for noise in (0.0, 1e-9, -1e-9):
        covariance = covariances(
            f64(deviations + noise * np.arange(5)), f64([1.0] * 5), mean_logprob=0.0, mean_advantage=0.0
        )
        keys = largest_first(covariance, fair)
        assert torch.argsort(keys).tolist() == [4, 1, 2, 0, 3]
        assert (keys < smallest_cut(keys, 2)).tolist() == [False, True, False, False, True]


def test_fair_keys_depend_on_the_token_alone_and_are_spread_evenly():
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, n, 4000) for n in (64, 500, 1000)]
    keys = fair_keys(*columns)
    order = rng.permutation(4000)
    np.testing.assert_array_equal(fair_keys(*(c[order] for c in columns)), keys[order])
    np.testing.assert_allclose(np.histogram(keys, bins=8, range=(0, 1))[0], 500, atol=100)


# ---------------------------------------------------------------------------------------------------- metrics


@given(seed=seeds, cap=st.floats(0.5, 5.0))
def test_metrics_equal_a_loop_however_the_batch_is_cut(seed, cap):
    rng = np.random.default_rng(seed)
    behavior, proximal, sequence = (
        rng.normal(-2, 1, 24),
        rng.normal(-2, 1, 24),
        np.sort(rng.integers(0, 5, 24)),
    )
    raw = np.exp(proximal - behavior)

    def part(chosen):
        columns = f64(proximal[chosen]), f64(behavior[chosen])
        return correction_statistics(
            *columns, log_products(columns[0] - columns[1], f64(sequence[chosen])), cap=cap
        )

    parts = [part(sequence == s) for s in range(5)]
    sums = {name: sum(float(p.sums[name]) for p in parts) for name in parts[0].sums}
    maxima = {name: max(float(p.maxima[name]) for p in parts) for name in parts[0].maxima}
    products = np.array([np.exp((proximal - behavior)[sequence == s].sum()) for s in np.unique(sequence)])
    truncated = np.minimum(raw, cap)
    expected = {
        "kl_k1": (behavior - proximal).mean(),
        "kl_k3": (raw - 1 - np.log(raw)).mean(),
        "chi2_token": (raw**2).mean() - 1,
        "chi2_sequence": (products**2).mean() - 1,
        "ess": raw.sum() ** 2 / (24 * (raw**2).sum()),
        "ess_truncated": truncated.sum() ** 2 / (24 * (truncated**2).sum()),
        "weight_mean": raw.mean(),
        "weight_max": raw.max(),
        "above_cap": (raw > cap).mean(),
        "behavior_perplexity": np.exp(-behavior.mean()),
        "proximal_perplexity": np.exp(-proximal.mean()),
        "perplexity_ratio": np.exp(-proximal.mean()) / np.exp(-behavior.mean()),
    }
    assert correction_metrics(sums, maxima) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_metrics_of_one_token_and_of_none():
    one = metrics_of(correction_statistics(f64([-1.0]), f64([-1.0]), f64([0.0]), cap=1.0))
    assert one == pytest.approx(
        {
            "kl_k1": 0, "kl_k3": 0, "chi2_token": 0, "chi2_sequence": 0, "ess": 1, "ess_truncated": 1,
            "weight_mean": 1, "weight_max": 1, "above_cap": 0, "behavior_perplexity": math.e,
            "proximal_perplexity": math.e, "perplexity_ratio": 1,
        }
    )  # fmt: skip
    none = metrics_of(correction_statistics(f64([]), f64([]), f64([]), cap=1.0))
    assert none == {
        "kl_k1": 0, "kl_k3": 0, "chi2_token": -1, "chi2_sequence": -1, "ess": 1, "ess_truncated": 1,
        "weight_mean": 0, "weight_max": -math.inf, "above_cap": 0, "behavior_perplexity": 1,
        "proximal_perplexity": 1, "perplexity_ratio": 1,
    }  # fmt: skip


def test_the_sample_size_of_small_weights():
    columns = f64(np.log([0.1, 0.2])), f64([0.0, 0.0])
    metrics = metrics_of(correction_statistics(*columns, f64([0.0]), cap=0.15))
    assert metrics["ess"] == pytest.approx(0.3**2 / (2 * 0.05))
    assert metrics["ess_truncated"] == pytest.approx(0.25**2 / (2 * 0.0325))
    assert [metrics[name] for name in ("above_cap", "weight_max")] == pytest.approx([0.5, 0.2])


def test_a_perplexity_beyond_all_floats_is_infinite():
    metrics = metrics_of(correction_statistics(f64([-1e4]), f64([-1.0]), f64([-1e4]), cap=1.0))
    assert metrics["proximal_perplexity"] == metrics["perplexity_ratio"] == math.inf


def test_equal_policies_have_divergence_0_and_full_sample_size():
    same = f64([-1.0, -0.3, -7.0])
    metrics = metrics_of(correction_statistics(same, same, f64([0.0, 0.0]), cap=2.0))
    zero = {"kl_k1", "kl_k3", "chi2_token", "chi2_sequence", "above_cap"}
    assert {name for name, value in metrics.items() if value == 0.0} == zero
    assert {
        metrics[name] for name in ("ess", "ess_truncated", "weight_mean", "weight_max", "perplexity_ratio")
    } == {1.0}
    assert all(estimator(same, same).tolist() == [0.0, 0.0, 0.0] for estimator in KL_ESTIMATORS.values())


# ------------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RejectionConfig(statistic="k2", lower=0.5, upper=1.0), "no lower bound"),
        (lambda: RejectionConfig(), "rejects nothing"),
        (lambda: RejectionConfig(lower=2.0, upper=0.5), "lower=2 is not below upper=0.5"),
        (lambda: CorrectionConfig(floor=2.0), "floor=2 is not below cap=2"),
    ],
)
def test_stages_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


STAGES = {
    "reject": {"far": {"upper": 2.0}},
    "m2po_threshold": 0.04,
    "self_normalize": True,
    "opsm_delta": 0.1,
}
IDLE = {
    "bypass": ["self_normalize"],
    "on_policy": ["reject", "m2po_threshold", "self_normalize"],
    "decoupled": [],
}


@pytest.mark.parametrize("mode", IDLE)
@pytest.mark.parametrize("stage", STAGES)
def test_stages_that_could_never_act_are_refused(mode, stage):
    def build():
        algorithm = AlgorithmConfig(mode=mode, correction=CorrectionConfig(**{stage: STAGES[stage]}))
        return Config(buffer=BufferConfig(max_staleness=0), algorithm=algorithm)

    if stage in IDLE[mode]:
        with pytest.raises(ValueError, match=f"algorithm.correction.{stage} .* algorithm.mode={mode}"):
            build()
    else:
        assert build().policy_mode == mode
