"""By reference or by value: a rank that loads its microbatches has what the controller would have packed."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.controller.credit import credit, whitened
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.learner.action_batches import sampling_order
from agentrl.learner.batch import Microbatch
from agentrl.learner.packing import pack, plan_microbatches
from agentrl.learner.sample_refs import (
    PlannedMicrobatch,
    SampleRef,
    loaded,
    planned,
)
from agentrl.learner.token_credit import end_place
from agentrl.types import Group, RewardEvent
from parts.trajectories import make_trajectory, stored


def trajectory(rng, *, group=0, member=0):
    """Return an attempt of one to three segments, which may have grown alternately, with rewards."""
    turns, starts, order = [], [], rng.permutation(9)
    number = 0
    for _ in range(int(rng.integers(1, 4))):
        starts.append(len(turns))
        turns += [-1] * int(rng.integers(1, 4))
        for _ in range(int(rng.integers(0 if turns else 1, 3))):
            turns += [int(order[number])] * int(rng.integers(1, 4)) + [-1] * int(rng.integers(0, 2))
            number += 1
    actions = np.flatnonzero(np.array(turns) >= 0)
    rewards = tuple(
        RewardEvent("r", float(rng.choice([0.0, 0.5, 1.0])), int(rng.choice(actions)))
        for _ in range(int(rng.integers(0, 3)) if len(actions) else 0)
    )
    return make_trajectory(
        turns,
        group_id=group,
        member=member,
        token_ids=rng.integers(0, 5, len(turns)),
        behavior_logprobs=rng.normal(size=len(turns)),
        versions=np.where(np.array(turns) >= 0, rng.integers(0, 3, len(turns)), -1),
        segment_starts=tuple(starts),
        rewards=rewards,
    )


def batch_of(seed, *, is_stored):
    rng = np.random.default_rng(seed)
    played = [trajectory(rng, group=g, member=m) for g in range(2) for m in range(3)]
    facts = stored(*played) if is_stored else [AttemptFacts.of(t) for t in played]
    refs = [
        SampleRef(
            index,
            attempt,
            rng.normal(size=attempt.num_action_tokens),
            np.ones(attempt.num_action_tokens, np.int64),
            dropped_versions=(1,) if rng.random() < 0.5 else (),
        )
        for index, attempt in enumerate(facts)
    ]
    return played, refs


def assert_same(left: Microbatch, right: Microbatch) -> None:
    for field in dataclasses.fields(Microbatch):
        one, other = getattr(left, field.name), getattr(right, field.name)
        assert (one is None) == (other is None), field.name
        if one is not None:
            np.testing.assert_array_equal(one, other, err_msg=field.name)
            assert type(one) is type(other)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    max_tokens=st.integers(3, 40),
    world_size=st.integers(1, 3),
    is_shared=st.booleans(),
    is_stored=st.booleans(),
)
def test_what_a_rank_loads_is_what_is_packed_from_the_samples(
    seed, max_tokens, world_size, is_shared, is_stored
):
    _, refs = batch_of(seed, is_stored=is_stored)
    samples = [ref.load() for ref in refs]
    for ref, sample in zip(refs, samples, strict=True):
        assert ref.shape == sample.shape
    options = {"max_tokens": max_tokens, "world_size": world_size, "shared_prefix": is_shared}
    packed = pack(samples, **options)
    plans = plan_microbatches([ref.shape for ref in refs], **options)
    for own, plan in zip(packed, plans, strict=True):
        whole = planned(plan, refs)
        assert [m.num_tokens for m in whole] == [m.num_tokens for m in own]
        for left, right in zip(own, loaded(whole), strict=True):
            assert_same(left, right)
    assert loaded(packed[0]) == packed[0], "what is there already is not loaded"


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31))
def test_the_end_of_an_attempt_is_behind_the_segment_of_its_last_sampled_token(seed):
    played, refs = batch_of(seed, is_stored=False)
    for ref, one in zip(refs, played, strict=True):
        if not ref.attempt.turns:
            continue
        segment, place = end_place(ref.attempt)
        last = max(np.flatnonzero(one.action_mask), key=lambda p, one=one: (one.turn_ids[p], p))
        assert segment == np.searchsorted(one.segment_starts, last, side="right") - 1
        end = [*one.segment_starts, one.num_tokens][segment + 1]
        assert place == one.action_mask[:end].sum()
        sample = ref.replace(has_end=True).load()
        assert sample.action_mask[end]
        assert np.delete(sample.advantages, end).tobytes() == ref.load().advantages.tobytes()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    advantage=st.sampled_from(["grpo", "turn_group", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]),
    gamma=st.sampled_from([1.0, 0.9]),
    whiten=st.booleans(),
)
def test_credit_by_runs_is_credit_by_tokens(seed, advantage, gamma, whiten):
    """Against one number per token, each trajectory's tokens sorted by turn, as in a loop."""
    rng = np.random.default_rng(seed)
    played = [[trajectory(rng, group=g, member=m) for m in range(3)] for g in range(3)]
    groups = [Group(g, tuple(AttemptFacts.of(t) for t in own)) for g, own in enumerate(played)]
    algorithm = AlgorithmConfig(advantage=advantage, gamma=gamma, whiten=whiten)
    refs = [ref for own in whitened(credit(groups, algorithm, group_size=3)) for ref in own]
    flat = [t for own in played for t in own]
    found = [ref.load().advantages for ref in refs]
    expected = loop(flat, advantage, gamma, whiten=whiten)
    for one, got, own in zip(flat, found, expected, strict=True):
        np.testing.assert_allclose(got, own, rtol=2e-5, atol=2e-6)
        assert not got[~one.action_mask].any()


