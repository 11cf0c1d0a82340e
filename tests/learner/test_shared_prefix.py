"""A prompt computed once for all attempts of a group: the same losses and gradients, and fewer tokens."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.schema import Config
from agentrl.learner.attention import Segments, segment_sdpa
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack
from parts.learner import learner_spec, lone_learner, tiny_sizes

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY)


def group(prompt_length, response_lengths, rng, first=0):
    """Attempts at one prompt: an action, then actions and context in turn."""
    prompt = rng.integers(0, VOCABULARY, prompt_length)
    return [_attempt(first + i, prompt, int(n), rng) for i, n in enumerate(response_lengths)]


def _attempt(index, prompt, length, rng):
    tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, length)]).astype(np.int32)
    mask = np.zeros(len(tokens), bool)
    mask[len(prompt) :] = rng.random(length) < 0.7
    mask[len(prompt)] = True
    loss_mask = mask & (rng.random(len(tokens)) < 0.9)
    behavior, advantages = rng.normal(-3, 1, len(tokens)), rng.normal(size=len(tokens))
    return Sample(index, tokens, mask, loss_mask, behavior.astype(np.float32), advantages.astype(np.float32))


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    samples = []
    for prompt, num in draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=4)
    ):
        samples += group(prompt, rng.integers(1, 15, num), rng, len(samples))
    return samples


@given(batches(), st.integers(8, 120), st.integers(1, 3))
def test_every_row_can_be_read_from_its_prompt_and_its_response(batch, max_tokens, world_size):
    shards = pack(batch, max_tokens=max_tokens, world_size=world_size, shared_prefix=True)
    assert len({len(shard) for shard in shards}) == 1
    rows, facts = [], {}
    for m in (m for shard in shards for m in shard if not m.is_filler):
        spans = np.split(np.arange(len(m.token_ids)), np.cumsum(m.segment_lengths)[:-1])
        continued = set(m.prefix_segments[m.prefix_segments >= 0].tolist())
        whole = [
            np.concatenate([spans[prefix], span]) if prefix >= 0 else span
            for span, prefix in zip(spans, m.prefix_segments, strict=True)
        ]
        rows += [
            m.token_ids[places].tolist() for segment, places in enumerate(whole) if segment not in continued
        ]
        for places in whole:
            np.testing.assert_array_equal(m.position_ids[places], np.arange(len(places)))
        assert m.num_tokens <= max_tokens or len(m.segment_lengths) == 1
        np.testing.assert_array_equal(
            m.position_ids[m.predictor_positions] + 1, _positions_of_targets(m, batch)
        )
        for index, place, target in zip(
            m.sample_indices[m.sequence_ids], m.action_places, m.targets, strict=True
        ):
            facts[index, place] = target
    assert sorted(rows) == sorted(s.token_ids.tolist() for s in batch)
    expected = {
        (s.index, place): token for s in batch for place, token in enumerate(s.token_ids[s.action_mask])
    }
    assert facts == expected


def _positions_of_targets(microbatch, batch):
    owners = microbatch.sample_indices[microbatch.sequence_ids]
    return [
        np.flatnonzero(batch[i].action_mask)[place]
        for i, place in zip(owners, microbatch.action_places, strict=True)
    ]


def test_a_prompt_stands_once_for_all_attempts_that_fit_beside_it():
    rng = np.random.default_rng(0)
    batch = [*group(40, [10, 9, 8, 7], rng), *group(30, [5], rng, 4)]
    [[together]] = pack(batch, max_tokens=1000, world_size=1, shared_prefix=True)
    assert together.num_tokens == 40 + 34 + 35
    assert sorted(together.prefix_segments.tolist()) == sorted(
        [-1, -1, *[int(np.argmax(together.segment_lengths == 40))] * 4]
    )
    [[repeated]] = pack(batch, max_tokens=1000, world_size=1)
    assert (repeated.num_tokens, set(repeated.prefix_segments.tolist())) == (5 * 40 - 10 + 39, {-1})
    [apart] = pack(batch, max_tokens=60, world_size=1, shared_prefix=True)
    assert sorted(m.num_tokens for m in apart) == [35, 40 + 17, 40 + 17]
    two = pack(batch[:4], max_tokens=1000, world_size=2, shared_prefix=True)
    assert [[m.num_tokens for m in shard] for shard in two] == [[57], [57]]  # every rank has work


@contextmanager
def learner(**changes):
    options = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2), shared_prefix=True, **changes)
    algorithm = AlgorithmConfig(entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1, estimator="k2"))
    with lone_learner(learner_spec(sizes=SIZES, learner=options, algorithm=algorithm)) as one:
        yield one


def place(port):
    return {"rank": 0, "address": "127.0.0.1", "port": port}


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("max_tokens", [1000, 45])
def test_losses_and_gradients_are_those_of_whole_rows(max_tokens, changes):
    rng = np.random.default_rng(1)
    batch = [*group(20, [12, 5, 9, 1], rng), *group(14, [6, 7, 8], rng, 4)]
    found = []
    for shared in (False, True):
        with learner(**changes) as one:
            [microbatches] = pack(batch, max_tokens=max_tokens, world_size=1, shared_prefix=shared)
            items = one.score(microbatches)
            found.append([one.update(items) for _ in range(2)])
            num_tokens = sum(m.num_tokens for m in microbatches)
    assert num_tokens < sum(s.num_tokens for s in batch)
    for whole, once in zip(*found, strict=True):
        assert once == pytest.approx(whole, rel=1e-7, abs=1e-9)  # norms and rotations are computed in float32


@pytest.mark.parametrize("window", [None, 4, 100])
def test_a_segment_behind_a_prefix_attends_as_the_joined_row_does(window):
    torch.manual_seed(0)
    lengths, prefixes = [5, 3, 4, 6], [-1, 0, 0, -1]
    query, key, value = (torch.randn(1, heads, 18, 8, dtype=torch.float64) for heads in (4, 2, 2))
    starts = [0, *itertools.accumulate(lengths)]
    spans = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    options = {"segments": Segments(lengths, prefixes), "sliding_window": window}
    packed, _ = segment_sdpa(torch.nn.Identity(), query, key, value, None, **options)
    for span, prefix in zip(spans, prefixes, strict=True):
        row = (spans[prefix] if prefix >= 0 else []) + span
        apart = {"segments": Segments([len(row)]), "sliding_window": window}
        joined, _ = segment_sdpa(
            torch.nn.Identity(), *(t[:, :, row] for t in (query, key, value)), None, **apart
        )
        torch.testing.assert_close(packed[:, span], joined[:, -len(span) :], rtol=1e-12, atol=1e-12)


def test_the_config_refuses_what_cannot_share_a_prefix():
    with pytest.raises(ValueError, match=r"use model\.attention=segment_sdpa"):
        Config.model_validate({"learner": {"shared_prefix": True}, "model": {"attention": "flex_attention"}})
    with pytest.raises(ValueError, match="use sequence_parallel=1"):
        Config.model_validate({"learner": {"shared_prefix": True, "world_size": 2, "sequence_parallel": 2}})
    assert Config.model_validate({"learner": {"shared_prefix": True}}).learner.shared_prefix
