"""The value loss and the explained variance against loops written from the formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from agentrl.algorithms.compact import ActionBatch, AdvantageOptions
from agentrl.algorithms.values import explained_variance, value_loss, value_moments
from parts.built_in import ESTIMATORS

numbers = st.floats(-5, 5, width=32)


@given(arrays(np.float64, (3, 7), elements=numbers), st.none() | st.floats(0.01, 3.0))
def test_the_loss_equals_a_loop(columns, cliprange):
    values, old, returns = columns
    expected, clipped = [], []
    for v, o, r in zip(values, old, returns, strict=True):
        plain = 0.5 * (v - r) ** 2
        bounded = plain if cliprange is None else 0.5 * (min(max(v, o - cliprange), o + cliprange) - r) ** 2
        expected.append(max(plain, bounded))
        clipped.append(bounded > plain + 1e-9)
    found = value_loss(*map(torch.tensor, columns), cliprange=cliprange)
    np.testing.assert_allclose(found.losses_A, expected, atol=1e-12)
    assert not (np.array(clipped) & ~found.is_clipped_A.numpy()).any()


@pytest.mark.parametrize("cliprange", [None, 0.4])
def test_gradients_pass_finite_differences(cliprange):
    rng = np.random.default_rng(0)
    values, old, returns = (torch.tensor(rng.normal(size=40)) for _ in range(3))
    values.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, cliprange=cliprange).losses_A, values
    )


def test_a_value_within_its_bound_or_at_it_is_not_clipped():
    values = torch.tensor([0.5, -0.5, 0.25, 0.1], requires_grad=True)
    found = value_loss(values, torch.zeros(4), torch.tensor([3.0, -3.0, 3.0, 0.0]), cliprange=0.5)
    found.losses_A.sum().backward()
    assert not found.is_clipped_A.any()
    assert values.grad.tolist() == pytest.approx([-2.5, 2.5, -2.75, 0.1])


def test_beyond_the_bound_only_the_way_back_has_a_gradient():
    values = torch.tensor([2.0, 2.0], requires_grad=True)
    found = value_loss(values, torch.tensor([0.0, 0.0]), torch.tensor([3.0, -3.0]), cliprange=0.5)
    found.losses_A.sum().backward()
    assert found.is_clipped_A.tolist() == [True, False]
    assert values.grad.tolist() == [0.0, 5.0]


@given(arrays(np.float64, (2, 30), elements=numbers), st.floats(-100, 100))
def test_explained_variance_is_that_of_numpy_and_ignores_a_constant_error(columns, shift):
    values, returns = columns
    moments = {name: float(total) / 30 for name, total in value_moments(*map(torch.tensor, columns)).items()}
    found = explained_variance(**moments)
    if returns.var() < 1e-3:
        return
    assert found == pytest.approx(1 - (returns - values).var() / returns.var(), abs=1e-6)
    shifted = value_moments(torch.tensor(values + shift), torch.tensor(returns))
    assert explained_variance(
        **{name: float(total) / 30 for name, total in shifted.items()}
    ) == pytest.approx(found, abs=1e-6)


def test_returns_that_are_all_equal_have_no_variance_to_explain():
    moments = {
        name: float(total) / 3
        for name, total in value_moments(torch.tensor([1.0, 0.3, 0.1]), torch.full((3,), 0.7)).items()
    }
    assert math.isnan(explained_variance(**moments))


@pytest.mark.parametrize(
    ("mean", "square", "explained"),
    [(0.0, 0.0, math.nan), (1.0, 1 + 1e-13, math.nan), (1.0, 1 + 2**-33, 0.5), (0.0, 1e-200, 0.5)],
)
def test_a_variance_that_rounding_makes_is_none(mean, square, explained):
    found = explained_variance(
        error_mean=0.0, error_square=(square - mean**2) / 2, return_mean=mean, return_square=square
    )
    assert found == pytest.approx(explained, nan_ok=True)


@pytest.mark.parametrize("name", ["gae", "gae_turn"])
def test_with_a_critic_of_zeros_and_no_discount_advantages_are_returns(name):
    rewards = torch.tensor([0.0, 0.5, 0.0, 1.0, -1.0], dtype=torch.float64)
    batch = ActionBatch.of_tokens(
        rewards, torch.tensor([0, 0, 1, 1, 0]), torch.tensor([4, 1]), torch.tensor([0, 1]),
        torch.tensor([False, True]), 1,
        values_A=torch.zeros(5, dtype=torch.float64),
    )  # fmt: skip
    found = ESTIMATORS[name](batch, AdvantageOptions(1.0, 1.0, False, "zero", 1, 1.0, 1.0))
    assert found.returns_A is not None
    assert torch.equal(found.advantages_A, found.returns_A)
    expected = [1.5, 1.5, 1.0, 1.0, -1.0]  # what is still to be earned, from the token (or its turn) on
    assert found.advantages_A.tolist() == expected
