"""One rank of the learner against independent mathematics: plain transformers forwards and numpy loops in
float64.
"""

import dataclasses
import itertools
import math
import threading
from concurrent.futures import Future, wait
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed.checkpoint import FileSystemWriter
from transformers import AutoModelForCausalLM

from agentrl.config.algorithm import AlgorithmConfig, ClipCovConfig, KLConfig, KLCovConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.errors import CheckpointError, ConfigError, InfrastructureError
from agentrl.learner.attention import Segments, choose_attention, segment_sdpa
from agentrl.learner.batch import Sample
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.packing import pack
from agentrl.servers.process_group import tensor_checksum
from parts.built_in import POLICY_LOSSES
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY)
TEMPERATURE = 0.8
CHAIN = CorrectionConfig(
    weight="sequence",
    cap=3.0,
    self_normalize=True,
    reject={
        "tokens": RejectionConfig(statistic="k3", level="token", upper=1.0),
        "far": RejectionConfig(lower=0.2, upper=4.0),
    },
    m2po_threshold=0.3,
    opsm_delta=0.02,  # beyond the noise of another packing
)


def spec(model=None, **changes):
    is_loaded = model is not None and model.path
    new = {"from_scratch": None, "master_dtype": torch.float64} if is_loaded else {"sizes": SIZES}
    return learner_spec(model, **{"temperature": TEMPERATURE, **new, **changes})


@contextmanager
def learner(**changes):
    with lone_learner(spec(**changes)) as one:
        yield one


def batch(num_samples=6, seed=0):
    rng = np.random.default_rng(seed)
    return [sample(index, rng) for index in range(num_samples)]


def sample(index, rng, length=None):
    [one] = random_samples(1, VOCABULARY, length=length, seed=rng)
    return dataclasses.replace(one, index=index)


def reject(one, tokens):
    """Take action tokens out of the loss."""
    loss_mask = one.loss_mask.copy()
    loss_mask[tokens] = False
    return Sample(one.index, one.token_ids, one.action_mask, loss_mask, one.behavior_logprobs, one.advantages)


def scored(one, samples, max_tokens=1000):
    [microbatches] = pack(samples, max_tokens=max_tokens, world_size=1)
    return one.score(microbatches)


def weights_of(one, tmp_path, name="policy"):
    one.export(str(tmp_path / name))
    return load_file(tmp_path / name / "model.safetensors")


def plain_model(tmp_path, one, dtype=torch.float64):
    """The learner's policy as transformers loads it, with transformers' own attention."""
    one.export(str(tmp_path / "plain"))
    return AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype, attn_implementation="eager")


def plain_logprobs(model, one):
    """log-probabilities and entropies of all next tokens of one sample alone, f64[T - 1, V] log-softmax."""
    with torch.no_grad():
        logits = model(torch.tensor(one.token_ids[None], dtype=torch.int64)).logits[0, :-1]
    return torch.log_softmax(logits.double() / TEMPERATURE, -1).numpy()


# ------------------------------------------------------------------------------------------ packed = separate


def test_packed_forwards_equal_separate_and_plain_ones(tmp_path):
    samples = batch()
    with learner(algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.1))) as one:
        [packed] = scored(one, samples)
        model = plain_model(tmp_path, one)
        start = 0
        for index in packed.microbatch.sample_indices:
            mask = samples[index].action_mask
            expected = np.take_along_axis(
                plain_logprobs(model, samples[index]), samples[index].token_ids[1:, None].astype(int), 1
            )[:, 0][mask[1:]]
            own = slice(start, start := start + int(mask.sum()))
            # float32 norms and rotary angles inside the model, in both; the published copy is float32 as well
            np.testing.assert_allclose(packed.proximal_logprobs[own], expected, atol=2e-6)
            np.testing.assert_allclose(packed.ref_logprobs[own], expected, atol=2e-6)
        alone = {
            s.microbatch.sample_indices[0]: s.proximal_logprobs for s in scored(one, samples, max_tokens=1)
        }
        np.testing.assert_allclose(
            packed.proximal_logprobs,
            np.concatenate([alone[i] for i in packed.microbatch.sample_indices]),
            atol=1e-12,
        )


@pytest.mark.parametrize("attention", ["segment_sdpa", "sdpa"])
def test_packed_equals_separate_in_float32_in_eval_and_train_mode(attention):
    samples = batch()
    with learner(model=ModelConfig(attention=attention), master_dtype=torch.float32) as one:
        [packed] = scored(one, samples)
        alone = {
            s.microbatch.sample_indices[0]: s.proximal_logprobs for s in scored(one, samples, max_tokens=1)
        }
        np.testing.assert_allclose(
            packed.proximal_logprobs,
            np.concatenate([alone[i] for i in packed.microbatch.sample_indices]),
            atol=1e-5,
        )
        metrics = one.update([packed])  # forwards of train mode against the scores of eval mode
        assert abs(metrics["ratio_max"] - 1) < 1e-5
        assert abs(metrics["ppo_kl"]) < 1e-6


