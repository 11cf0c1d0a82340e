"""Laws of a whole update, for every registered loss, weight, rejection, KL and aggregation: nothing but
sampled tokens counts.

The policy of these tests has no context: a token's log-probability is an entry of one table. So whatever
changes the loss or its gradient is the algorithm, not attention, and the laws hold to rounding. Between
trajectories and loss stand the real packing and correction.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.aggregation import RULES, UpdateCounts
from agentrl.algorithms.corrections import LEVELS
from agentrl.algorithms.kl import KL_ESTIMATORS
from agentrl.algorithms.rejection import STATISTICS
from agentrl.config.algorithm import AlgorithmConfig, ClipCovConfig, KLConfig, KLCovConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.batch import Sample, ScoredMicrobatch
from agentrl.learner.correction import Corrector
from agentrl.learner.loss import PolicyObjective
from agentrl.learner.packing import pack
from agentrl.learner.ranks import join_ranks, leave_ranks
from parts.built_in import POLICY_LOSSES
from parts.learner import reserved_port

VOCABULARY = 9
TEMPERATURE = 0.8
SEQUENCE_LOSSES = ("gspo", "gmpo")
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    port = reserved_port()
    join_ranks(LearnerConfig(), rank=0, address="127.0.0.1", port=port)
    yield
    leave_ranks()


# ------------------------------------------------------------------------------------- all that is registered


def algorithm(policy_loss="ppo_clip", **changes):
    aggregation = "sequence_mean_token_mean" if policy_loss in SEQUENCE_LOSSES else "token_mean"
    selective = {
        "clip_cov": ClipCovConfig(share=0.2, lower=-9.0, upper=9.0),
        "kl_cov": KLCovConfig(share=0.2),
    }
    options = {"aggregation": aggregation, "constant_length": 20, "entropy_coefficient": 0.05, **selective}
    return AlgorithmConfig(policy_loss=policy_loss, **(options | changes))


def bounds(statistic):
    return {"lower": 0.7, "upper": 1.4} if statistic == "k1" else {"upper": 0.1}


def variants():
    """Return every registered part of an update, each in a configuration of its own."""
    found = {f"loss-{name}": algorithm(name) for name in POLICY_LOSSES}
    found |= {f"aggregation-{rule}": algorithm(aggregation=rule) for rule in RULES}
    found |= {
        f"weight-{level}": algorithm(correction=CorrectionConfig(weight=level, self_normalize=True))
        for level in LEVELS
    }
    for statistic in STATISTICS:
        for level in ("token", "sequence_sum", "sequence_mean", "sequence_max"):
            rule = RejectionConfig(statistic=statistic, level=level, **bounds(statistic))
            found[f"reject-{statistic}-{level}"] = algorithm(
                correction=CorrectionConfig(reject={"far": rule})
            )
    for denominator in ("accepted", "original"):
        chain = CorrectionConfig(m2po_threshold=0.1, opsm_delta=0.02, denominator=denominator)
        found[f"chain-{denominator}"] = algorithm(correction=chain)
    for name in sorted(set(KL_ESTIMATORS) - {"k1"}):  # refused in the loss
        found[f"kl-{name}"] = algorithm(kl=KLConfig(coefficient=0.3, estimator=name))
        found[f"kl-{name}-off-policy"] = algorithm(
            kl=KLConfig(coefficient=0.3, estimator=name, off_policy_ratio=True)
        )
    return found


VARIANTS = variants()
WITH_HELD_PARTS = {f"loss-{name}" for name in ("gspo", "cispo", "reinforce", "dppo_tv")}
WITH_HELD_PARTS |= {"kl-k3_k2grad", "kl-k3_k2grad-off-policy", "kl-k2-off-policy", "kl-abs-off-policy"}


# -------------------------------------------------------------------------------------- a batch to learn from


@dataclass(frozen=True)
class Attempt:
    """What was sampled in one attempt, token by token; `is_rejected`: none of it may be learned from."""

    tokens: np.ndarray
    behavior: np.ndarray
    advantages: np.ndarray
    is_rejected: bool


class Table:
    """A policy whose next token depends on nothing: f64[V] logits."""

    device = torch.device("cpu")

    def __init__(self, seed, nudge=(0, 0.0)):
        logits = np.random.default_rng(seed).normal(0, 0.5, VOCABULARY)
        logits[nudge[0]] += nudge[1]
        self.logits = torch.tensor(logits, requires_grad=True)

    def score(self, microbatch, positions_A, targets_A, *, temperature):
        logprobs_V = torch.log_softmax(self.logits / temperature, 0)
        entropy = -(logprobs_V.exp() * logprobs_V).sum()
        return logprobs_V[targets_A], entropy.expand(len(targets_A))


PROXIMAL, REFERENCE = Table(2), Table(3)


def logprobs(table, tokens):
    with torch.no_grad():
        return torch.log_softmax(table.logits / TEMPERATURE, 0).numpy()[tokens]


def make_attempts(seed):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rng.integers(1, 7)):
        tokens = rng.integers(0, VOCABULARY, rng.integers(1, 9))
        behavior = logprobs(PROXIMAL, tokens) + rng.normal(0, 0.3, len(tokens))
        found.append(
            Attempt(tokens, behavior, rng.normal(size=len(tokens)) + 1e-3, bool(rng.random() < 0.25))
        )
    return found


def compact(index, attempt):
    """The attempt behind one token of prompt, without any other context."""
    return with_context(index, attempt, np.array([1, *[0] * len(attempt.tokens)]))


def with_context(index, attempt, num_before):
    """The attempt with so many context tokens before each of its tokens, and as the last number behind the
    end.
    """
    is_action = np.concatenate([[*[False] * n, True] for n in num_before])[:-1].astype(bool)

    def lay(values, dtype):
        column = np.zeros(len(is_action), dtype)
        column[is_action] = values
        return column

    tokens = np.where(is_action, lay(attempt.tokens, np.int32), 5).astype(np.int32)
    loss_mask = is_action & (not attempt.is_rejected)
    return Sample(
        index,
        tokens,
        is_action,
        loss_mask,
        lay(attempt.behavior, np.float64),
        lay(attempt.advantages, np.float64),
    )


def update(config, samples, *, max_tokens=10_000, mode="decoupled", policy=None, reference=None, noise=0.0):
    """Return loss, gradient and metrics' sums of one update of these samples, over all its microbatches.

    noise: largest error of each score by the proximal and the reference policy, in nats.
    """
    [microbatches] = pack(samples, max_tokens=max_tokens, world_size=1)
    rng = np.random.default_rng(5)

    def scores(table, m):
        return logprobs(table, m.targets) + noise * rng.choice([-1.0, 1.0], len(m.targets))

    proximal = [scores(PROXIMAL, m) if mode == "decoupled" else None for m in microbatches]
    ref = [scores(reference or REFERENCE, m) if config.kl.coefficient else None for m in microbatches]
    corrections = Corrector(config).correct(microbatches, proximal)
    scored = [
        ScoredMicrobatch(*columns) for columns in zip(microbatches, proximal, ref, corrections, strict=True)
    ]
    counts = UpdateCounts(
        sum(s.num_loss_tokens for s in scored),
        sum(s.num_sequences for s in scored),
        sum(s.num_action_tokens for s in scored),
    )
    objective = PolicyObjective(config, mode, temperature=TEMPERATURE)
    policy = policy or Table(1)
    parts = [objective.part(policy, s, counts) for s in scored]
    for part in parts:
        part.loss.backward()
    sums = {name: sum(part.sums[name].item() for part in parts) for name in parts[0].sums}
    return [sums.pop("loss"), *policy.logits.grad.tolist()], sums


def assert_same(one, other):
    np.testing.assert_allclose(one[0], other[0], rtol=1e-9, atol=1e-12)
    assert one[1] == pytest.approx(other[1], rel=1e-9, abs=1e-12)


# ------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=3)
@given(seed=seeds)
def test_context_tokens_anywhere_change_neither_loss_nor_gradient(name, seed):
    """Laws 3, 4 and 5: also inside of a sampled turn, and behind the last sampled token."""
    attempts, rng = make_attempts(seed), np.random.default_rng(seed + 1)
    plain = [compact(index, attempt) for index, attempt in enumerate(attempts)]
    long = [
        with_context(
            index,
            attempt,
            rng.integers(0, 4, len(attempt.tokens) + 1) + (np.arange(len(attempt.tokens) + 1) == 0),
        )
        for index, attempt in enumerate(attempts)
    ]
    assert_same(update(VARIANTS[name], long), update(VARIANTS[name], plain))


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=3)
@given(seed=seeds)
def test_neither_split_nor_order_changes_loss_or_gradient(name, seed):
    """Laws 6 and 8: alone in its microbatch, an attempt of which nothing may be learned is one with nothing
    to learn.
    """
    samples = [compact(index, attempt) for index, attempt in enumerate(make_attempts(seed))]
    whole = update(VARIANTS[name], samples)
    for max_tokens in (1, 12):
        assert_same(update(VARIANTS[name], samples[::-1], max_tokens=max_tokens), whole)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=3)
@given(seed=seeds)
def test_where_all_policies_are_one_the_sign_of_rounding_noise_changes_nothing(name, seed):
    """A log-ratio of 0 is noise of either sign in fact, by CPU, library and shape.

    Each attempt is here twice, so that covariances tie.
    """
    attempts = make_attempts(seed) * 2
    samples = [compact(i, replace(a, behavior=logprobs(PROXIMAL, a.tokens))) for i, a in enumerate(attempts)]
    plain, noisy = (
        update(VARIANTS[name], samples, policy=Table(2), reference=PROXIMAL, noise=noise)
        for noise in (0.0, 1e-9)
    )
    np.testing.assert_allclose(noisy[0], plain[0], rtol=1e-6, atol=1e-8)
    counted = [key for key in plain[1] if key.startswith(("clip_", "rejected/"))]
    assert {key: noisy[1][key] for key in counted} == {key: plain[1][key] for key in counted}


@pytest.mark.parametrize("name", ["chain-accepted", "loss-kl_cov", "loss-clip_cov"])
@settings(max_examples=10)
@given(seed=seeds)
def test_rounding_noise_chooses_nothing_among_tokens_that_are_equal(name, seed):
    """What is sorted is ordered by more than noise: of the same attempt twice, m2po drops the same tokens."""
    samples = [compact(i, attempt) for i, attempt in enumerate(make_attempts(seed) * 2)]
    plain, noisy = (update(VARIANTS[name], samples, noise=noise) for noise in (0.0, 1e-9))
    np.testing.assert_allclose(noisy[0], plain[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selection_by_covariance_does_not_see_what_is_added_to_all_advantages(name):
    attempts = make_attempts(4)
    chosen = []
    for added in (0.0, 3.0, -2.0):
        samples = [compact(i, replace(a, advantages=a.advantages + added)) for i, a in enumerate(attempts)]
        [[microbatch]] = pack(samples, max_tokens=10_000, world_size=1)
        [correction] = Corrector(algorithm(name)).correct(
            [microbatch], [logprobs(PROXIMAL, microbatch.targets)]
        )
        chosen.append(correction.is_selected.tolist())
    assert 0 < sum(chosen[0]) < len(chosen[0])
    assert chosen[1:] == [chosen[0], chosen[0]]


@pytest.mark.parametrize("shift", [-9.0, -1.0, 0.3])
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=5)
@given(seed=seeds)
def test_normalized_weights_have_a_mean_of_1_however_small_they_were(level, shift, seed):
    """The mean is over accepted tokens, or over the sequences that have some, where all tokens of one share
    its weight.
    """
    attempts = make_attempts(seed)
    samples = [
        compact(i, replace(a, behavior=a.behavior - shift / max(1, len(a.tokens))))
        for i, a in enumerate(attempts)
    ]
    [microbatches] = pack(samples, max_tokens=12, world_size=1)
    config = algorithm(correction=CorrectionConfig(weight=level, cap=1e9, self_normalize=True))
    corrections = Corrector(config).correct(
        microbatches, [logprobs(PROXIMAL, m.targets) for m in microbatches]
    )
    tokens, sequences = [], {}
    for m, c in zip(microbatches, corrections, strict=True):
        tokens += c.weights[c.accepted].tolist()
        sequences |= dict(
            zip(m.sample_indices[m.sequence_ids][c.accepted], c.weights[c.accepted], strict=True)
        )
    found = tokens if level == "token" else list(sequences.values())
    assert not found or np.mean(found) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_where_nothing_may_be_learned_loss_and_gradient_are_0(name):
    samples = [
        compact(index, replace(attempt, is_rejected=True)) for index, attempt in enumerate(make_attempts(4))
    ]
    loss_and_gradient, _ = update(VARIANTS[name], samples, max_tokens=1)
    assert loss_and_gradient == [0.0] * (1 + VOCABULARY)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_out_of_the_loss_may_hold_anything(name):
    """Law 8: an infinite value times 0 would be NaN."""
    attempts = [replace(attempt, is_rejected=index == 0) for index, attempt in enumerate(make_attempts(4))]
    broken = replace(attempts[0], advantages=np.full_like(attempts[0].advantages, np.nan))
    samples, others = (
        [compact(i, a) for i, a in enumerate([first, *attempts[1:]])] for first in (broken, attempts[0])
    )
    assert_same(update(VARIANTS[name], samples), update(VARIANTS[name], others))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in WITH_HELD_PARTS])
def test_the_gradient_of_the_whole_update_passes_finite_differences(name):
    """Law 11: aggregation, weights, rejection, KL and entropy together; formulas with held parts:
    test_policy_losses.py.
    """
    samples = [compact(index, attempt) for index, attempt in enumerate(make_attempts(7))]
    (_, *gradient), _ = update(VARIANTS[name], samples)
    assert np.abs(gradient).max() > 1e-4
    expected = []
    for place in range(VOCABULARY):
        losses = [
            update(VARIANTS[name], samples, policy=Table(1, nudge=(place, step)))[0][0]
            for step in (1e-6, -1e-6)
        ]
        expected.append((losses[0] - losses[1]) / 2e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", VARIANTS)
def test_on_policy_the_ratio_is_1_and_ppo_kl_exactly_0(name):
    """Laws 9 and 12: nothing is clipped, weighed or rejected where one policy plays all three parts."""
    samples = [
        compact(index, replace(attempt, is_rejected=False)) for index, attempt in enumerate(make_attempts(9))
    ]
    num_tokens = sum(len(sample.token_ids) - 1 for sample in samples)
    config = VARIANTS[name].model_copy(update={"correction": CorrectionConfig()})
    _, sums = update(config, samples, mode="on_policy", max_tokens=12)
    assert sums["ppo_kl"] == 0.0
    assert sums["ratio_mean"] == num_tokens
    assert (sums["clip_low"], sums["clip_high"], sums["clip_dual"]) == (0.0, 0.0, 0.0)


def test_what_is_told_of_the_policies_equals_numpy():
    """Sums over loss tokens: of |policy - behavior|, proximal - policy, the ratio and the entropy; rejected
    attempts count nowhere.
    """
    attempts = make_attempts(12)
    kept = [attempt for attempt in attempts if not attempt.is_rejected]
    assert 0 < len(kept) < len(attempts)
    tokens, behavior = (
        np.concatenate([getattr(attempt, name) for attempt in kept]) for name in ("tokens", "behavior")
    )
    whole = logprobs(Table(1), np.arange(VOCABULARY))
    policy, proximal = whole[tokens], logprobs(PROXIMAL, tokens)
    samples = [compact(index, attempt) for index, attempt in enumerate(attempts)]
    _, sums = update(algorithm("ppo_clip"), samples, max_tokens=12)
    assert sums["mismatch_mean"] == pytest.approx(np.abs(policy - behavior).sum(), rel=1e-9)
    assert sums["ppo_kl"] == pytest.approx((proximal - policy).sum(), rel=1e-9)
    assert sums["ratio_mean"] == pytest.approx(np.exp(policy - proximal).sum(), rel=1e-9)
    assert sums["entropy"] == pytest.approx(-len(tokens) * (np.exp(whole) * whole).sum(), rel=1e-9)


def test_the_documented_laws_name_tests_that_exist():
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), f"{file}::{name}"
