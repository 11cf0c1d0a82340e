"""Tokens that rows share are computed once: the same losses and gradients, and fewer tokens."""

import dataclasses
import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.learner.attention import Segments, segment_sdpa
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack, segment_cost
from agentrl.learner.step import count_update
from agentrl.learner.work import WorkCounter
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
    """Samples of one to three segments. A segment may begin as any earlier one does, up to any token;
    what was an action there may be context here.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    segments, samples = [], []
    for index in range(draw(st.integers(1, 8))):
        own = [_segment(segments, rng) for _ in range(draw(st.integers(1, 3)))]
        tokens, mask = (np.concatenate(column) for column in zip(*own, strict=True))
        starts = np.cumsum([0, *(len(row) for row, _ in own)])[:-1].tolist()
        loss_mask = mask & (rng.random(len(mask)) < 0.9)
        columns = rng.normal(size=(2, len(mask))).astype(np.float32)
        samples.append(Sample(index, tokens, mask, loss_mask, columns[0] - 3, columns[1], tuple(starts)))
    return samples


def _segment(earlier, rng):
    tokens, mask = np.zeros(0, np.int32), np.zeros(0, bool)
    if earlier and rng.random() < 0.8:
        tokens, mask = earlier[rng.integers(len(earlier))]
        if rng.random() < 0.8:
            ends = [*np.flatnonzero(np.diff(mask)) + 1, int(rng.integers(1, len(tokens) + 1))]
            length = int(rng.choice(ends))
            tokens, mask = tokens[:length], mask[:length] & (rng.random() < 0.5)
    length = int(rng.integers(0 if len(tokens) else 2, 9))
    runs = np.repeat(rng.random(5) < 0.6, 2)[:length]
    tokens = np.concatenate([tokens, rng.integers(0, VOCABULARY, length).astype(np.int32)])
    mask = np.concatenate([mask, runs])
    mask[0] = False
    earlier.append((tokens, mask))
    return tokens, mask


def rows_of(sample):
    return np.split(sample.token_ids, sample.segment_starts[1:])


@given(batches(), st.integers(8, 120), st.integers(1, 3), st.sampled_from([True, "auto"]), st.floats(1, 1000))
def test_every_row_can_be_read_from_what_it_shares_and_its_own(
    batch, max_tokens, world_size, shared, parity_tokens
):
    shards = pack(
        batch,
        max_tokens=max_tokens,
        world_size=world_size,
        shared_prefix=shared,
        parity_tokens=parity_tokens,
    )
    assert len({len(shard) for shard in shards}) == 1
    found, facts = set(), {}
    known = {tuple(row.tolist()) for sample in batch for row in rows_of(sample)}
    for m in (m for shard in shards for m in shard if not m.is_filler):
        chains = []
        spans = np.split(np.arange(len(m.token_ids)), np.cumsum(m.segment_lengths)[:-1])
        for span, prefix in zip(spans, m.prefix_segments, strict=True):
            assert prefix < len(chains), "a segment is behind the one that it continues"
            chains.append(np.concatenate([chains[prefix], span]) if prefix >= 0 else span)
            np.testing.assert_array_equal(m.position_ids[chains[-1]], np.arange(len(chains[-1])))
        lasting = set(range(len(chains))) - set(m.prefix_segments.tolist())
        assert {tuple(m.token_ids[chains[i]].tolist()) for i in lasting} <= known
        found |= {tuple(m.token_ids[chain].tolist()) for chain in chains}
        assert m.num_tokens <= max_tokens or len(m.segment_lengths) == 1
        np.testing.assert_array_equal(
            m.position_ids[m.predictor_positions] + 1, _positions_of_targets(m, batch)
        )
        for index, place, target, advantage in zip(
            m.sample_indices[m.sequence_ids], m.action_places, m.targets, m.advantages, strict=True
        ):
            assert (index, place) not in facts
            facts[index, place] = target, advantage
    assert known <= found
    expected = {
        (s.index, place): pair
        for s in batch
        for place, pair in enumerate(
            zip(s.token_ids[s.action_mask], s.advantages[s.action_mask], strict=True)
        )
    }
    assert facts == expected


def _positions_of_targets(microbatch, batch):
    owners = microbatch.sample_indices[microbatch.sequence_ids]
    return [
        _positions(batch[i])[batch[i].action_mask][place]
        for i, place in zip(owners, microbatch.action_places, strict=True)
    ]


def _positions(sample):
    return np.concatenate([np.arange(len(row)) for row in rows_of(sample)])


@given(batches())
def test_forks_share_all_tokens_that_they_have_in_common(batch):
    """Segments of one sample do so at any token, and equal ones are there once."""
    for sample in batch:
        [[packed]] = pack([sample], max_tokens=1000, world_size=1, shared_prefix=True)
        prefixes = {tuple(row[:n].tolist()) for row in rows_of(sample) for n in range(1, len(row) + 1)}
        assert packed.num_tokens == len(prefixes)


@given(batches(), st.floats(1, 1000))
def test_auto_never_costs_more_than_separate_rows_or_than_sharing_all(batch, parity_tokens):
    costs = {}
    for shared in (False, True, "auto"):
        [[m]] = pack(batch, max_tokens=9999, world_size=1, shared_prefix=shared, parity_tokens=parity_tokens)
        costs[shared] = segment_cost(m.segment_lengths, m.prefix_segments, parity_tokens)
    assert costs["auto"] <= min(costs[False], costs[True]) * (1 + 1e-9)


def test_rows_with_recorded_experts_share_nothing():
    [first, second] = [
        dataclasses.replace(s, experts=np.zeros((s.num_tokens, 2), np.int16))
        for s in group(10, [3, 4], np.random.default_rng(0))
    ]
    [[packed]] = pack([first, second], max_tokens=1000, world_size=1, shared_prefix=True)
    assert packed.num_tokens == first.num_tokens + second.num_tokens


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


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def either(request):
    spec = learner_spec(sizes=SIZES, algorithm=AlgorithmConfig(aggregation="sequence_mean_token_mean"))
    with lone_learner(dataclasses.replace(spec, master_dtype=request.param)) as one:
        yield one


@settings(max_examples=8)
@given(batches(), st.sampled_from([20, 1000]))
def test_every_gradient_is_that_of_separate_rows(either, batch, max_tokens):
    """Also of an action token that several rows share, each with an advantage, a behavior and a mask of its
    own.
    """
    found = [gradients(either, batch, max_tokens, shared) for shared in (False, True)]
    # Norms and rotations are computed in float32 in either case.
    is_double = either._spec.master_dtype == torch.float64
    for apart, together in zip(*found, strict=True):
        torch.testing.assert_close(
            together, apart, rtol=1e-6 if is_double else 1e-4, atol=1e-7 if is_double else 1e-5
        )


def gradients(one, batch, max_tokens, shared):
    """Return the loss of one update and the gradient of every weight."""
    [microbatches] = pack(batch, max_tokens=max_tokens, world_size=1, shared_prefix=shared)
    items = one.score(microbatches)
    counts, policy = count_update(items), one._policy
    rest = one._objective.score_rest(policy, items)
    total = torch.zeros((), dtype=torch.float64)
    policy.module.zero_grad()
    for item, own in zip(items, rest, strict=True):
        part = one._objective.part(policy, item, counts, own)
        part.loss.backward()
        total += part.loss.detach()
    return [total, *(p.grad.clone() for p in policy.module.parameters())]


def test_an_action_that_several_rows_share_is_scored_once(either):
    [first] = group(6, [8], np.random.default_rng(0))
    first.action_mask[-1] = True  # context behind the last action is marked by nothing
    batch = [first, dataclasses.replace(first, index=1, advantages=-2 * first.advantages)]
    [[packed]] = pack(batch, max_tokens=1000, world_size=1, shared_prefix=True)
    assert packed.num_tokens == first.num_tokens
    assert packed.num_action_tokens == 2 * first.action_mask.sum()
    [[apart]] = pack([first], max_tokens=1000, world_size=1)
    counter = WorkCounter.of(either._policy.module, ModelConfig(path="unread"))
    assert counter.forward([packed]) == counter.forward([apart]) > 0
    assert counter.update([packed]) == counter.update([apart]) > 0
    seen = []
    hook = either._policy.module.register_forward_pre_hook(
        lambda module, args, given: seen.append(len(given["score"].targets_A)), with_kwargs=True
    )
    logprobs = either._policy.score_actions(packed, temperature=1.0)
    hook.remove()
    assert seen == [first.action_mask.sum()]
    torch.testing.assert_close(*logprobs.chunk(2))


@pytest.mark.parametrize("window", [None, 4, 100])
def test_a_segment_behind_a_prefix_attends_as_the_joined_row_does(window):
    torch.manual_seed(0)
    lengths, prefixes = [5, 3, 4, 6, 2, 1], [-1, 0, 0, -1, 2, 4]
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64) for heads in (4, 2, 2))
    starts = [0, *itertools.accumulate(lengths)]
    spans = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    options = {"segments": Segments(lengths, prefixes), "sliding_window": window}
    packed, _ = segment_sdpa(torch.nn.Identity(), query, key, value, None, **options)
    rows = []
    for span, prefix in zip(spans, prefixes, strict=True):
        row = (rows[prefix] if prefix >= 0 else []) + span
        rows.append(row)
        apart = {"segments": Segments([len(row)]), "sliding_window": window}
        joined, _ = segment_sdpa(
            torch.nn.Identity(), *(t[:, :, row] for t in (query, key, value)), None, **apart
        )
        torch.testing.assert_close(packed[:, span], joined[:, -len(span) :], rtol=1e-12, atol=1e-12)
    assert Segments(lengths, prefixes).bounds(query.device).places.tolist() == [
        place for row in rows for place in row
    ]


@settings(max_examples=15)
@given(batches(), st.sampled_from([20, 1000]), st.sampled_from([True, "auto"]))
def test_without_float32_inside_loss_and_gradients_are_exact(batch, max_tokens, shared):
    """Two layers whose norms and positions are float64, too: nothing rounds but products."""
    for one, other in zip(
        plain_update(batch, max_tokens, False), plain_update(batch, max_tokens, shared), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def plain_update(batch, max_tokens, shared):
    """Return the clipped loss of a policy of two layers, one entry per action token, and all gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(VOCABULARY, 16), (99, 16), *([(16, 48), (16, 16)] * 2), (16, VOCABULARY)]
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    tokens, places, *layers, head = weights
    loss = torch.zeros((), dtype=torch.float64)
    [microbatches] = pack(
        batch, max_tokens=max_tokens, world_size=1, shared_prefix=shared, parity_tokens=100.0
    )
    for m in microbatches:
        segments = Segments(m.segment_lengths.tolist(), m.prefix_segments.tolist())
        hidden = tokens[m.token_ids] + places[m.position_ids]
        for inner, outer in (layers[:2], layers[2:]):
            heads = (torch.nn.functional.layer_norm(hidden, (16,)) @ inner).unflatten(1, (3, 2, 8))
            attended, _ = segment_sdpa(
                torch.nn.Identity(), *heads.permute(1, 2, 0, 3)[:, None], None, segments=segments
            )
            hidden = hidden + attended[0].flatten(1) @ outer
        logprobs = torch.log_softmax(hidden @ head, -1)[m.predictor_positions, m.targets]
        behavior, advantages = torch.tensor(m.behavior_logprobs), torch.tensor(m.advantages)
        ratios = torch.exp((logprobs - behavior.double()) / 9)
        losses = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        loss = loss + losses[torch.tensor(m.loss_mask)].sum()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in weights)]


