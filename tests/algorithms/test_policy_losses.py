"""Laws of every registered policy loss: independent float64 loops, finite differences, invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.corrections import LEVELS
from agentrl.algorithms.kl import KL_ESTIMATORS, off_policy_kl
from agentrl.algorithms.policy_losses import (
    PolicyLoss,
    PolicyTokens,
    gspo,
    opsm_keeps,
    ppo_clip,
    reinforce,
)
from agentrl.algorithms.rules import ClipConfig, WeightRule
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.transports import transport_named
from agentrl.errors import PluginError
from agentrl.learner.policy_loss import bind_policy_loss
from parts.built_in import POLICY_LOSSES

OPTIONS = {
    "ppo_clip": {"clip": ClipConfig(0.2, 0.28, 3.0)},
    "gspo": {"clip": ClipConfig(0.1, 0.15)},
    "gmpo": {"clip": ClipConfig(0.4, 0.5)},
    "cispo": {"clip": ClipConfig(0.2, 0.28)},
    "reinforce": {"weight": WeightRule("token", cap=1.5, floor=0.6)},
    "gpg": {},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.5},
    "clip_cov": {"clip": ClipConfig(0.2, 0.28, 3.0)},
    "kl_cov": {"coefficient": 0.7},
    "dppo_tv": {"delta_low": 0.05, "delta_high": 0.1, "cap": 1.6},
}
seeds = st.integers(0, 2**31)


def f64(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def rho(pi, prox):
    return math.exp(max(-20.0, min(20.0, pi - prox)))


def clipped(ratio, a, low, high, dual=None):
    loss = max(-ratio * a, -max(1 - low, min(1 + high, ratio)) * a)
    return min(loss, -dual * a) if a < 0 and dual else loss


# One loop per loss, from its formula. `pi` moves, `held` is the policy where the formula stops the gradient;
# `own` are the indices of the token's sequence.


def ppo_clip_loop(t, pi, held, prox, a, own, chosen):
    return clipped(rho(pi[t], prox[t]), a[t], 0.2, 0.28, 3.0)


def gspo_loop(t, pi, held, prox, a, own, chosen):
    mean = sum(held[u] - prox[u] for u in own) / len(own)
    return clipped(math.exp(mean) * math.exp(pi[t] - held[t]), a[t], 0.1, 0.15)


def gmpo_loop(t, pi, held, prox, a, own, chosen):
    logs = [min(pi[u] - prox[u], 0.5) if a[u] > 0 else max(pi[u] - prox[u], -0.4) for u in own]
    return -math.exp(sum(logs) / len(logs)) * a[t]


def cispo_loop(t, pi, held, prox, a, own, chosen):
    return -max(0.8, min(1.28, rho(held[t], prox[t]))) * a[t] * pi[t]


def reinforce_loop(t, pi, held, prox, a, own, chosen):
    return -max(0.6, min(1.5, rho(held[t], prox[t]))) * a[t] * pi[t]


def gpg_loop(t, pi, held, prox, a, own, chosen):
    return -a[t] * pi[t]


def sapo_loop(t, pi, held, prox, a, own, chosen):
    tau = 1.0 if a[t] > 0 else 1.5
    return -4 / tau / (1 + math.exp(-tau * (rho(pi[t], prox[t]) - 1))) * a[t]


def clip_cov_loop(t, pi, held, prox, a, own, chosen):
    return 0.0 if chosen[t] else ppo_clip_loop(t, pi, held, prox, a, own, chosen)


def kl_cov_loop(t, pi, held, prox, a, own, chosen):
    return -rho(pi[t], prox[t]) * a[t] + (0.7 * abs(pi[t] - prox[t]) if chosen[t] else 0.0)


def dppo_tv_loop(t, pi, held, prox, a, own, chosen):
    moved = math.exp(held[t]) - math.exp(prox[t])
    is_out = (a[t] > 0 and moved > 0.1) or (a[t] < 0 and moved < -0.05)
    return 0.0 if is_out else -min(1.6, rho(held[t], prox[t])) * a[t] * pi[t]


LOOPS = {name.removesuffix("_loop"): loop for name, loop in globals().items() if name.endswith("_loop")}


def case(seed, num_tokens=24, spread=0.5):
    """Random tokens: policy, proximal, advantages (never 0), sequence labels in any order, a selection."""
    rng = np.random.default_rng(seed)
    proximal = -rng.exponential(1.5, num_tokens) - 0.05
    policy = np.minimum(proximal + rng.normal(0, spread, num_tokens), -0.01)
    advantages = rng.normal(0, 1, num_tokens) + 1e-3
    return policy, proximal, advantages, rng.integers(0, 4, num_tokens) * 7, rng.random(num_tokens) < 0.3


def tokens_of(policy, proximal, advantages, ids, chosen):
    policy = policy if isinstance(policy, torch.Tensor) else f64(policy)
    return PolicyTokens(policy, f64(proximal), f64(advantages), torch.tensor(ids), torch.tensor(chosen))


def loop(name, policy, held, proximal, advantages, ids, chosen):
    owns = [np.flatnonzero(ids == ids[t]) for t in range(len(ids))]
    return np.array(
        [LOOPS[name](t, policy, held, proximal, advantages, owns[t], chosen) for t in range(len(ids))]
    )


def loss_of(name, *columns) -> PolicyLoss:
    return POLICY_LOSSES[name](tokens_of(*columns), **OPTIONS[name])


def test_every_loss_has_options_and_a_loop_and_may_be_configured():
    assert set(POLICY_LOSSES) == set(OPTIONS) == set(LOOPS)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=seeds)
@settings(max_examples=25)
def test_losses_equal_a_loop(name, seed):
    policy, *rest = case(seed)
    np.testing.assert_allclose(
        loss_of(name, policy, *rest).losses_A, loop(name, policy, policy, *rest), rtol=1e-11, atol=1e-13
    )


def bounds_that_decide(name, t, pi, prox, a, own, chosen):
    """Return which of (low, high, dual) decided the loss of a token, from the formulas."""
    is_up, ratio = a[t] > 0, rho(pi[t], prox[t])
    if name == "gspo":
        ratio = math.exp(sum(pi[u] - prox[u] for u in own) / len(own))
    moved = math.exp(pi[t]) - math.exp(prox[t])
    found = {
        "ppo_clip": (not is_up and ratio < 0.8, is_up and ratio > 1.28, not is_up and ratio > 3),
        "gspo": (not is_up and ratio < 0.9, is_up and ratio > 1.15, False),
        "gmpo": (not is_up and math.log(ratio) < -0.4, is_up and math.log(ratio) > 0.5, False),
        "cispo": (ratio < 0.8, ratio > 1.28, False),
        "dppo_tv": (not is_up and moved < -0.05, is_up and moved > 0.1, False),
        "reinforce": (ratio < 0.6, ratio > 1.5, False),
    }
    if name == "clip_cov":
        return (False,) * 3 if chosen[t] else found["ppo_clip"]
    return found.get(name, (False,) * 3)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_tokens_on_which_a_bound_decides_are_those_of_the_formula(name):
    policy, *rest = case(11, num_tokens=200, spread=1.0)
    proximal, advantages, ids, chosen = rest
    loss = loss_of(name, policy, *rest)
    found = torch.stack([loss.is_clipped_low_A, loss.is_clipped_high_A, loss.is_clipped_dual_A], 1)
    owns = [np.flatnonzero(ids == own) for own in ids]
    expected = [
        bounds_that_decide(name, t, policy, proximal, advantages, owns[t], chosen) for t in range(len(ids))
    ]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradients_equal_finite_differences_of_the_loop(name):
    policy, *rest = case(3)
    scales = np.random.default_rng(4).random(len(policy)) + 0.5  # as an aggregation would weigh tokens
    moving = f64(policy).requires_grad_()
    gradient = torch.autograd.grad((f64(scales) * loss_of(name, moving, *rest).losses_A).sum(), moving)[0]
    step, expected = 1e-6, []
    for t in range(len(policy)):
        up, down = policy.copy(), policy.copy()
        up[t] += step
        down[t] -= step
        difference = loop(name, up, policy, *rest) - loop(name, down, policy, *rest)
        expected.append(float(scales @ difference) / (2 * step))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_where_all_policies_are_one_the_gradient_is_that_of_reinforce(name):
    """Ratio 1, no bound reached, and in each sequence the gradient is -A (laws 9 and 12)."""
    _, proximal, advantages, ids, _ = case(5)
    ids = np.arange(
        len(ids)
    )  # each token a sequence of its own: a ratio of a sequence is then one of a token
    moving = f64(proximal).requires_grad_()
    loss = loss_of(name, moving, proximal, advantages, ids, np.zeros(len(ids), bool))
    assert loss.ratios_A.tolist() == [1.0] * len(ids)
    assert not (loss.is_clipped_low_A | loss.is_clipped_high_A | loss.is_clipped_dual_A).any()
    np.testing.assert_allclose(torch.autograd.grad(loss.losses_A.sum(), moving)[0], -advantages, rtol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=seeds, cut=st.integers(0, 4))
@settings(max_examples=15)
def test_losses_do_not_depend_on_the_split_into_microbatches_or_on_the_order(name, seed, cut):
    columns = case(seed)
    whole = loss_of(name, *columns).losses_A.numpy()
    order = np.random.default_rng(seed).permutation(len(whole))
    np.testing.assert_allclose(loss_of(name, *(c[order] for c in columns)).losses_A, whole[order], rtol=1e-12)
    part = columns[3] < cut * 7  # whole sequences
    for here in (part, ~part):
        np.testing.assert_allclose(
            loss_of(name, *(c[here] for c in columns)).losses_A, whole[here], rtol=1e-12
        )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_tokens_and_extreme_log_ratios_stay_finite(name):
    ids, chosen = np.array([0, 1, 2, 3]), np.array([True, False, True, False])
    moving = f64([-1e4, -0.01, -1e4, -0.01]).requires_grad_()
    loss = loss_of(name, moving, [-0.01, -1e4, -0.01, -1e4], [1.0, -1.0, -1.0, 1.0], ids, chosen)
    assert torch.isfinite(loss.losses_A).all()
    assert torch.isfinite(torch.autograd.grad(loss.losses_A.sum(), moving)[0]).all()
    nothing = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = PolicyTokens(
        nothing, f64([]), f64([]), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    )
    assert POLICY_LOSSES[name](empty, **OPTIONS[name]).losses_A.sum().backward() is None


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_gradient_flows_into_the_proximal_policy(name):
    policy, proximal, advantages, ids, chosen = case(6)
    moving, proximal = f64(policy).requires_grad_(), f64(proximal).requires_grad_()
    tokens = PolicyTokens(moving, proximal, f64(advantages), torch.tensor(ids), torch.tensor(chosen))
    POLICY_LOSSES[name](tokens, **OPTIONS[name]).losses_A.sum().backward()
    assert proximal.grad is None


@given(seed=seeds)
def test_clip_masks_tell_where_a_bound_decided(seed):
    policy, proximal, advantages, ids, chosen = case(seed, spread=1.0)
    ratios = np.exp(policy - proximal)
    loss = loss_of("ppo_clip", policy, proximal, advantages, ids, chosen)
    np.testing.assert_array_equal(loss.is_clipped_high_A, (ratios > 1.28) & (advantages > 0))
    np.testing.assert_array_equal(loss.is_clipped_low_A, (ratios < 0.8) & (advantages < 0))
    np.testing.assert_array_equal(loss.is_clipped_dual_A, (ratios > 3.0) & (advantages < 0))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo"])
def test_no_bound_decides_on_a_token_without_advantage(name):
    for log_ratio in (-5.0, 5.0):
        loss = loss_of(
            name, np.array([log_ratio]), np.array([0.0]), np.array([0.0]), np.array([0]), np.array([False])
        )
        assert not (loss.is_clipped_low_A | loss.is_clipped_high_A | loss.is_clipped_dual_A).any()


def test_dual_clip_may_be_off():
    tokens = tokens_of([0.0], [-2.0], [-1.0], np.array([0]), np.array([False]))
    assert ppo_clip(tokens, clip=ClipConfig(0.2, 0.2)).losses_A.item() == pytest.approx(math.exp(2))


def test_a_sequence_ratio_is_one_number_per_sequence():
    policy, proximal, advantages, ids, chosen = case(8)
    ratios = gspo(
        tokens_of(policy, proximal, advantages, ids, chosen), clip=ClipConfig(0.1, 0.1)
    ).ratios_A.numpy()
    for label in np.unique(ids):
        expected = np.exp((policy - proximal)[ids == label].mean())
        np.testing.assert_allclose(ratios[ids == label], expected, rtol=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_the_weight_of_reinforce_is_the_ratio_of_a_token_or_a_sequence_within_its_bounds(level, outside):
    policy, proximal, advantages, ids, chosen = case(13, spread=0.4)
    logs, expected = policy - proximal, []
    for t, own in ((t, logs[ids == ids[t]]) for t in range(len(logs))):
        raw = math.exp({"token": logs[t], "sequence": own.sum(), "geometric": own.mean()}[level])
        inside = min(max(raw, 0.8), 1.25)
        expected.append(-(raw if raw == inside else 0.0 if outside == "mask" else inside) * advantages[t])
    moving = f64(policy).requires_grad_()
    loss = reinforce(
        tokens_of(moving, proximal, advantages, ids, chosen), weight=WeightRule(level, 1.25, 0.8, outside)
    )
    np.testing.assert_allclose(loss.losses_A.detach(), np.array(expected) * policy, rtol=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(loss.losses_A.sum(), moving)[0], expected, rtol=1e-12)


def test_opsm_drops_what_is_bad_and_less_likely_than_when_it_was_sampled():
    ids = np.array([0, 0, 1, 1, 2, 2])
    policy = [-2.0, -1.4, -2.0, -2.0, -1.0, -1.0]
    behavior = f64([-1.0] * 6)  # mean_t(behavior - policy): 0.7, 1.0, 0
    advantages = [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    at_the_first_update = tokens_of(
        policy, policy, advantages, ids, ids > 9
    )  # where proximal and policy are one
    assert opsm_keeps(at_the_first_update, behavior, delta=0.6).tolist() == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert opsm_keeps(at_the_first_update, behavior, delta=0.8).all()


# Each bound is the very number that the token has, so that rounding decides nothing.
UP, DOWN = math.exp(0.25), math.exp(-0.25)
AT_THE_BOUND = {
    "gmpo": {"clip": ClipConfig(0.25, 0.25)},
    "cispo": {"clip": ClipConfig(1 - DOWN, UP - 1)},
    "reinforce": {"weight": WeightRule("token", cap=UP, floor=DOWN)},
    "ppo_clip": {"clip": ClipConfig(1 - DOWN, UP - 1, UP)},
    "dppo_tv": {
        "delta_low": math.exp(-1.0) - math.exp(-1.25),
        "delta_high": math.exp(-0.75) - math.exp(-1.0),
    },
}


@pytest.mark.parametrize("name", AT_THE_BOUND)
def test_a_token_at_a_bound_is_within_it_and_one_beyond_it_is_not(name):
    """And a token without an advantage has a loss of 0, wherever it is."""
    for further, decides in ((0.0, False), (1e-6, True)):
        policy = np.array([-1.25 - further, -0.75 + further])
        columns = policy, np.full(2, -1.0), np.array([-1.0, 1.0]), np.arange(2), np.zeros(2, bool)
        loss = POLICY_LOSSES[name](tokens_of(*columns), **AT_THE_BOUND[name])
        assert loss.is_clipped_low_A.tolist() == [decides, False]
        assert loss.is_clipped_high_A.tolist() == [False, decides]
        if name == "dppo_tv":
            assert (loss.losses_A == 0).tolist() == [decides] * 2
        away = np.array([-0.75 + further, -1.25 - further])
        dual = POLICY_LOSSES[name](tokens_of(away, *columns[1:]), **AT_THE_BOUND[name]).is_clipped_dual_A
        assert dual.tolist() == [decides and name == "ppo_clip", False]


def test_without_an_advantage_no_probability_has_moved_too_far():
    for policy in (-5.0, -0.01):
        tokens = tokens_of([policy], [-1.0], [0.0], np.array([0]), np.array([False]))
        loss = POLICY_LOSSES["dppo_tv"](tokens, delta_low=0.05, delta_high=0.1)
        assert not (loss.is_clipped_low_A | loss.is_clipped_high_A).any()


def test_the_first_tokens_of_a_loss_are_those_of_every_column():
    loss = loss_of("ppo_clip", *case(14, spread=1.0))
    for name in ("losses_A", "ratios_A", "is_clipped_low_A", "is_clipped_high_A", "is_clipped_dual_A"):
        assert torch.equal(getattr(loss.first(7), name), getattr(loss, name)[:7])


@pytest.mark.parametrize(
    ("advantage", "drift", "is_kept"), [(-1, 0.5, True), (-1, 0.5625, False), (0, 9, True)]
)
def test_opsm_drops_only_what_drifted_by_more_than_delta_and_is_bad(advantage, drift, is_kept):
    tokens = tokens_of([-1.0 - drift], [-1.0], [float(advantage)], np.array([0]), np.array([False]))
    assert opsm_keeps(tokens, f64([-1.0]), delta=0.5).tolist() == [is_kept]


# ---------------------------------------------------------------------------------------------- by the config


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_config_binds_every_loss(name):
    aggregation = "sequence_mean_token_mean" if name in ("gspo", "gmpo") else "token_mean"
    loss = bind_policy_loss(AlgorithmConfig(policy_loss=name, aggregation=aggregation))(tokens_of(*case(1)))
    assert torch.isfinite(loss.losses_A).all()


def test_a_loss_of_your_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from agentrl.algorithms.policy_losses import PolicyLoss\n"
        "def half(tokens, *, factor):\n"
        "    return PolicyLoss.of(-factor * tokens.advantages * tokens.policy, tokens.log_ratios().exp())\n"
    )
    algorithm = AlgorithmConfig(policy_loss=f"{tmp_path}/mine.py:half", loss_options={"factor": 0.5})
    policy, _, advantages, _, _ = columns = case(2)
    np.testing.assert_allclose(
        bind_policy_loss(algorithm)(tokens_of(*columns)).losses_A, -0.5 * advantages * policy
    )
    with pytest.raises(PluginError, match="missing"):
        bind_policy_loss(AlgorithmConfig(policy_loss=f"{tmp_path}/mine.py:missing"))
    (tmp_path / "object.py").write_text(
        "from agentrl.config.losses import Loss\nLOSS = Loss('mine', 'nowhere')\n"
    )
    with pytest.raises(PluginError, match="is a Loss: register it as an entry point, or name its function"):
        bind_policy_loss(AlgorithmConfig(policy_loss=f"{tmp_path}/object.py:LOSS"))


def test_a_loss_that_names_no_place_and_a_transport_that_is_none_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "odd_module.py").write_text(
        "from agentrl.config.losses import Loss\nLOSS = Loss('odd', 'nowhere')\nTRANSPORT = print\n"
    )
    info = tmp_path / "odd_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[agentrl.policy_losses]\nodd = odd_module:LOSS\n[agentrl.transports]\nodd = odd_module:TRANSPORT\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="'nowhere' is no place of a function; write module:name"):
        bind_policy_loss(AlgorithmConfig(policy_loss="odd"))
    with pytest.raises(PluginError, match="'odd' is builtin_function_or_method, not a Transport"):
        transport_named("odd")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_loss": "gmpo"}, "aggregation=sequence_mean_token_mean"),
        ({"policy_loss": "ppo"}, "unknown policy loss 'ppo'; use one of cispo"),
        ({"loss_options": {"x": 1}}, "of your own"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**changes)


# ---------------------------------------------------------------------------------------------- KL off policy


def test_k3_times_the_ratio_has_the_exact_gradient_of_the_divergence():
    """Expectations over all tokens of a small vocabulary, sampled by a proximal policy that is not the
    current one.
    """
    rng = np.random.default_rng(9)
    logits, proximal, ref = (
        f64(rng.normal(size=6)).requires_grad_(),
        *(torch.log_softmax(f64(rng.normal(size=6)), 0) for _ in range(2)),
    )
    policy = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    for name in ("k3", "k2", "k3_k2grad"):
        estimate = (proximal.exp() * off_policy_kl(name, policy, ref, proximal)).sum()
        torch.testing.assert_close(
            torch.autograd.grad(estimate, logits, retain_graph=True)[0], exact, rtol=1e-9, atol=1e-12
        )
    biased = (proximal.exp() * KL_ESTIMATORS["k3"](policy, ref)).sum()
    assert not torch.allclose(torch.autograd.grad(biased, logits)[0], exact, rtol=1e-2)
