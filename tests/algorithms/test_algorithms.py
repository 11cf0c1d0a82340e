"""Laws of the pure functions between rewards and the loss: independent float64 loops, finite differences,
invariances.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from agentrl.algorithms.aggregation import RULES, Aggregation, UpdateCounts, token_scales
from agentrl.algorithms.kl import KL_ESTIMATORS, k1
from agentrl.algorithms.log_ratios import ROUNDING, distance

seeds = st.integers(0, 2**31)


def f64(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


# --------------------------------------------------------------------------------------------------------- KL


@given(seed=seeds)
def test_kl_estimators_equal_their_formulas(seed):
    rng = np.random.default_rng(seed)
    policy, ref = rng.normal(-2, 1, 16), rng.normal(-2, 1, 16)
    expected = {
        "k2": (policy - ref) ** 2 / 2,
        "k3": np.exp(ref - policy) - 1 - (ref - policy),
        "abs": np.abs(policy - ref),
        "k3_k2grad": np.exp(ref - policy) - 1 - (ref - policy),
    }
    for name, estimator in KL_ESTIMATORS.items():
        np.testing.assert_allclose(estimator(f64(policy), f64(ref)), expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", sorted({"k1", *KL_ESTIMATORS} - {"k3_k2grad"})
)  # whose gradient is another's, on purpose
def test_gradients_of_kl_by_finite_differences(name):
    rng, estimator = np.random.default_rng(1), {"k1": k1, **KL_ESTIMATORS}[name]
    ref = f64(rng.normal(-2, 1, 10))
    assert gradcheck(lambda p: estimator(p, ref), f64(rng.normal(-2, 1, 10)).requires_grad_())


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("ratio", [-1e4, -30.0, -20.5, -5.0, -1e-3, 1e-3, 5.0, 20.5, 30.0, 1e4])
def test_no_estimator_ever_pushes_the_policy_away_from_the_reference(name, ratio):
    """Its gradient has the sign of the log-ratio, or is 0 where a bound was reached; the value is never
    negative and finite.
    """
    policy = f64([ratio - 1e5]).requires_grad_()
    value = KL_ESTIMATORS[name](policy, f64([-1e5]))
    gradient = torch.autograd.grad(value.sum(), policy)[0].item()
    assert 0 <= value.item() < 1e9
    assert gradient * ratio > 0 or (gradient == 0 and name == "k3" and abs(ratio) > 20)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_where_policy_and_reference_are_one_rounding_noise_has_no_gradient_that_counts(name):
    policy = f64([-1 + 1e-6, -1 - 1e-6, -1]).requires_grad_()
    gradient = torch.autograd.grad(KL_ESTIMATORS[name](policy, f64([-1.0] * 3)).sum(), policy)[0]
    np.testing.assert_allclose(gradient, 0, atol=1.1e-6)


def test_k3_k2grad_has_the_gradient_of_k2():
    policy, ref = f64([-1.0, -2.5]).requires_grad_(), f64([-2.0, -1.0])
    gradient = torch.autograd.grad(KL_ESTIMATORS["k3_k2grad"](policy, ref).sum(), policy)[0]
    torch.testing.assert_close(gradient, (policy - ref).detach())


# ------------------------------------------------------------------------------------------------ aggregation


@pytest.mark.parametrize("rule", RULES)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    empty=st.integers(0, 2),
    seed=seeds,
)
def test_aggregation_equals_its_formula_however_the_batch_is_cut(rule, lengths, cut, empty, seed):
    losses = [np.random.default_rng((seed, i)).normal(size=n) for i, n in enumerate(lengths)]
    num_sequences = len(lengths) + empty  # some sequences may have had all their tokens rejected
    expected = {
        "token_mean": sum(x.sum() for x in losses) / sum(lengths),
        "sequence_mean_token_sum": sum(x.sum() for x in losses) / num_sequences,
        "sequence_mean_token_mean": sum(x.mean() for x in losses) / num_sequences,
        "constant": sum(x.sum() for x in losses) / (num_sequences * 50),
    }[rule]
    counts = UpdateCounts(sum(lengths), num_sequences)
    total = 0.0
    for part in (losses[:cut], losses[cut:]):
        ids = torch.tensor([i for i, x in enumerate(part) for _ in x], dtype=torch.int64)
        flat = f64(np.concatenate([*part, np.zeros(0)]))
        total += float((token_scales(Aggregation(rule, 50), ids, counts, dtype=torch.float64) * flat).sum())
    assert total == pytest.approx(expected, rel=1e-9, abs=1e-12)


SCALES = {
    "token_mean": (1 / 2, 1 / 5),
    "sequence_mean_token_sum": (1 / 2, 1 / 2),
    "sequence_mean_token_mean": (1 / 4, 1 / 6),
    "constant": (1 / 20, 1 / 20),
}


@pytest.mark.parametrize("rule", RULES)
def test_tokens_that_were_rejected_count_only_if_they_are_to(rule):
    """Of three tokens one is rejected, and of another sequence both."""
    for denominator, expected in zip(("accepted", "original"), SCALES[rule], strict=True):
        aggregation = Aggregation(rule, 10, denominator)
        ids, original = torch.tensor([7, 7]), torch.tensor([7, 7, 7, 3, 3])
        scales = token_scales(
            aggregation, ids, UpdateCounts(2, 2, 5), dtype=torch.float32, original_ids=original
        )
        assert scales.dtype == torch.float32
        assert scales.tolist() == pytest.approx([expected] * 2)
        # where nothing is rejected, both are one
        scales = token_scales(aggregation, ids, UpdateCounts(2, 2), dtype=torch.float64)
        assert scales.tolist() == pytest.approx([SCALES[rule][0]] * 2)
        alone = token_scales(aggregation, ids[:1], UpdateCounts(1, 1), dtype=torch.float64)
        assert alone.tolist() == pytest.approx([0.1 if rule == "constant" else 1.0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("denominator", ["accepted", "original"])
def test_an_update_of_which_nothing_is_left_has_no_scales(rule, denominator):
    nothing = torch.zeros(0, dtype=torch.int64)
    for counts in (UpdateCounts(0, 0), UpdateCounts(0, 0, 0)):
        scales = token_scales(Aggregation(rule, 10, denominator), nothing, counts, dtype=torch.float64)
        assert scales.tolist() == []


def test_a_distance_begins_where_rounding_ends():
    assert distance(f64([ROUNDING, -ROUNDING, 1.01 * ROUNDING, -1.01 * ROUNDING])).tolist() == pytest.approx(
        [0.0, 0.0, 1.01 * ROUNDING, 1.01 * ROUNDING], abs=1e-12
    )


def test_aggregation_is_checked_when_built():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        Aggregation("mean")
    with pytest.raises(ValueError, match="constant_length"):
        Aggregation("constant")