def test_segments_longer_than_a_sliding_window_see_the_window_alone():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    got, _ = segment_sdpa(
        torch.nn.Identity(), query, key, value, None, segments=Segments([3, 6]), sliding_window=4
    )
    for head in range(4):
        for row in range(9):
            first = max(0 if row < 3 else 3, row - 3)
            scores = key[0, head // 2, first : row + 1] @ query[0, head, row] / math.sqrt(8)
            torch.testing.assert_close(
                got[0, row, head], scores.softmax(0) @ value[0, head // 2, first : row + 1]
            )


def test_flash_attention_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError, match="flash-attn"):
        choose_attention("flash_attention_2", device="cuda", dtype="bfloat16")
    assert choose_attention("auto", device="cpu", dtype="bfloat16") == "segment_sdpa"


# ----------------------------------------------------------------------------------------------------- losses


def expected_loss(model, samples, proximal, algorithm, mode):
    """The whole update's loss by loops, from the formulas of PPO, truncated weights, k3 against the same
    model, and entropy.
    """
    terms, lengths = [], []
    for one in samples:
        log_p = plain_logprobs(model, one)
        values = []
        for t in np.flatnonzero(one.loss_mask):
            pi, mu, a = (
                log_p[t - 1, one.token_ids[t]],
                float(one.behavior_logprobs[t]),
                float(one.advantages[t]),
            )
            prox = {"decoupled": proximal[one.index][t], "bypass": mu, "on_policy": pi}[mode]
            rho = math.exp(pi - prox)
            loss = max(-rho * a, -min(max(rho, 0.8), 1.2) * a)
            loss = min(loss, -3.0 * a) if a < 0 else loss
            weight = min(math.exp(prox - mu), algorithm.correction.cap) if mode == "decoupled" else 1.0
            entropy = -(np.exp(log_p[t - 1]) * log_p[t - 1]).sum()
            values.append(
                weight * loss - algorithm.entropy_coefficient * entropy
            )  # policy = reference here: KL is 0
        terms.append(sum(values))
        lengths.append(len(values))
    num_sequences = sum(bool(s.action_mask.any()) for s in samples)
    return {
        "token_mean": sum(terms) / sum(lengths),
        "sequence_mean_token_sum": sum(terms) / num_sequences,
        "sequence_mean_token_mean": sum(x / n for x, n in zip(terms, lengths, strict=True) if n)
        / num_sequences,
        "constant": sum(terms) / (num_sequences * 32),
    }[algorithm.aggregation]


@pytest.mark.parametrize(
    ("aggregation", "mode"),
    [
        ("token_mean", "decoupled"),
        ("sequence_mean_token_sum", "bypass"),
        ("sequence_mean_token_mean", "on_policy"),
        ("sequence_mean_token_mean", "decoupled"),
        ("constant", "decoupled"),
    ],
)
def test_loss_equals_a_loop_over_plain_forwards(tmp_path, aggregation, mode):
    algorithm = AlgorithmConfig(
        aggregation=aggregation,
        constant_length=32,
        entropy_coefficient=0.05,
        correction=CorrectionConfig(cap=1.5),
    )
    samples = batch()
    samples[1] = reject(
        samples[1], slice(None)
    )  # a sequence without accepted tokens counts in the denominator of sequences
    samples[2] = reject(samples[2], slice(0, 6))
    with learner(algorithm=algorithm, mode=mode) as one:
        first = scored(one, samples, max_tokens=40)
        one.update(first)  # the policy moves away from the scores
        proximal = {s.index: np.zeros(s.num_tokens) for s in samples}
        for part in first if mode == "decoupled" else []:
            for place, index in enumerate(part.microbatch.sample_indices):
                own = part.microbatch.sequence_ids == place
                proximal[index][samples[index].action_mask] = part.proximal_logprobs[own]
        expected = expected_loss(plain_model(tmp_path, one), samples, proximal, algorithm, mode)
        assert one.update(first)["loss"] == pytest.approx(expected, rel=2e-5)


# ---------------------------------------------------------------------------------------- several rows in one


def cut_into_rows(samples, rng):
    """Return the samples with one to three rows each."""
    return [
        with_rows(
            one, tuple(sorted(rng.choice(np.arange(2, one.num_tokens - 1), int(rng.integers(0, 3)), False)))
        )
        for one in samples
    ]


def with_rows(one, starts):
    mask = one.action_mask.copy()
    mask[list(starts)] = False  # the first token of a row has no predictor
    starts = (0, *(int(start) for start in starts))
    return Sample(one.index, one.token_ids, mask, mask, one.behavior_logprobs, one.advantages, starts)


def rows_of(one):
    """The rows of a sample as samples of their own."""
    bounds = [*one.segment_starts, one.num_tokens]
    columns = (one.token_ids, one.action_mask, one.loss_mask, one.behavior_logprobs, one.advantages)
    return [Sample(one.index, *(column[a:b] for column in columns)) for a, b in itertools.pairwise(bounds)]


def test_rows_of_one_trajectory_see_nothing_of_each_other(tmp_path):
    samples = cut_into_rows(batch(8), np.random.default_rng(1))
    assert {len(one.segment_starts) for one in samples} == {1, 2, 3}
    with learner() as one:
        model = plain_model(tmp_path, one)
        [packed] = scored(one, samples)
        for place, index in enumerate(packed.microbatch.sample_indices):
            expected = [
                np.take_along_axis(plain_logprobs(model, row), row.token_ids[1:, None].astype(int), 1)[
                    row.action_mask[1:], 0
                ]
                for row in rows_of(samples[index])
            ]
            own = packed.microbatch.sequence_ids == place
            np.testing.assert_allclose(packed.proximal_logprobs[own], np.concatenate(expected), atol=2e-6)


@pytest.mark.parametrize("max_tokens", [1000, 30, 1])
def test_rows_learn_as_separate_forwards_do(max_tokens):
    """Where no number counts sequences, a trajectory of several rows is the rows as trajectories of their
    own.
    """
    samples = cut_into_rows(batch(7), np.random.default_rng(1))
    separate = [row for one in samples for row in rows_of(one)]
    with learner() as one:
        joined = one.update(scored(one, samples, max_tokens=max_tokens))
    with learner() as one:
        apart = one.update(scored(one, separate, max_tokens=1))
    for name in ("loss", "grad_norm", "entropy", "ratio_mean", "correction/weight_mean"):
        assert joined[name] == pytest.approx(apart[name], rel=1e-9, abs=1e-11), name
    assert joined["num_tokens"] == apart["num_tokens"]
    assert joined["num_sequences"] == sum(s.action_mask.any() for s in samples)


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "sequence_mean_token_sum", "token_mean"])
def test_rows_of_one_trajectory_are_one_sequence_in_the_loss(aggregation):
    """By hand: on policy the ratio is 1 and the loss of a token is minus its advantage; the tokens of all
    rows share one mean.
    """
    algorithm = AlgorithmConfig(aggregation=aggregation)
    samples = cut_into_rows(batch(6), np.random.default_rng(2))
    with learner(algorithm=algorithm, mode="on_policy") as one:
        items = scored(one, samples, max_tokens=40)
        terms, counts = [], []
        for sample in samples:
            values = [-float(a) for row in rows_of(sample) for a in row.advantages[row.loss_mask]]
            terms.append(sum(values))
            counts.append(len(values))
        expected = {
            "token_mean": sum(terms) / sum(counts),
            "sequence_mean_token_sum": sum(terms) / len(terms),
            "sequence_mean_token_mean": sum(t / n for t, n in zip(terms, counts, strict=True)) / len(terms),
        }[aggregation]
        assert one.update(items)["loss"] == pytest.approx(expected, rel=1e-6)


