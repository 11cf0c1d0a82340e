"""Updates whose own forward gives the proximal log-probabilities, against those of a batch scored ahead.

Wherever `score_reasons` finds no reason, loss, gradient, weights and metrics are the same. For every reason
there is a batch on which they would not be.
"""

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.algorithm import AlgorithmConfig, ClipCovConfig, KLConfig, KLCovConfig, ReinforceConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.model import ModelConfig
from agentrl.config.proximal import score_reasons
from agentrl.config.schema import Config
from agentrl.controller.specs import RoleSpecs
from agentrl.learner.correction import Corrector
from agentrl.learner.loss import PolicyObjective
from agentrl.learner.packing import pack
from parts.built_in import POLICY_LOSSES
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes

VOCABULARY = 48
SEQUENCE_LOSSES = ("gspo", "gmpo")


@contextmanager
def learner(config, *, sizes=None, **changes):
    """The learner of a config, small and in float64."""
    with lone_learner(
        learner_spec(
            ModelConfig(lora=config.model.lora),
            sizes=sizes or tiny_sizes(VOCABULARY),
            algorithm=config.algorithm_in_use,
            mode=config.policy_mode,
            learner=config.learner,
            **changes,
        )
    ) as one:
        yield one


def batch(count=6, *, seed=0, left_out=1):
    """Samples, of which the last `left_out` are not in the loss, and one has a token that is too old."""
    samples = random_samples(count, VOCABULARY, seed=seed)
    nothing = np.zeros_like
    out = [
        dataclasses.replace(s, loss_mask=nothing(s.loss_mask)) if s.index >= count - left_out else s
        for s in samples
    ]
    old = out[0].loss_mask.copy()
    old[np.flatnonzero(old)[0]] = False
    return [dataclasses.replace(out[0], loss_mask=old), *out[1:]]


@contextmanager
def algorithm_of(one, config):
    """Give a running learner another algorithm: a new rank for each example would take a second each."""
    before = one._spec, one._corrector, one._objective
    mode, algorithm = config.policy_mode, config.algorithm_in_use
    one._spec = dataclasses.replace(one._spec, algorithm=algorithm, mode=mode)
    one._corrector, one._objective = (
        Corrector(algorithm, mode),
        PolicyObjective(algorithm, mode, temperature=0.8),
    )
    yield
    one._spec, one._corrector, one._objective = before


def gradients_and_metrics(one, samples, *, ahead, max_tokens=40):
    """Return the gradient and the metrics of one update that changes no weight."""
    one._scores_ahead = ahead
    [microbatches] = pack(samples, max_tokens=max_tokens, world_size=1)
    scored = one.score(microbatches)
    assert all((s.proximal_logprobs is not None) == ahead for s in scored) or one._spec.mode != "decoupled"
    found = []
    step = one._stepper.optimizer.step
    one._stepper.optimizer.step = lambda: found.extend(
        parameter.grad.clone() for parameter in one._policy.module.parameters()
    )
    metrics = one.update(scored)
    one._stepper.optimizer.step = step
    return found, {name: value for name, value in metrics.items() if name != "lr"}


def both_ways(one, config, samples, **options):
    """Return (gradient, metrics) of the batch scored ahead, and of the update's own forward."""
    with algorithm_of(one, config):
        return [gradients_and_metrics(one, samples, ahead=ahead, **options) for ahead in (True, False)]


# ------------------------------------------------------------------------------------------------ configs