def loop(played, advantage, gamma, *, whiten):
    """Return f[T] per trajectory: the estimators as loops over single tokens."""
    orders = [
        sorted(np.flatnonzero(t.action_mask).tolist(), key=lambda p, t=t: (t.turn_ids[p], p)) for t in played
    ]
    paid = [
        [sum(e.value for e in t.rewards if e.position == p) for p in order]
        for t, order in zip(played, orders, strict=True)
    ]
    groups = {}
    for index, t in enumerate(played):
        groups.setdefault(t.group_id, []).append(index)
    values = [[0.0] * len(order) for order in orders]

    def normalised(numbers, *, is_scaled):
        numbers = np.array(numbers)
        if len(numbers) == 1 or np.ptp(numbers) <= 1e-12:
            return np.zeros(len(numbers))
        centred = numbers - numbers.mean()
        return centred / (numbers.std(ddof=1) + 1e-6) if is_scaled else centred

    def whitened(rows):
        numbers = np.array([x for row in rows for x in row])
        if not len(numbers) or numbers.min() == numbers.max():
            return [[0.0] * len(row) for row in rows]
        mean, std = numbers.mean(), np.sqrt(numbers.var(ddof=1) + 1e-8)
        return [[(x - mean) / std for x in row] for row in rows]

    if advantage == "reinforce_plus_plus":
        for index, rewards in enumerate(paid):
            total = 0.0
            for k in reversed(range(len(rewards))):
                total = rewards[k] + gamma * total
                values[index][k] = total
        values = whitened(values)
    elif advantage == "turn_group":
        returns = {}
        for index, (t, order) in enumerate(zip(played, orders, strict=True)):
            own = sorted({int(t.turn_ids[p]) for p in order})
            total = 0.0
            for turn in reversed(own):
                total = gamma * total + sum(
                    r for r, p in zip(paid[index], order, strict=True) if t.turn_ids[p] == turn
                )
                returns[index, turn] = total
        for members in groups.values():
            for turn in {turn for index, turn in returns if index in members}:
                there = [index for index in members if (index, turn) in returns]
                for index, value in zip(
                    there, normalised([returns[i, turn] for i in there], is_scaled=True), strict=True
                ):
                    for k, p in enumerate(orders[index]):
                        if played[index].turn_ids[p] == turn:
                            values[index][k] = value
    else:
        silent = set()
        for members in groups.values():
            outcomes = [sum(paid[index]) for index in members]
            silent |= set(members) if np.ptp(outcomes) <= 1e-12 else set()
            for index, value in zip(
                members, normalised(outcomes, is_scaled=advantage == "grpo"), strict=True
            ):
                values[index] = [value] * len(orders[index])
        if advantage == "reinforce_plus_plus_baseline":
            values = [
                [0.0] * len(row) if index in silent else row for index, row in enumerate(whitened(values))
            ]
    if whiten:
        values = whitened(values)
    laid = [np.zeros(t.num_tokens) for t in played]
    for own, order, row in zip(laid, orders, values, strict=True):
        own[order] = row
    return laid


def test_the_order_of_sampling_is_by_turn_and_then_by_position():
    one = make_trajectory([-1, 0, 0, -1, 3, -1, 1, 2, 2], segment_starts=(0, 5))
    assert sampling_order(AttemptFacts.of(one)).tolist() == [0, 1, 3, 4, 5, 2]


def test_a_filler_needs_nothing():
    [[only], [nothing]] = plan_microbatches(
        [SampleRef.plain(0, AttemptFacts.of(make_trajectory([-1, 0]))).shape], max_tokens=9, world_size=2
    )
    assert [p.sample for p in only.pieces] == [0]
    [microbatch] = loaded([PlannedMicrobatch(nothing, {})])
    assert microbatch.is_filler