def test_kl_to_the_reference_pulls_the_policy_back(tmp_path):
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=10.0, estimator="k2"))
    samples = batch()
    zero = [
        Sample(s.index, s.token_ids, s.action_mask, s.loss_mask, s.behavior_logprobs, 0 * s.advantages)
        for s in samples
    ]
    with learner(algorithm=algorithm, mode="on_policy") as one:
        assert one.update(scored(one, samples))["kl"] == 0.0
        kls = [one.update(scored(one, zero))["kl"] for _ in range(8)]
    assert kls[0] > 1e-3
    assert kls[-1] < 0.2 * kls[0]


def test_on_policy_the_ratio_is_exactly_1_and_a_positive_advantage_raises_probability():
    samples = batch()
    good = [
        Sample(
            s.index, s.token_ids, s.action_mask, s.loss_mask, s.behavior_logprobs, np.ones_like(s.advantages)
        )
        for s in samples
    ]
    with learner(mode="on_policy", algorithm=AlgorithmConfig(kl=KLConfig(coefficient=1e-9))) as one:
        items = scored(one, good)
        metrics = one.update(items)
        assert (metrics["ppo_kl"], metrics["ratio_mean"], metrics["ratio_max"]) == (0.0, 1.0, 1.0)
        assert metrics["loss"] == pytest.approx(-1.0, abs=1e-6)
        before = items[0].ref_logprobs
        with_scores = one._logprobs(one._policy, items[0].microbatch)
        assert with_scores.mean() > before.mean() + 0.1


