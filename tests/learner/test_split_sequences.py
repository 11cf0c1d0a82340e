"""A sequence whose rows stand in several microbatches is learned as if they stood in one: every loss, weight,
rejection and scale.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from agentrl.config.algorithm import (
    AlgorithmConfig,
    ClipCovConfig,
    KLConfig,
    KLCovConfig,
    ReinforceConfig,
)
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack
from parts.built_in import POLICY_LOSSES
from parts.learner import learner_spec, lone_learner, tiny_sizes

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, num_hidden_layers=1)
CHAIN = CorrectionConfig(
    weight="sequence",
    cap=3.0,
    self_normalize=True,
    reject={
        "sum": RejectionConfig(level="sequence_sum", lower=1e-4, upper=1e4),
        "farthest": RejectionConfig(statistic="k2", level="sequence_max", upper=8.0),
        "tokens": RejectionConfig(statistic="k3", level="token", upper=2.0),
    },
    opsm_delta=0.02,
)
COMPARED = (
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "grad_norm",
    "ratio_mean",
    "clip_low",
    "clip_high",
    "num_sequences",
    "num_tokens",
)


@contextmanager
def learner(algorithm, mode="decoupled"):
    with lone_learner(learner_spec(sizes=SIZES, algorithm=algorithm, mode=mode)) as one:
        yield one


def batch(num_samples=5, seed=0):
    """Samples of one to four rows of 5 to 12 tokens, whose tokens share one advantage as in a group
    estimator.
    """
    rng = np.random.default_rng(seed)
    return [_sample(index, 1 + index % 4, rng) for index in range(num_samples)]


def _sample(index, num_rows, rng):
    lengths = rng.integers(5, 13, num_rows)
    starts = [0, *np.cumsum(lengths)[:-1].tolist()]
    total = int(lengths.sum())
    mask = rng.random(total) < 0.6
    mask[starts], mask[-1] = False, True
    loss_mask = mask & (rng.random(total) < 0.9)
    behavior = rng.normal(-3.5, 0.6, total).astype(np.float32)
    advantages = np.full(total, (-1) ** index * rng.random(), np.float32)
    return Sample(
        index,
        rng.integers(0, VOCABULARY, total).astype(np.int32),
        mask,
        loss_mask,
        behavior,
        advantages,
        tuple(starts),
    )


def updates(samples, max_tokens, algorithm, mode="decoupled"):
    """Metrics of two updates of one score: at the second one the policy is no longer the proximal one."""
    with learner(algorithm, mode) as one:
        [microbatches] = pack(samples, max_tokens=max_tokens, world_size=1)
        items = one.score(microbatches)
        return [one.update(items) for _ in range(2)], len(microbatches)


def assert_same(together, split, names=COMPARED):
    for a, b in zip(together, split, strict=True):
        chosen = [name for name in a if name in names or name.startswith("correction/")]
        assert {name: b[name] for name in chosen} == pytest.approx(
            {name: a[name] for name in chosen}, rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_every_loss_is_the_same_with_rows_apart(policy_loss):
    algorithm = AlgorithmConfig(
        policy_loss=policy_loss,
        aggregation="sequence_mean_token_mean",
        entropy_coefficient=0.01,
        kl=KLConfig(coefficient=0.1, estimator="k2"),
        clip_cov=ClipCovConfig(share=0.2, lower=-9.0, upper=9.0),
        kl_cov=KLCovConfig(share=0.2),
        correction=CHAIN,
    )
    together, num_together = updates(batch(), 1000, algorithm)
    split, num_split = updates(batch(), 14, algorithm)
    assert (num_together, num_split > 5) == (1, True)
    assert together[1]["grad_norm"] > 0
    assert_same(together, split)


@pytest.mark.parametrize("mode", ["on_policy", "bypass"])
def test_without_proximal_logprobs_the_losses_of_whole_sequences_are_the_same(mode):
    algorithm = AlgorithmConfig(
        policy_loss="gmpo",
        aggregation="sequence_mean_token_mean",
        correction=CorrectionConfig(weight="none", denominator="original"),
    )
    together, _ = updates(batch(), 1000, algorithm, mode)
    split, _ = updates(batch(), 1, algorithm, mode)
    for a, b in zip(together, split, strict=True):
        assert {name: b[name] for name in COMPARED} == pytest.approx(
            {name: a[name] for name in COMPARED}, rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize(
    ("policy_loss", "level"), [("ppo_clip", "token"), ("reinforce", "sequence"), ("reinforce", "geometric")]
)
def test_rejection_and_weights_of_sequences_in_bypass_are_the_same(policy_loss, level):
    correction = CHAIN.model_copy(update={"self_normalize": False})
    algorithm = AlgorithmConfig(
        policy_loss=policy_loss,
        reinforce=ReinforceConfig(weight=level, cap=1.5, floor=0.1),
        correction=correction,
    )
    together, _ = updates(batch(), 1000, algorithm, "bypass")
    split, _ = updates(batch(), 14, algorithm, "bypass")
    assert 0 < together[0]["correction/rejected/all"] < 1
    assert_same(together, split)


def test_dropout_is_the_same_in_both_forwards_of_a_split_sequence():
    """The forward over the rest of split sequences leaves the random state as it was: without split sequences
    it does not happen.
    """
    algorithm = AlgorithmConfig(policy_loss="gspo", aggregation="sequence_mean_token_mean")
    with learner(algorithm, "bypass") as one:
        [microbatches] = pack(batch(), max_tokens=14, world_size=1)
        items = one.score(microbatches)
        before = torch.get_rng_state()
        found = one._objective.score_rest(one._policy, items)
        assert torch.equal(torch.get_rng_state(), before)
        sizes = [len(item.correction.rest.sequence_ids) for item in items]
        assert [len(logprobs) for logprobs in found] == sizes
        assert max(sizes) > 0
        [whole] = pack(batch(), max_tokens=1000, world_size=1)
        assert one._objective.score_rest(one._policy, one.score(whole)) == [None]
