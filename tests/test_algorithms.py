"""Laws of the pure functions between rewards and the loss: independent float64 loops, finite differences, invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from agentrl.algorithms.advantages import ESTIMATORS, grpo
from agentrl.algorithms.aggregation import RULES, Aggregation, UpdateCounts, token_scales
from agentrl.algorithms.corrections import correction_metrics, correction_statistics, token_weights
from agentrl.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from agentrl.algorithms.policy_losses import POLICY_LOSSES, ClipConfig, ppo_clip

CLIP = ClipConfig(low=0.2, high=0.28, dual=3.0)
seeds = st.integers(0, 2**31)


def f64(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- advantages

grouped_rewards = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5])), min_size=1, max_size=24)


@given(grouped_rewards)
def test_grpo_equals_a_loop(pairs):
    ids, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    expected = []
    for group, reward in pairs:
        members = [r for g, r in pairs if g == group]
        constant = len(set(members)) == 1
        mean = sum(members) / len(members)
        expected.append(
            0.0 if constant else (reward - mean) / (math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1)) + 1e-6)
        )
    np.testing.assert_allclose(grpo(f64(rewards), torch.tensor(ids)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 9))
def test_singleton_and_constant_groups_have_advantage_exactly_0(name, reward, size):
    assert ESTIMATORS[name](f64([reward] * size), torch.full((size,), 7)).tolist() == [0.0] * size


@pytest.mark.parametrize("name", ESTIMATORS)
@given(pairs=grouped_rewards, seed=seeds)
def test_advantages_do_not_depend_on_order_or_labels(name, pairs, seed):
    ids, rewards = torch.tensor([g for g, _ in pairs]), f64([r for _, r in pairs])
    order = torch.tensor(np.random.default_rng(seed).permutation(len(pairs)))
    torch.testing.assert_close(ESTIMATORS[name](rewards[order], 1000 - ids[order]), ESTIMATORS[name](rewards, ids)[order])


@pytest.mark.parametrize(("rewards", "ids"), [([1.0, math.nan], [0, 0]), ([1.0], [0, 0])])
def test_bad_rewards_are_refused(rewards, ids):
    with pytest.raises(ValueError, match=r"not finite|one length"):
        grpo(f64(rewards), torch.tensor(ids))


# -------------------------------------------------------------------------------------------------- policy losses


def ppo_loop(policy, proximal, advantages, clip):
    losses = []
    for pi, prox, a in zip(policy, proximal, advantages, strict=True):
        rho = math.exp(max(-20.0, min(20.0, pi - prox)))
        loss = max(-rho * a, -max(1 - clip.low, min(1 + clip.high, rho)) * a)
        losses.append(min(loss, -clip.dual * a) if a < 0 and clip.dual is not None else loss)
    return losses


@pytest.mark.parametrize("dual", [None, 1.5])
@given(seed=seeds)
def test_ppo_clip_equals_a_loop(dual, seed):
    rng = np.random.default_rng(seed)
    policy, proximal, advantages = rng.normal(-2, 1, 20), rng.normal(-2, 1, 20), rng.normal(0, 1, 20)
    clip = ClipConfig(0.2, 0.28, dual)
    result = ppo_clip(f64(policy), f64(proximal), f64(advantages), clip=clip)
    np.testing.assert_allclose(result.losses_A, ppo_loop(policy, proximal, advantages, clip), rtol=1e-12)
    rho = np.exp(policy - proximal)
    np.testing.assert_array_equal(result.is_clipped_high_A, (rho > 1.28) & (advantages > 0))
    np.testing.assert_array_equal(result.is_clipped_low_A, (rho < 0.8) & (advantages < 0))
    np.testing.assert_array_equal(result.is_clipped_dual_A, (rho > (dual or np.inf)) & (advantages < 0))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradients_of_policy_losses_by_finite_differences(name):
    rng = np.random.default_rng(0)
    proximal, advantages = f64(rng.normal(-2, 1, 30)), f64(rng.normal(0, 1, 30))
    policy = (proximal + f64(rng.normal(0, 0.6, 30))).requires_grad_()
    assert gradcheck(lambda p: POLICY_LOSSES[name](p, proximal, advantages, clip=CLIP).losses_A, policy)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_gradient_flows_into_the_proximal_policy(name):
    logprobs = f64([-1.0, -2.0]).requires_grad_()
    loss = POLICY_LOSSES[name](logprobs, logprobs.detach(), f64([1.0, -1.0]), clip=CLIP).losses_A.sum()
    # With proximal := sg(policy) the ratio is exactly 1 and the gradient is that of REINFORCE, -A.
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-1.0, 1.0]


def test_extreme_log_ratios_stay_finite():
    policy = f64([-1e6, 0.0]).requires_grad_()
    loss = ppo_clip(policy, f64([0.0, -1e6]), f64([1.0, -1.0]), clip=CLIP).losses_A
    assert torch.isfinite(loss).all()
    assert torch.isfinite(torch.autograd.grad(loss.sum(), policy)[0]).all()


# ---------------------------------------------------------------------------------------------------- corrections


@given(seed=seeds, cap=st.floats(0.5, 5.0))
def test_weights_and_their_metrics_equal_a_loop_however_the_batch_is_cut(seed, cap):
    rng = np.random.default_rng(seed)
    behavior, proximal, sequence = rng.normal(-2, 1, 24), rng.normal(-2, 1, 24), np.sort(rng.integers(0, 5, 24))
    raw = np.exp(proximal - behavior)
    np.testing.assert_allclose(token_weights(f64(proximal), f64(behavior), cap=cap), np.minimum(raw, cap), rtol=1e-12)

    parts = [correction_statistics(*(f64(c[sequence == s]) for c in (proximal, behavior, sequence)), cap=cap) for s in range(5)]
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


def test_the_cap_bounds_proximal_over_behavior_and_not_its_inverse():
    behavior = f64([-1.0, -1.0])
    proximal = f64([-1.0 + math.log(4), -1.0 - math.log(4)])  # 4 times as likely as when sampled, and a quarter
    np.testing.assert_allclose(token_weights(proximal, behavior, cap=2.0), [2.0, 0.25])


def test_equal_policies_have_weight_1_divergence_0_and_full_sample_size():
    same = f64([-1.0, -0.3, -7.0])
    assert token_weights(same, same, cap=2.0).tolist() == [1.0, 1.0, 1.0]
    assert ppo_clip(same, same, f64([1.0, 1.0, -1.0]), clip=CLIP).ratios_A.tolist() == [1.0, 1.0, 1.0]
    statistics = correction_statistics(same, same, torch.tensor([0, 0, 1]), cap=2.0)
    metrics = correction_metrics({k: float(v) for k, v in statistics.sums.items()}, {k: float(v) for k, v in statistics.maxima.items()})
    zero = {"kl_k1", "kl_k3", "chi2_token", "chi2_sequence", "above_cap"}
    assert {name for name, value in metrics.items() if value == 0.0} == zero
    assert {metrics[name] for name in ("ess", "ess_truncated", "weight_mean", "weight_max", "perplexity_ratio")} == {1.0}
    assert all(estimator(same, same).tolist() == [0.0, 0.0, 0.0] for estimator in KL_ESTIMATORS.values())


# ------------------------------------------------------------------------------------------------------------- KL


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


@pytest.mark.parametrize("estimator", [k1, k2, k3, KL_ESTIMATORS["abs"]])
def test_gradients_of_kl_by_finite_differences(estimator):
    rng = np.random.default_rng(1)
    ref = f64(rng.normal(-2, 1, 10))
    assert gradcheck(lambda p: estimator(p, ref), f64(rng.normal(-2, 1, 10)).requires_grad_())


def test_k3_k2grad_has_the_gradient_of_k2():
    policy, ref = f64([-1.0, -2.5]).requires_grad_(), f64([-2.0, -1.0])
    gradient = torch.autograd.grad(KL_ESTIMATORS["k3_k2grad"](policy, ref).sum(), policy)[0]
    torch.testing.assert_close(gradient, (policy - ref).detach())


# ---------------------------------------------------------------------------------------------------- aggregation


@pytest.mark.parametrize("rule", RULES)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), cut=st.integers(0, 6), empty=st.integers(0, 2), seed=seeds)
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


def test_aggregation_is_checked_when_built():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        Aggregation("mean")
    with pytest.raises(ValueError, match="constant_length"):
        Aggregation("constant")