@pytest.mark.parametrize("weight", ["token", "sequence", "geometric"])
def test_tokens_sampled_by_the_policy_itself_need_no_correction(weight):
    samples = batch()
    chain = CHAIN.model_copy(update={"weight": weight})
    with learner(algorithm=AlgorithmConfig(correction=chain)) as one:
        [own] = scored(one, samples)
        behavior = own.proximal_logprobs
        at_home = []
        for place, index in enumerate(own.microbatch.sample_indices):
            s = samples[index]
            logprobs = np.zeros(s.num_tokens, np.float64)
            logprobs[s.action_mask] = behavior[own.microbatch.sequence_ids == place]
            at_home.append(
                Sample(int(index), s.token_ids, s.action_mask, s.loss_mask, logprobs, s.advantages)
            )
        items = scored(one, at_home)
        metrics = one.update(items)
    np.testing.assert_allclose(np.concatenate([item.correction.weights for item in items]), 1.0, atol=1e-9)
    assert metrics["correction/rejected/all"] == 0.0
    assert metrics["mismatch_max"] < 1e-9
    assert metrics["correction/weight_mean"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["correction/ess"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["correction/kl_k1"] == pytest.approx(0.0, abs=1e-9)


# -------------------------------------------------------------------------------------- how the batch was cut


def run_three_updates(samples, tmp_path, name, **options):
    max_tokens = options.pop("max_tokens", 1000)
    algorithm = AlgorithmConfig(
        entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1), **options.pop("algorithm", {})
    )
    with learner(algorithm=algorithm, **options) as one:
        metrics = [one.update(scored(one, samples, max_tokens=max_tokens)) for _ in range(3)]
        tensors = {n: one._policy.full_tensor(n).numpy() for n in one._policy.tensors}
        return metrics, tensors


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_neither_split_nor_order_changes_losses_gradients_or_weights(tmp_path, aggregation):
    samples = batch(7)
    options = {"algorithm": {"aggregation": aggregation}, "model": ModelConfig(dtype="float32")}
    metrics, weights = run_three_updates(samples, tmp_path, "whole", **options)
    checkpointing = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2), gradient_checkpointing=True)
    for variant in ({"max_tokens": 1}, {"max_tokens": 30}, {"max_tokens": 30, "learner": checkpointing}):
        other_metrics, other_weights = run_three_updates(samples[::-1], tmp_path, "cut", **options, **variant)
        for step, other in zip(metrics, other_metrics, strict=True):
            assert other == pytest.approx(step, rel=1e-9, abs=1e-11)
        for name in weights:
            np.testing.assert_allclose(other_weights[name], weights[name], atol=1e-10)


def test_float32_losses_and_gradient_norms_do_not_depend_on_the_split():
    samples = batch(7)
    with learner(master_dtype=torch.float32) as one:
        whole = one.update(scored(one, samples))
    with learner(master_dtype=torch.float32) as one:
        cut = one.update(scored(one, samples, max_tokens=30))
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-6)


def test_microbatches_without_accepted_tokens_change_nothing():
    samples = batch()
    rejected = [reject(samples[0], slice(None)), *samples[1:]]
    with learner() as one:
        metrics = one.update(scored(one, rejected, max_tokens=1))
        assert metrics["num_tokens"] == sum(s.loss_mask.sum() for s in rejected)
        assert metrics["is_skipped"] == 0.0
    with learner() as one:
        kept = one.update(scored(one, samples[1:], max_tokens=1))
    assert metrics["loss"] == pytest.approx(kept["loss"], rel=1e-9)
    assert metrics["grad_norm"] == pytest.approx(kept["grad_norm"], rel=1e-9)


def test_a_batch_without_accepted_tokens_changes_no_weight(tmp_path):
    with learner() as one:
        before = one.checksums()
        metrics = one.update(scored(one, [reject(s, slice(None)) for s in batch()]))
        assert (metrics["is_skipped"], metrics["num_tokens"], metrics["non_finite_updates"]) == (
            1.0,
            0.0,
            0.0,
        )
        assert one.checksums() == before


def test_an_update_that_is_not_finite_is_skipped_kept_and_counted(tmp_path):
    samples = batch()
    bad = [
        *samples[:-1],
        Sample(
            9,
            samples[-1].token_ids,
            *[samples[-1].action_mask] * 2,
            samples[-1].behavior_logprobs,
            samples[-1].advantages * np.nan,
        ),
    ]
    with learner(dump_folder=str(tmp_path / "bad")) as one:
        before = one.checksums()
        metrics = one.update(scored(one, bad))
        assert (metrics["is_skipped"], metrics["non_finite_updates"]) == (1.0, 1.0)
        assert all(math.isfinite(value) for value in metrics.values())
        assert one.checksums() == before
        dump = load_file(tmp_path / "bad" / "update000000_rank0.safetensors")
        assert sorted(dump["0.sample_indices"].tolist()) == [0, 1, 2, 3, 4, 9]
        assert np.isnan(dump["0.advantages"]).any()
        after = one.update(scored(one, samples))
        assert (after["is_skipped"], after["non_finite_updates"]) == (0.0, 1.0)
        assert one.checksums() != before