STAGES = st.builds(
    RejectionConfig,
    statistic=st.just("k1"),
    level=st.sampled_from(["token", "sequence_sum", "sequence_mean", "sequence_max"]),
    lower=st.just(0.3),
    upper=st.sampled_from([1.1, 3.0]),
)
CORRECTIONS = st.builds(
    CorrectionConfig,
    weight=st.sampled_from(["none", "token", "sequence", "geometric"]),
    cap=st.sampled_from([1.2, 2.0, 1e6]),
    floor=st.sampled_from([None, 0.5]),
    outside=st.sampled_from(["truncate", "mask"]),
    self_normalize=st.sampled_from([False, False, True]),
    reject=st.one_of(st.just({}), st.just({}), st.fixed_dictionaries({"far": STAGES})),
    m2po_threshold=st.sampled_from([None, None, 0.5]),
    opsm_delta=st.sampled_from([None, 0.1]),
    max_lag=st.sampled_from([None, 1]),
    denominator=st.sampled_from(["accepted", "original"]),
)
KLS = st.builds(
    KLConfig,
    coefficient=st.sampled_from([0.0, 0.3]),
    estimator=st.sampled_from(["k2", "k3", "abs", "k3_k2grad"]),
    off_policy_ratio=st.booleans(),
)


@st.composite
def configs(draw):
    policy_loss = draw(st.sampled_from(sorted(POLICY_LOSSES)))
    rules = ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"]
    algorithm = AlgorithmConfig(
        policy_loss=policy_loss,
        mode=draw(st.sampled_from(["decoupled", "decoupled", "decoupled", "auto"])),
        aggregation="sequence_mean_token_mean"
        if policy_loss in SEQUENCE_LOSSES
        else draw(st.sampled_from(rules)),
        entropy_coefficient=draw(st.sampled_from([0.0, 0.05])),
        correction=draw(CORRECTIONS),
        kl=draw(KLS),
        reinforce=ReinforceConfig(weight=draw(st.sampled_from(["token", "sequence", "geometric"]))),
        clip_cov=ClipCovConfig(share=0.2, lower=-9.0, upper=9.0),
        kl_cov=KLCovConfig(share=0.2),
    )
    return Config(algorithm=algorithm, agent={"max_response_tokens": 20})


@pytest.mark.parametrize(("rate", "is_scored"), [(0.0, False), (0.2, True)])
def test_a_model_with_dropout_is_scored_ahead(rate, is_scored):
    """Its updates compute other log-probabilities than the policy at the start of the step."""
    sizes = tiny_sizes(VOCABULARY, attention_dropout=rate)
    with learner(Config(), sizes=sizes, scores_ahead=False) as one:
        [microbatches] = pack(batch(), max_tokens=1000, world_size=1)
        assert (one.score(microbatches)[0].proximal_logprobs is not None) == is_scored


@pytest.fixture(scope="module")
def one():
    """A learner with a reference that differs from its policy."""
    config = Config(algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.1)))
    with learner(config) as found:
        for _ in range(3):
            [microbatches] = pack(batch(), max_tokens=40, world_size=1)
            found.update(found.score(microbatches))
        yield found


