"""Laws of packing: nothing lost, nothing padded, ranks in step."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.learner.attention import attention_parity
from agentrl.learner.batch import Sample
from agentrl.learner.packing import PARITY_TOKENS, budget_metrics, filler, pack, segment_cost
from agentrl.learner.sample_refs import SampleRef
from parts.trajectories import make_trajectory


@st.composite
def samples(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=20))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    return [make_sample(index, length, rng) for index, length in enumerate(lengths)]


def make_sample(index, length, rng):
    starts = (
        0,
        *sorted(
            rng.choice(np.arange(1, length), min(int(rng.integers(0, 3)), length - 1), replace=False).tolist()
        ),
    )
    action_mask = rng.random(length) < 0.5
    action_mask[list(starts)] = False
    loss_mask = action_mask & (rng.random(length) < 0.8)
    tokens = rng.integers(0, 1000, length).astype(np.int32)
    return Sample(
        index,
        tokens,
        action_mask,
        loss_mask,
        rng.normal(size=length).astype(np.float32),
        rng.normal(size=length).astype(np.float32),
        starts,
    )


@given(samples(), st.integers(1, 64), st.integers(1, 4))
def test_packing_keeps_every_row_and_what_is_known_of_its_tokens(batch, max_tokens, world_size):
    microbatches = [
        m
        for shard in pack(batch, max_tokens=max_tokens, world_size=world_size)
        for m in shard
        if not m.is_filler
    ]
    packed = [
        row.tolist() for m in microbatches for row in np.split(m.token_ids, np.cumsum(m.segment_lengths)[:-1])
    ]
    assert sorted(packed) == sorted(row.token_ids.tolist() for sample in batch for row in sample.segments())
    for m in microbatches:
        np.testing.assert_array_equal(
            m.position_ids, np.concatenate([np.arange(n) for n in m.segment_lengths])
        )
        np.testing.assert_array_equal(m.targets, m.token_ids[m.predictor_positions + 1])
        assert (m.position_ids[m.predictor_positions + 1] > 0).all()  # predictor and target stand in one row
    for name, facts in facts_by_sample(microbatches).items():
        for sample in batch:
            np.testing.assert_array_equal(
                facts.get(sample.index, []), getattr(sample, name)[sample.action_mask]
            )


def facts_by_sample(microbatches):
    """{column: {index: values of the sample's action tokens in order}}, found by the microbatches' own
    labels.
    """
    columns = {
        "token_ids": "targets",
        "loss_mask": "loss_mask",
        "behavior_logprobs": "behavior_logprobs",
        "advantages": "advantages",
    }
    found = {name: {} for name in columns}
    for name, column in columns.items():
        for m in microbatches:
            for index, place, value in zip(
                m.sample_indices[m.sequence_ids], m.action_places, getattr(m, column), strict=True
            ):
                assert found[name].setdefault(index, {}).setdefault(place, value) is value, (
                    "a token stands twice"
                )
    return {
        name: {index: [own[place] for place in range(len(own))] for index, own in facts.items()}
        for name, facts in found.items()
    }


def test_the_budget_counts_what_is_over_it_and_what_is_shared():
    microbatches = [SimpleNamespace(num_tokens=tokens) for tokens in (5, 4, 2)]
    assert budget_metrics(microbatches, num_tokens=18, max_tokens=4) == {
        "microbatches_over_budget": 1.0,
        "microbatch_tokens_max": 5.0,
        "shared_tokens": 7.0,
    }


@given(samples(), st.integers(1, 64), st.integers(1, 4))
def test_ranks_have_as_many_microbatches_within_the_budget(batch, max_tokens, world_size):
    shards = pack(batch, max_tokens=max_tokens, world_size=world_size)
    assert len(shards) == world_size
    assert len({len(shard) for shard in shards}) == 1
    for microbatch in (m for shard in shards for m in shard):
        assert microbatch.num_tokens <= max_tokens or len(microbatch.segment_lengths) == 1
    lone = [row.num_tokens for sample in batch for row in sample.segments() if row.num_tokens > max_tokens]
    metrics = budget_metrics(
        [m for shard in shards for m in shard],
        num_tokens=sum(sample.num_tokens for sample in batch),
        max_tokens=max_tokens,
    )
    assert metrics["shared_tokens"] == 0
    assert metrics["microbatches_over_budget"] == len(lone)
    assert (
        metrics["microbatch_tokens_max"] == max(lone)
        if lone
        else metrics["microbatch_tokens_max"] <= max_tokens
    )
    fillers = [m for shard in shards for m in shard if m.is_filler]
    assert len(fillers) < world_size
    assert sum(m.num_action_tokens + m.num_sequences + m.num_tokens for m in fillers) == 0


@given(samples(), st.integers(1, 64), st.integers(1, 4))
def test_a_sequence_counts_once_and_is_split_only_where_it_exceeds_a_microbatch(
    batch, max_tokens, world_size
):
    microbatches = [
        m
        for shard in pack(batch, max_tokens=max_tokens, world_size=world_size)
        for m in shard
        if not m.is_filler
    ]
    counted = [index for m in microbatches for index in m.sample_indices[m.is_counted]]
    assert sorted(counted) == [sample.index for sample in batch if sample.action_mask.any()]
    assert sum(m.num_sequences for m in microbatches) == len(counted)
    for m in microbatches:
        assert m.loss_lengths.tolist() == [batch[index].loss_mask.sum() for index in m.sample_indices]
    for m in microbatches:
        for index, is_split in zip(m.sample_indices, m.is_split, strict=True):
            sample = batch[index]
            assert is_split == (sample.num_tokens > max_tokens and len(sample.segment_starts) > 1)


def test_pairs_stay_together_whatever_their_length_and_a_sample_given_twice_is_two_sequences():
    rng = np.random.default_rng(0)
    pair = make_sample(7, 30, rng)
    while len(pair.segment_starts) == 1:
        pair = make_sample(7, 30, rng)
    shards = pack([pair, pair], max_tokens=4, world_size=1, may_split=False)
    assert [m.sample_indices.tolist() for m in shards[0]] == [[7], [7]]
    [[together]] = pack([pair, pair], max_tokens=100, world_size=1)
    assert together.sample_indices.tolist() == [7, 7]
    assert together.num_sequences == 2


@pytest.mark.parametrize("parity_tokens", [1e9, 40.0])
def test_ranks_get_equal_work_in_every_round(parity_tokens):
    """With attention for free the tokens are equal; where it dominates, tokens plus squares over the parity
    are.
    """
    rng = np.random.default_rng(0)
    batch = [make_sample(i, int(n), rng) for i, n in enumerate(rng.integers(5, 120, 400))]
    shards = pack(batch, max_tokens=512, world_size=4, parity_tokens=parity_tokens)
    costs = np.array(
        [[sum(n + n * n / parity_tokens for n in m.segment_lengths) for m in shard] for shard in shards]
    )
    assert costs.sum(1).max() < 1.02 * costs.sum(1).min()
    assert (costs.max(0) < 1.1 * costs.min(0)).all()  # ranks wait for each other at every microbatch


@given(samples(), st.integers(1, 64), st.integers(1, 3))
def test_the_costliest_microbatches_come_first_on_every_rank(batch, max_tokens, world_size):
    """What is dealt in one round costs no less than what comes after it; fillers come last."""
    shards = pack(batch, max_tokens=max_tokens, world_size=world_size)
    sizes = [
        [
            0.0 if m.is_filler else segment_cost(m.segment_lengths, m.prefix_segments, PARITY_TOKENS)
            for m in shard
        ]
        for shard in shards
    ]
    for one, after in itertools.pairwise(zip(*sizes, strict=True)):
        assert min(one) >= max(after)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "world_size", "sizes"),
    [
        ([10], 10, 1, [10]),
        ([5] * 42, 10, 1, [10] * 21),  # filled to the last token
        ([2, 3, 3, 4], 6, 1, [6, 6]),  # the longest are placed first
        ([6, 6, 6, 1, 1], 10, 1, [7, 7, 6]),  # 20 tokens do not fit into two, but into three
        ([6] * 31 + [1] * 4, 10, 1, [6] * 31 + [2] * 2),  # far more than 19 are tried in steps of a tenth
        ([5] * 42, 10, 2, [10] * 20 + [5] * 2),  # as many for each rank
        ([100, 5, 5], 10, 1, [100, 10]),  # what is too long is one microbatch
        ([100, 100, 5, 5, 5], 10, 1, [100, 100, 10, 5]),
        ([11, 9, 1], 10, 1, [11, 10]),
    ],
)
def test_how_many_microbatches_there_are_and_how_full(lengths, max_tokens, world_size, sizes):
    batch = [plain_sample(index, length) for index, length in enumerate(lengths)]
    shards = pack(batch, max_tokens=max_tokens, world_size=world_size)
    assert sorted((m.num_tokens for shard in shards for m in shard), reverse=True) == sizes


def plain_sample(index, length):
    """A sample of one segment without actions."""
    zeros, never = np.zeros(length, np.float32), np.zeros(length, bool)
    return Sample(index, np.zeros(length, np.int32), never, never, zeros, zeros)


@pytest.mark.parametrize(
    ("lengths", "prefixes", "parity_tokens", "cost"),
    [
        ([10], [-1], 100.0, 10 + 1),  # 2 * 10 * 10 / 2 pairs of tokens
        ([10, 20], [-1, -1], 100.0, 30 + 1 + 4),
        ([10, 20], [-1, 0], 100.0, 30 + 1 + 2 * 6),  # the second is behind the first: 20 * 30 pairs
        ([20, 10, 30], [-1, 0, 0], 100.0, 60 + 4 + 2 * 3 + 2 * 15),
        ([10, 20, 30], [-1, -1, 1], 100.0, 60 + 1 + 4 + 2 * 15),
        ([10, 20, 30], [-1, 0, 1], 100.0, 60 + 1 + 2 * 6 + 2 * 18),
        ([16384], [-1], PARITY_TOKENS, 2 * 16384),
    ],
)
def test_the_cost_counts_tokens_and_the_pairs_that_attend(lengths, prefixes, parity_tokens, cost):
    assert segment_cost(np.array(lengths), np.array(prefixes), parity_tokens) == pytest.approx(cost)


def test_a_filler_has_nothing_to_learn():
    one = filler()
    assert (one.sample_indices.tolist(), one.is_filler, one.num_tokens) == ([-1], True, 0)
    assert (len(one.token_ids), one.segment_lengths.tolist(), one.prefix_segments.tolist()) == (2, [2], [-1])
    assert (one.num_action_tokens, one.num_sequences, one.values.tolist(), one.returns.tolist()) == (
        0,
        0,
        [],
        [],
    )


def test_the_bound_on_tokens_goes_before_balance():
    """One long sequence costs as much as many short ones, which do not all fit beside each other."""
    rng = np.random.default_rng(0)
    batch = [make_sample(i, n, rng) for i, n in enumerate([100, *[10] * 30])]
    [shard] = pack(batch, max_tokens=110, world_size=1, parity_tokens=10.0)
    assert max(m.num_tokens for m in shard) <= 110
    assert len(shard) == 4


def test_attention_costs_as_much_as_the_matrices_at_the_parity():
    """By hand for one layer: 2 operations per parameter and token, and per pair of tokens 2 for scores and 2
    for values per column.
    """
    sizes = {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**sizes, num_hidden_layers=3, tie_word_embeddings=True)
    )
    n = attention_parity(model)
    causal_pairs = n * n / 2
    assert 2 * n * sum(p.numel() for p in model.parameters()) == pytest.approx(causal_pairs * 4 * 8 * 3)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="nothing to pack"):
        pack([], max_tokens=8, world_size=1)


# ------------------------------------------------------------------------------------ trajectories to samples

turns = st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=6)


def trajectory(spans, *, context_factor=1):
    """A prompt, then spans of (is_action, length); context spans are `context_factor` times as long."""
    mask = [False, False]
    for is_action, length in spans:
        mask += [is_action] * (length if is_action else length * context_factor)
    action_mask = np.array(mask)
    count = int(action_mask.sum())
    tokens = np.full(len(mask), 9, np.int32)
    tokens[action_mask] = np.arange(100, 100 + count)
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[action_mask] = -np.arange(1, count + 1)
    return make_trajectory(
        np.where(action_mask, 3, -1), version=3, token_ids=tokens, behavior_logprobs=logprobs
    )


def sample_of(one, advantage):
    return SampleRef.plain(0, AttemptFacts.of(one), advantage=advantage).load()


@given(turns, st.integers(2, 5), st.floats(-2, 2, width=32))
def test_context_tokens_change_no_fact_of_an_action_token(spans, factor, advantage):
    def columns(one):
        [[microbatch]] = pack([sample_of(one, advantage)], max_tokens=1, world_size=1)
        facts = (
            microbatch.targets,
            microbatch.behavior_logprobs,
            microbatch.advantages,
            microbatch.loss_mask,
            microbatch.sequence_ids,
        )
        return [fact.tolist() for fact in facts], microbatch.num_loss_tokens, microbatch.num_sequences

    compact = [span for span in spans if span[0]]
    assert (
        columns(trajectory(spans))
        == columns(trajectory(spans, context_factor=factor))
        == columns(trajectory(compact))
    )


@given(turns, st.floats(-2, 2, width=32))
def test_every_action_token_has_the_advantage_whatever_follows_it_or_is_rejected(spans, advantage):
    one = trajectory([*spans, (True, 2), (False, 3)])  # ends in a context span
    sample = sample_of(one, advantage)
    assert set(sample.advantages[one.action_mask].tolist()) == {advantage}
    assert set(sample.advantages[~one.action_mask].tolist()) == {0.0}
    rejected = sample.action_mask.copy()
    rejected[np.flatnonzero(rejected)[-1]] = False
    partial = Sample(
        0, sample.token_ids, sample.action_mask, rejected, sample.behavior_logprobs, sample.advantages
    )
    [[microbatch]] = pack([partial], max_tokens=100, world_size=1)
    assert microbatch.num_loss_tokens == microbatch.num_action_tokens - 1
    assert set(microbatch.advantages.tolist()) == {advantage}


def test_rows_of_a_trajectory_become_segments_of_its_sample():
    one = trajectory([(True, 3), (False, 4), (True, 2)]).replace(segment_starts=(0, 6))
    sample = sample_of(one, 0.5)
    [[microbatch]] = pack([sample], max_tokens=100, world_size=1)
    assert microbatch.segment_lengths.tolist() == [6, 5]
    assert microbatch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert microbatch.sequence_ids.tolist() == [0] * 5
    assert microbatch.num_sequences == 1


def test_a_row_that_begins_with_a_sampled_token_is_refused():
    one = trajectory([(True, 3), (False, 4)]).replace(segment_starts=(0, 3))
    with pytest.raises(AssertionError, match="nothing predicts it"):
        sample_of(one, 0.5)


def test_supervised_samples_never_learn_the_first_token_of_a_row():
    sample = Sample.supervised(0, np.array([5, 6, 7], np.int32), np.array([True, False, True]))
    assert sample.loss_mask.tolist() == [False, False, True]
    rows = Sample.supervised(0, np.array([5, 6, 7, 8], np.int32), np.array([True, True, True, True]), (0, 2))
    assert rows.loss_mask.tolist() == [False, True, False, True]