# ------------------------------------------------------------------------------------- losses and corrections


def algorithm_of(policy_loss, **changes):
    aggregation = "sequence_mean_token_mean" if policy_loss in ("gspo", "gmpo") else "token_mean"
    wide = {"clip_cov": ClipCovConfig(share=0.1, lower=-5.0), "kl_cov": KLCovConfig(share=0.1)}
    return AlgorithmConfig(**({"policy_loss": policy_loss, "aggregation": aggregation, **wide} | changes))


def near(one, samples, seed=1):
    """The samples as if sampled by a policy near the learner's, so that a correction keeps some tokens and
    rejects others.
    """
    rng = np.random.default_rng(seed)
    by_index = {}
    for part in scored(one, samples):
        for place, index in enumerate(part.microbatch.sample_indices):
            by_index[index] = part.proximal_logprobs[part.microbatch.sequence_ids == place]
    found = []
    for sample in samples:
        behavior = np.zeros(sample.num_tokens, np.float32)
        behavior[sample.action_mask] = by_index[sample.index] + rng.normal(0, 0.8, sample.action_mask.sum())
        found.append(dataclasses.replace(sample, behavior_logprobs=behavior))
    return found


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_no_loss_or_correction_depends_on_how_the_batch_was_cut(policy_loss):
    with learner() as one:
        samples = near(one, batch(8))

    def two_updates(samples, max_tokens):
        with learner(algorithm=algorithm_of(policy_loss, correction=CHAIN)) as one:
            items = scored(one, samples, max_tokens=max_tokens)
            return [one.update(items) for _ in range(2)]

    whole = two_updates(samples, 1000)
    assert 0 < whole[0]["correction/rejected/tokens"] < 1
    assert 0 < whole[0]["correction/rejected/m2po"] < 1
    assert (
        0 < whole[0]["correction/rejected/opsm"] < 1
    )  # server and learner differ before anything is learned
    for max_tokens in (30, 1):
        for step, other in zip(whole, two_updates(samples[::-1], max_tokens), strict=True):
            assert other == pytest.approx(step, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_the_first_update_on_policy_has_a_ratio_of_exactly_1(policy_loss):
    with learner(mode="on_policy", algorithm=algorithm_of(policy_loss)) as one:
        metrics = one.update(scored(one, batch()))
    assert (metrics["ppo_kl"], metrics["ratio_mean"], metrics["ratio_max"]) == (0.0, 1.0, 1.0)
    assert (metrics["clip_low"], metrics["clip_high"], metrics["clip_dual"]) == (0.0, 0.0, 0.0)


def expected_correction(samples, proximal):
    """CHAIN by loops: the weight of each accepted token, by (sample, position)."""
    logs = {
        s.index: {
            t: proximal[s.index][t] - float(s.behavior_logprobs[t]) for t in np.flatnonzero(s.action_mask)
        }
        for s in samples
    }
    weights = {}
    for sample in samples:
        own = logs[sample.index]
        if not 0.2 <= math.exp(sum(own.values()) / len(own)) <= 4.0:
            continue
        for t, x in own.items():
            if math.exp(x) - 1 - x <= 1.0:
                weights[sample.index, t] = min(math.exp(sum(own.values())), 3.0)
    kept = sorted(weights, key=lambda key: logs[key[0]][key[1]] ** 2)
    while sum(logs[i][t] ** 2 for i, t in kept) / len(kept) > 0.3:
        kept.pop()
    by_sequence = {i: weights[i, t] for i, t in kept}  # one weight each, however long it is
    mean = sum(by_sequence.values()) / len(by_sequence)
    return {key: weights[key] / mean for key in kept}


@pytest.mark.parametrize("denominator", ["accepted", "original"])
@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
)
def test_a_corrected_loss_equals_a_loop(denominator, aggregation):
    """Before the first update the ratio is 1 and a token's loss is minus its advantage."""
    with learner() as one:
        samples = near(one, batch(8))
    correction = CHAIN.model_copy(update={"denominator": denominator, "opsm_delta": None})
    with learner(
        algorithm=AlgorithmConfig(aggregation=aggregation, constant_length=32, correction=correction)
    ) as one:
        items = scored(one, samples, max_tokens=40)
        proximal = {s.index: np.zeros(s.num_tokens) for s in samples}
        for part in items:
            for place, index in enumerate(part.microbatch.sample_indices):
                proximal[index][samples[index].action_mask] = part.proximal_logprobs[
                    part.microbatch.sequence_ids == place
                ]
        metrics = one.update(items)
    weights = expected_correction(samples, proximal)
    terms = [
        [
            -weights[s.index, t] * float(s.advantages[t])
            for t in range(s.num_tokens)
            if (s.index, t) in weights
        ]
        for s in samples
    ]
    counts = [
        len(t) if denominator == "accepted" else s.action_mask.sum()
        for s, t in zip(samples, terms, strict=True)
    ]
    expected = {
        "token_mean": sum(map(sum, terms)) / sum(counts),
        "sequence_mean_token_mean": sum(sum(t) / n for t, n in zip(terms, counts, strict=True) if t)
        / len(samples),
        "sequence_mean_token_sum": sum(map(sum, terms)) / len(samples),
        "constant": sum(map(sum, terms)) / (len(samples) * 32),
    }[aggregation]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["num_tokens"] == len(weights)
    num_actions = sum(s.action_mask.sum() for s in samples)
    assert metrics["correction/rejected/all"] == pytest.approx(1 - len(weights) / num_actions)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_float32_losses_and_gradient_norms_of_every_loss_do_not_depend_on_the_split(policy_loss):
    samples = batch(7)
    whole, cut = [], []
    for found, max_tokens in ((whole, 1000), (cut, 30)):
        with learner(master_dtype=torch.float32, algorithm=algorithm_of(policy_loss)) as one:
            found.append(one.update(scored(one, samples, max_tokens=max_tokens)))
    assert cut[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-6)
    assert cut[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("estimator", ["k3", "k3_k2grad"])
def test_kl_times_the_ratio_equals_a_loop(estimator):
    kl = KLConfig(coefficient=2.0, estimator=estimator, off_policy_ratio=True)
    with learner(algorithm=AlgorithmConfig(kl=kl)) as one:
        samples = batch()
        one.update(scored(one, samples))  # away from the reference
        zero = [dataclasses.replace(s, advantages=0 * s.advantages) for s in samples]
        [item] = scored(one, zero)
        one.update([item])  # and away from the scores
        policy = one._logprobs(one._policy, item.microbatch)
        loss = one.update([item])["loss"]
    terms = []
    for pi, prox, ref, mu in zip(
        policy, item.proximal_logprobs, item.ref_logprobs, item.microbatch.behavior_logprobs, strict=True
    ):
        terms.append(
            min(math.exp(prox - mu), 2.0) * math.exp(pi - prox) * (math.exp(ref - pi) - 1 - (ref - pi))
        )
    assert loss == pytest.approx(2.0 * sum(terms) / len(terms), rel=1e-6)


def test_in_bypass_the_ratio_is_policy_over_behavior_and_rejection_compares_the_start_of_the_step():
    with learner() as one:
        samples = near(one, batch(8))
    correction = CorrectionConfig(
        reject={"far": RejectionConfig(level="token", lower=0.6, upper=1.5)}, m2po_threshold=0.03
    )
    found = {}
    for mode in ("decoupled", "bypass"):
        with learner(mode=mode, algorithm=AlgorithmConfig(correction=correction, clip_high=0.3)) as one:
            items = scored(one, samples, max_tokens=40)
            found[mode] = [i.correction.accepted for i in items], one.update(items)
    for accepted, other in zip(found["bypass"][0], found["decoupled"][0], strict=True):
        np.testing.assert_array_equal(accepted, other)
    assert all(np.all(i.correction.weights == 1) for i in items)
    terms = []
    for item in items:
        kept = item.correction.accepted
        ratios = np.exp(item.proximal_logprobs - item.microbatch.behavior_logprobs)[kept]
        advantages = item.microbatch.advantages[kept]
        terms.append(np.maximum(-ratios * advantages, -ratios.clip(0.8, 1.3) * advantages))
    metrics = found["bypass"][1]
    assert metrics["loss"] == pytest.approx(np.concatenate(terms).mean(), rel=1e-6)
    for name in ("rejected/far", "rejected/m2po", "kl_k1", "ess"):
        assert metrics[f"correction/{name}"] == pytest.approx(
            found["decoupled"][1][f"correction/{name}"], rel=1e-9
        )
    assert 0 < metrics["correction/rejected/m2po"] < 1


def test_a_correction_that_rejects_all_changes_no_weight():
    nothing = CorrectionConfig(
        reject={"all": RejectionConfig(level="token", upper=1e-9)}, self_normalize=True, m2po_threshold=1e-12
    )
    for policy_loss in ("ppo_clip", "kl_cov", "clip_cov", "gspo"):
        with learner(algorithm=algorithm_of(policy_loss, correction=nothing)) as one:
            before = one.checksums()
            metrics = one.update(scored(one, batch(), max_tokens=30))
            assert (metrics["is_skipped"], metrics["num_tokens"], metrics["non_finite_updates"]) == (
                1.0,
                0.0,
                0.0,
            )
            assert one.checksums() == before


def test_rejection_touches_neither_advantages_nor_what_is_left_of_the_microbatch():
    samples = batch()
    with learner(algorithm=AlgorithmConfig(correction=CHAIN)) as one:
        for part in scored(one, samples, max_tokens=30):
            assert not (part.correction.accepted & ~part.microbatch.loss_mask).any()
            for place, index in enumerate(part.microbatch.sample_indices):
                own = part.microbatch.sequence_ids == place
                np.testing.assert_array_equal(
                    part.microbatch.advantages[own], samples[index].advantages[samples[index].action_mask]
                )


def test_clip_cov_and_kl_cov_select_by_the_covariance_over_the_whole_update():
    samples = batch(8)
    for policy_loss in ("clip_cov", "kl_cov"):
        with learner(algorithm=algorithm_of(policy_loss)) as one:
            items = scored(one, samples, max_tokens=30)
        prox = np.concatenate([i.proximal_logprobs for i in items])
        advantages = np.concatenate([i.microbatch.advantages for i in items]).astype(float)
        chosen = np.concatenate([i.correction.is_selected for i in items])
        covariance = (prox - prox.mean()) * (advantages - advantages.mean())
        assert chosen.sum() == int(0.1 * len(prox))
        if policy_loss == "kl_cov":
            assert covariance[chosen].min() > covariance[~chosen].max()
        else:
            assert ((covariance[chosen] > -5.0) & (covariance[chosen] < 5.0)).all()


# ------------------------------------------------------------------------------------------------- supervised


def test_supervised_update_is_the_mean_cross_entropy_and_learns(tmp_path):
    samples = [Sample.supervised(s.index, s.token_ids, s.action_mask) for s in batch()]
    with learner(temperature=1.0) as one:
        model = plain_model(tmp_path, one)
        losses = []
        for s in samples:
            logits = (
                model(torch.tensor(s.token_ids[None], dtype=torch.int64)).logits[0, :-1].detach().double()
            )
            picked = torch.log_softmax(logits, -1).gather(
                -1, torch.tensor(s.token_ids[1:, None], dtype=torch.int64)
            )[:, 0]
            losses.append(-picked[torch.tensor(s.loss_mask[1:])])
        shard = pack(samples, max_tokens=30, world_size=1)[0]
        metrics = [one.supervised_update(shard) for _ in range(12)]
    assert metrics[0]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"]


# ------------------------------------------------------------------------------------ weights and checkpoints


def test_export_loads_in_transformers_with_the_same_logits_and_its_tokenizer(tmp_path):
    (tmp_path / "source").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (tmp_path / "source" / name).write_text(name)
    source = ModelConfig(tokenizer_path=str(tmp_path / "source"))
    with learner(model=source, master_dtype=torch.float32) as one:
        one.export(str(tmp_path / "policy"))
        one.export(str(tmp_path / "policy"))  # over an older one
        copied = {p.name for p in (tmp_path / "policy").iterdir()} - {
            "config.json",
            "generation_config.json",
            "model.safetensors",
        }
        assert copied == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        specs = {s.name: s for s in one.tensor_specs()}
        tensors = load_file(tmp_path / "policy" / "model.safetensors")
        assert "lm_head.weight" not in specs  # tied to the embedding
        assert {n: (s.dtype, s.shape, s.num_bytes) for n, s in specs.items()} == {
            n: (str(t.dtype), t.shape, t.nbytes) for n, t in tensors.items()
        }
        assert one.checksums() == {n: tensor_checksum(torch.tensor(t)) for n, t in tensors.items()}
        [own] = scored(one, batch(1))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    assert type(loaded).__name__ == "Qwen2ForCausalLM"
    log_p = plain_logprobs(loaded, batch(1)[0])
    np.testing.assert_allclose(
        own.proximal_logprobs, log_p[own.microbatch.predictor_positions, own.microbatch.targets], atol=1e-5
    )
    with learner(model=ModelConfig(path=str(tmp_path / "policy")), master_dtype=torch.float32) as one:
        np.testing.assert_array_equal(scored(one, batch(1))[0].proximal_logprobs, own.proximal_logprobs)
    assert list(tmp_path.glob(".*")) == []


def test_bfloat16_is_computed_with_and_published_while_master_weights_stay_float32(tmp_path):
    with learner(model=ModelConfig(dtype="bfloat16"), master_dtype=torch.float32) as one:
        items = scored(one, batch())
        assert one.update(items)["ratio_max"] == pytest.approx(1.0)
        assert {s.dtype for s in one.tensor_specs()} == {"bfloat16"}
        one.export(str(tmp_path / "policy"))
        assert {p.dtype for p in one._policy.module.parameters()} == {torch.float32}
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    assert {p.dtype for p in published.parameters()} == {torch.bfloat16}


def test_export_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with learner() as one:
        with pytest.raises(InfrastructureError, match="could not be written"):
            one.export(str(tmp_path / "file" / "policy"))


def test_an_update_moves_the_weights_by_the_rate_of_the_schedule():
    """The first of four updates of warm-up is that of a quarter of the rate; after the last update of a decay
    nothing moves.
    """

    def train(num_updates, **optimizer):
        with learner(learner=LearnerConfig(optimizer=OptimizerConfig(**optimizer)), total_updates=2) as one:
            return [(one.update(scored(one, batch()))["lr"], one.checksums()) for _ in range(num_updates)]

    assert train(1, lr=2e-2, warmup_updates=4) == train(1, lr=5e-3)
    first, second, third = train(3, lr=1e-2, schedule="linear")
    assert (first[0], second[0], third[0]) == (1e-2, 5e-3, 0.0)
    assert first[1] != second[1]
    assert second[1] == third[1]


def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path):
    samples = batch()
    schedule = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, schedule="cosine", warmup_updates=2))
    options = {"learner": schedule, "master_dtype": torch.float32}
    with learner(**options) as one:
        one.update(scored(one, samples))
        one.save(str(tmp_path / "state"))
        expected = [one.update(scored(one, samples)) for _ in range(2)], one.checksums()
    with learner(**options, seed=99) as one:
        scored(one, samples)  # gathers weights that must not outlive the load
        one.load(str(tmp_path / "state"))
        assert ([one.update(scored(one, samples)) for _ in range(2)], one.checksums()) == expected