@settings(max_examples=25)
@given(
    config=configs().filter(lambda config: not score_reasons(config)),
    seed=st.integers(0, 2**31),
    max_tokens=st.sampled_from([20, 1000]),
)
def test_where_there_is_no_reason_to_score_nothing_differs(one, config, seed, max_tokens):
    scored, own = both_ways(one, config, batch(seed=seed), max_tokens=max_tokens)
    assert own[1].keys() == scored[1].keys()
    assert own[1] == pytest.approx(scored[1], rel=1e-9, abs=1e-12)
    for a, b in zip(own[0], scored[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy_loss", sorted(set(POLICY_LOSSES) - {"clip_cov", "kl_cov"}))
@pytest.mark.parametrize("weight", ["none", "token", "sequence", "geometric"])
def test_every_loss_with_every_weight_is_the_same_bit_by_bit(one, policy_loss, weight):
    rule = "sequence_mean_token_mean" if policy_loss in SEQUENCE_LOSSES else "token_mean"
    algorithm = AlgorithmConfig(
        policy_loss=policy_loss,
        aggregation=rule,
        mode="decoupled",
        correction=CorrectionConfig(weight=weight),
    )
    config = Config(algorithm=algorithm)
    assert score_reasons(config) == []
    # Everything is in the loss: both forwards read the same positions.
    scored, own = both_ways(one, config, random_samples(6, VOCABULARY))
    assert own[1] == scored[1]
    assert own[1]["correction/chi2_sequence"] != 0.0
    assert all(torch.equal(a, b) for a, b in zip(own[0], scored[0], strict=True))


FAR = {"far": RejectionConfig(level="token", lower=0.5, upper=2.0)}
REASONS = {
    "correction.reject": AlgorithmConfig(correction=CorrectionConfig(reject=FAR)),
    "m2po_threshold": AlgorithmConfig(correction=CorrectionConfig(m2po_threshold=0.5)),
    "self_normalize": AlgorithmConfig(correction=CorrectionConfig(self_normalize=True)),
    "policy_loss=clip_cov": AlgorithmConfig(
        policy_loss="clip_cov", clip_cov=ClipCovConfig(share=0.2, lower=-9.0, upper=9.0)
    ),
    "policy_loss=kl_cov": AlgorithmConfig(policy_loss="kl_cov", kl_cov=KLCovConfig(share=0.2)),
}


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_counts(one, reason):
    """A control: without the scores the same update would be another one, or (kl_cov) have another loss."""
    config = Config(algorithm=REASONS[reason])
    [text] = score_reasons(config)
    assert reason in text
    scored, own = both_ways(one, config, batch(), max_tokens=20)
    is_same = own[1]["grad_norm"] == pytest.approx(scored[1]["grad_norm"], rel=1e-6)
    # At a ratio of 1, kl_cov's penalty is 0: the selection first counts in later updates.
    assert is_same == (reason == "policy_loss=kl_cov")


@pytest.mark.parametrize(
    ("sections", "reasons"),
    [
        ({}, []),
        ({"buffer": {"max_staleness": 0}}, []),
        ({"algorithm": {"mode": "bypass"}}, []),
        ({"algorithm": {"mode": "bypass", "correction": {"m2po_threshold": 0.5}}}, ["m2po_threshold"]),
        ({"learner": {"epochs_per_step": 2, "minibatches_per_step": 3}}, ["6 updates per step"]),
        ({"model": {"lora": {"rank": 2, "dropout": 0.1}}}, ["model.lora.dropout"]),
        ({"model": {"lora": {"dropout": 0.1}}}, []),
        ({"algorithm": {"correction": {"weight": "none", "self_normalize": True}}}, []),
        ({"algorithm": {"correction": {"max_lag": 1, "opsm_delta": 0.1}}}, []),
        (
            {"algorithm": {"correction": {"self_normalize": True, "m2po_threshold": 0.1}}},
            ["m2po_threshold", "self_normalize"],
        ),
    ],
)
def test_reasons_and_what_follows_from_them(sections, reasons):
    config = Config.model_validate(sections)
    found = score_reasons(config)
    assert len(found) == len(reasons)
    assert all(part in text for part, text in zip(reasons, found, strict=True))
    spec = RoleSpecs.of(config, num_steps=1, dump_folder="").learner
    assert spec.scores_ahead == bool(reasons)


def test_a_sequence_over_several_microbatches_is_scored_ahead(one):
    [first, *others] = random_samples(4, VOCABULARY, length=12)
    mask = first.action_mask.copy()
    mask[6] = False
    split = dataclasses.replace(first, action_mask=mask, loss_mask=mask, segment_starts=(0, 6))
    one._scores_ahead = False
    for samples, is_scored in (([split, *others], True), ([first, *others], False)):
        [microbatches] = pack(samples, max_tokens=6, world_size=1)
        assert any(m.is_split.any() for m in microbatches) == is_scored
        scored = one.score(microbatches)
        assert [s.proximal_logprobs is not None for s in scored] == [is_scored] * len(scored)
        assert one.update(scored)["correction/chi2_sequence"] != 0.0