def test_the_config_refuses_what_cannot_share_a_prefix():
    with pytest.raises(ValueError, match=r"use model\.attention=segment_sdpa"):
        Config.model_validate({"learner": {"shared_prefix": True}, "model": {"attention": "flex_attention"}})
    with pytest.raises(ValueError, match="or sequence_parallel=1"):
        Config.model_validate({"learner": {"shared_prefix": True, "world_size": 2, "sequence_parallel": 2}})
    for value in (True, False, "auto"):
        assert Config.model_validate({"learner": {"shared_prefix": value}}).learner.shared_prefix == value
    Config.model_validate({"learner": {"world_size": 2, "sequence_parallel": 2}})  # auto falls back


class SimpleLearner:
    """What `Learner.shared_prefix` reads."""

    def __init__(self, one, spec, policy=None):
        self._spec, self._policy = spec, policy or one._policy
        self._reference = self._teacher = None


def test_auto_falls_back_where_rows_cannot_share(either):
    assert either.shared_prefix() == "auto"
    for change in ({"balance_coefficient": 0.1}, {"shared_prefix": False}):
        spec = dataclasses.replace(either._spec, learner=LearnerConfig(**change))
        assert Learner.shared_prefix(SimpleLearner(either, spec)) is False
    flex = dataclasses.replace(either._policy, attention="flex_attention")
    assert Learner.shared_prefix(SimpleLearner(either, either._spec, policy=flex)) is False