def test_a_checkpoint_holds_the_state_of_its_start_whatever_the_learner_does_meanwhile(tmp_path, monkeypatch):
    """The disk writes nothing until the next update is about to change the weights."""
    is_about_to_change, write = threading.Event(), FileSystemWriter.write_data

    def write_late(self, *args):
        assert is_about_to_change.wait(60)
        return write(self, *args)

    def wait_for_the_disk(futures, timeout):
        is_about_to_change.set()
        return wait(futures, timeout)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    monkeypatch.setattr("agentrl.learner.checkpoint.wait", wait_for_the_disk)
    samples = batch()
    with learner() as one:
        one.update(scored(one, samples))
        before = one.checksums()
        one.start_save(str(tmp_path / "state"))
        one.update(scored(one, samples))
        one.finish_save()
        after = one.checksums()
    with learner(seed=99) as one:
        one.load(str(tmp_path / "state"))
        assert one.checksums() == before
        one.update(scored(one, samples))
        assert one.checksums() == after


def test_a_disk_that_never_answers_holds_up_one_update_for_the_bound_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.learner.checkpoint.dcp.async_save", lambda *_, **__: Future())
    with learner(learner=LearnerConfig(save_timeout_s=0.01)) as one:
        one.start_save(str(tmp_path))
        with pytest.raises(CheckpointError, match=r"it took longer than learner\.save_timeout_s=0\.01$"):
            one.update(scored(one, batch()))


def test_a_checkpoint_that_takes_too_long_is_told_with_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "agentrl.learner.checkpoint.dcp.async_save", lambda *_, **__: Future()
    )  # a disk that never answers
    with learner(learner=LearnerConfig(save_timeout_s=0.01)) as one:
        with pytest.raises(
            CheckpointError, match=r"written to .*: it took longer than learner\.save_timeout_s=0\.01$"
        ):
            one.save(str(tmp_path))


def test_a_missing_checkpoint_is_named(tmp_path):
    with learner() as one:
        with pytest.raises(CheckpointError, match="nowhere"):
            one.load(str(tmp_path / "nowhere"))


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ModelConfig(path="/no/such/model")}, "model.path='/no/such/model'"),
        (
            {"from_scratch": ModelFromScratchConfig(architecture="qwen2", sizes={"hiden_size": 3})},
            "unknown key 'hiden_size'",
        ),
        (
            {"from_scratch": ModelFromScratchConfig(architecture="qwen2", sizes={"hidden_size": 32})},
            "tokenizer.json does not exist",
        ),
        ({"device": "cuda"}, "has GPUs, but torch finds none"),
    ],
)
def test_what_cannot_be_built_is_a_config_error(options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message), lone_learner(spec(**options)):
        pass


def test_schedules():
    def rates(schedule, warmup):
        config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_updates=warmup)
        return [learning_rate(update, config, total_updates=6) for update in range(7)]

    assert rates("constant", 2) == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear", 2) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates("cosine", 0) == pytest.approx([(1 + math.cos(math.pi * u / 6)) / 2 for u in range(7)])
