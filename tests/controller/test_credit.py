"""From trajectories to advantages on tokens: context tokens change nothing, whatever the estimator, the rows
or the place of rewards.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algorithms.advantages import checked
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.estimators import estimator_named
from agentrl.config.schema import Config
from agentrl.controller.credit import (
    NOTHING,
    credit,
    group_attempts,
    leave_out_masked,
    leave_out_old,
    split_minibatches,
    whitened,
    with_reward,
)
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.trajectories import decode, encode
from agentrl.errors import ConfigError
from agentrl.learner.action_batches import action_batch, advantage_options, sampling_order
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack
from agentrl.learner.token_credit import LoadedColumns, assessed
from agentrl.types import Group, Outcome, RewardEvent, Trajectory
from parts.built_in import ESTIMATORS
from parts.columns import assessment_of
from parts.trajectories import facts, make_trajectory


def credited(groups, algorithm, *, group_size, assessment=NOTHING):
    """Return the samples of trajectories in memory, as a rank loads them."""
    found = credit(facts(*groups), algorithm, group_size=group_size, assessment=assessment)
    return [[ref.load() for ref in members] for members in whitened(found)]


def batch_of(trajectories, *, group_size):
    return action_batch([AttemptFacts.of(t) for t in trajectories], group_size=group_size)


def lay_on_tokens(trajectories, values_A):
    """Return f32[T] of each trajectory: `values_A`, in sampling order, on its action tokens."""
    laid, start = [np.zeros(t.num_tokens, np.float32) for t in trajectories], 0
    for own, t in zip(laid, trajectories, strict=True):
        positions = np.flatnonzero(t.action_mask)[sampling_order(AttemptFacts.of(t))]
        own[positions] = values_A[start : start + len(positions)]
        start += len(positions)
    return laid


OPTIONS = advantage_options(AlgorithmConfig(gamma=0.9, lam=0.8, passk_k=2, solved_reward=0.5))
seeds = st.integers(0, 2**31)


@dataclass
class Piece:
    """Tokens of one turn, with the reward it ends with; of context when `turn` is None."""

    turn: int | None
    length: int
    reward: float = 0.0


def context(length: int) -> Piece:
    return Piece(None, length)


def trajectory(rows: list[list[Piece]], *, group: int = 0, member: int = 0, **fields) -> Trajectory:
    """Return an attempt of these rows; the state of a turn is its number, unless `anchors` says otherwise."""
    pieces = [piece for row in rows for piece in row]
    turns = np.concatenate([np.full(p.length, -1 if p.turn is None else p.turn, np.int16) for p in pieces])
    starts = np.cumsum([0, *(sum(p.length for p in row) for row in rows)])[:-1]
    ends = np.cumsum([p.length for p in pieces]) - 1
    rewards = tuple(
        RewardEvent("r", p.reward, int(end)) for p, end in zip(pieces, ends, strict=True) if p.reward
    )
    own = {
        "token_ids": np.arange(len(turns)),
        "behavior_logprobs": np.where(turns >= 0, -0.5, 0.0),
        "rewards": rewards,
        "segment_starts": tuple(int(s) for s in starts),
        "anchors": np.arange(turns.max(initial=-1) + 1, dtype=np.int64),
    }
    return make_trajectory(turns, group_id=group, member=member, **{**own, **fields})


def greedy(reward: float, *, group: int = 0) -> Trajectory:
    return trajectory([[context(1), Piece(0, 1, reward)]], group=group, member=99, is_greedy=True)


def played(rng: np.random.Generator) -> list[Piece]:
    """Return the turns of an attempt, without context."""
    return [
        Piece(turn, int(rng.integers(1, 4)), float(rng.choice([0.0, 0.25, 1.0])))
        for turn in range(rng.integers(1, 4))
    ]


def with_context(turns: list[Piece], rng: np.random.Generator) -> list[Piece]:
    """Return a prompt and the turns, with context inside of turns and behind them, also at the end."""
    row = [context(int(rng.integers(1, 5)))]
    for piece in turns:
        cut = int(rng.integers(0, piece.length))
        row += [Piece(piece.turn, cut), context(int(rng.integers(0, 3)))] if cut else []
        row += [Piece(piece.turn, piece.length - cut, piece.reward), context(int(rng.integers(0, 4)))]
    return row


@settings(max_examples=20)
@given(seed=seeds)
def test_the_credit_of_segments(seed):
    """all: the advantage of the attempt on every sampled token. last: on the last segment, 0 before it. An
    attempt of one segment is credited the same, bit for bit.
    """
    rng = np.random.default_rng(seed)
    long = trajectory([with_context([piece], rng) for piece in played(rng)], member=0)
    short = trajectory([with_context(played(rng), rng)], member=1)

    def advantages(rule: str) -> list[np.ndarray]:
        algorithm = AlgorithmConfig(segment_credit=rule)
        [samples] = credit(facts(Group(0, (long, short))), algorithm, group_size=2)
        return [sample.load().advantages for sample in samples]

    (all_long, all_short), (last_long, last_short) = advantages("all"), advantages("last")
    assert all_short.tobytes() == last_short.tobytes()
    assert len(set(all_long[long.action_mask].tolist())) == 1
    start = long.segment_starts[-1]
    assert not last_long[:start].any()
    assert last_long[start:].tobytes() == all_long[start:].tobytes()


def advantages_on_tokens(name: str, trajectories: list[Trajectory], seed: int) -> list[np.ndarray]:
    """Return f32[T] of each, with what estimators may need beyond rewards drawn alike for equal compact
    batches.
    """
    batch = batch_of(trajectories, group_size=2)
    generator = torch.Generator().manual_seed(seed)
    full = replace(
        batch,
        values_A=torch.randn(len(batch.rewards_A), generator=generator).double(),
        greedy_rewards_N=torch.rand(len(trajectories), generator=generator).double(),
        anchors_K=torch.randint(2, (len(batch.turns.lengths_K),), generator=generator),
    )
    found = checked(ESTIMATORS[name](full, OPTIONS), full)
    return lay_on_tokens(trajectories, found.advantages_A.numpy())


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=10)
@given(seed=seeds)
def test_context_anywhere_changes_no_advantage_and_loses_no_reward(name, seed):
    rng = np.random.default_rng(seed)
    attempts = [played(rng) for _ in range(6)]
    places = [{"group": number // 2, "member": number % 2} for number in range(6)]
    short = [
        trajectory([[context(1), *turns]], **place) for turns, place in zip(attempts, places, strict=True)
    ]
    long = [
        trajectory([with_context(turns, rng)], **place) for turns, place in zip(attempts, places, strict=True)
    ]
    assert [t.reward for t in long] == [t.reward for t in short]
    torch.testing.assert_close(
        batch_of(long, group_size=2).outcomes_N.numpy(), np.array([t.reward for t in short])
    )
    laid = zip(
        long,
        advantages_on_tokens(name, long, seed),
        short,
        advantages_on_tokens(name, short, seed),
        strict=True,
    )
    for in_long, got, in_short, expected in laid:
        np.testing.assert_array_equal(got[in_long.action_mask], expected[in_short.action_mask])
        assert not got[~in_long.action_mask].any()


def assessment_for(name, trajectories):
    """What `name` needs beside rewards: a critic's values."""
    values = [np.zeros(t.num_action_tokens, np.float32) for t in trajectories]
    known = facts(Group(0, tuple(trajectories)))
    return assessment_of(known, values=values) if "critic" in estimator_named(name).reads else NOTHING


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rejecting_the_last_token_keeps_the_reward(name):
    pair = [
        trajectory([[context(2), Piece(0, 3, reward), context(1)]], member=member)
        for member, reward in enumerate((1.0, 0.0))
    ]
    algorithm, group = AlgorithmConfig(advantage=name, passk_k=2), Group(0, tuple(pair), greedy(0.5))
    [samples] = credited([group], algorithm, group_size=2, assessment=assessment_for(name, pair))
    rejected = [replace(s, loss_mask=s.action_mask & (np.arange(s.num_tokens) != 4)) for s in samples]
    [[whole]], [[partial]] = (pack(s, max_tokens=100, world_size=1) for s in (samples, rejected))
    assert partial.num_loss_tokens == whole.num_loss_tokens - 2
    np.testing.assert_array_equal(partial.advantages, whole.advantages)


def test_rows_that_grow_in_turn_are_credited_in_the_order_of_sampling():
    first = [context(1), Piece(0, 2), context(1), Piece(2, 1, 4.0)]
    second = [context(2), Piece(1, 1), context(1), Piece(3, 2, 8.0)]
    one = trajectory([first, second])
    batch = batch_of([one], group_size=None)
    assert batch.turn_A.tolist() == [0, 0, 1, 2, 3, 3]
    assert batch.rewards_A.tolist() == [0.0, 0.0, 0.0, 4.0, 0.0, 8.0]
    [laid] = lay_on_tokens([one], np.arange(1.0, 7.0))
    assert laid.tolist() == [0, 1, 2, 0, 4, 0, 0, 3, 0, 5, 6]


def test_credit_lays_advantages_of_tokens_on_samples():
    pair = [
        trajectory([[context(1), Piece(0, 1, 1.0), context(2), Piece(1, 1)]], member=m, group=3)
        for m in (0, 1)
    ]
    [samples] = credited(
        [Group(3, tuple(pair))], AlgorithmConfig(advantage="reinforce_plus_plus"), group_size=2
    )
    first, second = samples[0].advantages[samples[0].action_mask]
    assert first == -second > 0
    assert all(isinstance(s, Sample) for s in samples)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", 0.5),
        ("singleton", "raw"),
        ("whiten", True),
        ("passk_k", 1),
        ("solved_reward", 0.1),
        ("advantage", "rloo"),
    ],
)
def test_every_option_matters(key, value):
    name = "pass_at_k" if key in ("passk_k", "solved_reward") else "turn_group"
    outcomes = [(0, 0.2, 1.0), (0, 0.0, 0.5), (0, 0.0, 0.0), (1, 0.1, 0.3)]
    attempts = [
        trajectory([[context(1), Piece(0, member + 1, a), Piece(1, 1, b)]], group=g, member=member)
        for member, (g, a, b) in enumerate(outcomes)
    ]
    groups = [Group(0, tuple(attempts[:3])), Group(1, tuple(attempts[3:]))]
    base = AlgorithmConfig(advantage=name, passk_k=2)

    def values(algorithm):
        return np.concatenate(
            [s.advantages for samples in credited(groups, algorithm, group_size=None) for s in samples]
        )

    assert not np.allclose(values(base), values(base.model_copy(update={key: value})))


def test_remax_compares_each_attempt_with_the_greedy_one_of_its_group():
    outcomes = {3: [1.0, 0.0], 5: [0.25], 8: [1.0, 1.0]}
    baselines = {3: 0.5, 5: 1.0, 8: 1.0}
    played = [
        trajectory([[context(1), Piece(0, 2, reward)]], group=group, member=member)
        for group, rewards in outcomes.items()
        for member, reward in enumerate(rewards)
    ]
    stored = decode(
        encode([*(greedy(reward, group=group) for group, reward in baselines.items()), *reversed(played)])
    )
    groups = sorted(group_attempts(stored), key=lambda group: group.group_id)
    assert [[t.member for t in group.trajectories] for group in groups] == [[0, 1], [0], [0, 1]]
    samples = credited(groups, AlgorithmConfig(advantage="remax"), group_size=None)
    assert [[s.advantages[1:].tolist() for s in members] for members in samples] == [
        [[0.5] * 2, [-0.5] * 2],
        [[-0.75] * 2],
        [[0.0] * 2] * 2,
    ]


def test_a_greedy_attempt_is_no_member_of_its_group():
    pair = [trajectory([[context(1), Piece(0, 1, reward)]], member=m) for m, reward in enumerate((1.0, 0.0))]
    for name in (name for name in ESTIMATORS if estimator_named(name).compares == "group"):
        algorithm = AlgorithmConfig(advantage=name, passk_k=1)
        [alone], [beside] = (
            credited([group], algorithm, group_size=2)
            for group in (Group(0, tuple(pair)), Group(0, tuple(pair), greedy(9.0)))
        )
        np.testing.assert_array_equal([s.advantages for s in beside], [s.advantages for s in alone])


GLOBAL = {"gpg", "reinforce_plus_plus_baseline"}
"""Estimators that weigh a group by what the others of its batch did."""


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - GLOBAL - {"reinforce_plus_plus"}))
@settings(max_examples=15)
@given(seed=seeds)
def test_a_group_that_shrank_is_a_group_of_those_that_are_left(name, seed):
    """Whatever failed beside them, and whatever the sizes of other groups of the batch."""
    rng, algorithm = np.random.default_rng(seed), AlgorithmConfig(advantage=name, passk_k=2)
    shrunk, whole = [], []
    for group in range(3):
        rewards = rng.choice([0.0, 0.5, 1.0], 5)
        members = [
            trajectory([[context(1), *played(rng), Piece(9, 1, r)]], group=group, member=m)
            for m, r in enumerate(rewards)
        ]
        fails = np.isin(np.arange(5), rng.choice(5, int(rng.integers(0, 4)), replace=False))
        failed = [
            t.replace(outcome=Outcome.TIMEOUT, rewards=()) if f else t
            for t, f in zip(members, fails, strict=True)
        ]
        shrunk.append(Group(group, tuple(failed), greedy(0.5, group=group)))
        whole.append(
            Group(
                group,
                tuple(t for t, f in zip(members, fails, strict=True) if not f),
                greedy(0.5, group=group),
            )
        )

    def advantages(groups, size):
        left = [t for group in groups for t in group.trajectories]
        found = credited(groups, algorithm, group_size=size, assessment=assessment_for(name, left))
        return [sample.advantages for samples in found for sample in samples]

    alone = [found for group in whole for found in advantages([group], len(group.trajectories))]
    for got, expected in zip(advantages(with_reward(shrunk), None), alone, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_a_masked_attempt_is_in_the_baseline_and_not_among_the_samples():
    def group(masked: float) -> Group:
        rewards = (1.0, 0.0, masked)
        members = [
            trajectory([[context(1), Piece(0, 2, reward)]], member=m) for m, reward in enumerate(rewards)
        ]
        return Group(0, (*members[:2], members[2].replace(outcome=Outcome.TRUNCATED)))

    def advantages(one: Group) -> list[float]:
        found = credit(facts(one), AlgorithmConfig(advantage="rloo"), group_size=3)
        [samples] = leave_out_masked(found, {Outcome.TRUNCATED})
        return [float(sample.load().advantages[-1]) for sample in samples]

    assert advantages(group(0.0)) == [1.0, -0.5]
    assert advantages(group(1.0)) == [0.5, -1.0]


@pytest.mark.parametrize(
    ("max_lag", "kept"),
    [
        (None, [1, 1, 1, 1]),
        (4, [1, 1, 1, 1]),
        (3, [0, 1, 1, 1]),
        (2, [0, 1, 1, 1]),
        (1, [0, 0, 1, 1]),
        (0, [0, 0, 0, 0]),
    ],
)
def test_tokens_that_lag_by_more_than_the_bound_leave_the_loss_and_keep_their_advantage(max_lag, kept):
    """Tokens of versions 1, 3, 4 and 4 at version 5."""
    played = [context(1), *(Piece(turn, 1, 1.0) for turn in range(4))]
    old = trajectory([played], versions=np.array([-1, 1, 3, 4, 4]))
    new = trajectory([played], member=1, versions=np.array([-1, 5, 5, 5, 5]))
    found = credit(
        facts(Group(0, (old, new))), AlgorithmConfig(advantage="reinforce_plus_plus"), group_size=2
    )
    [left] = leave_out_old(found, lags=lambda versions: 5 - versions, max_lag=max_lag)
    assert [ref.shape.num_loss_tokens for ref in left] == [sum(kept), 4]
    masked, other = (ref.load() for ref in left)
    assert masked.loss_mask.tolist() == [False, *map(bool, kept)]
    assert other.loss_mask.tolist() == [False, True, True, True, True]
    np.testing.assert_array_equal(masked.advantages, found[0][0].load().advantages)


def test_a_kl_without_a_price_changes_no_reward():
    one = trajectory([[context(1), Piece(0, 2, 1.0)]])
    batch = batch_of([one], group_size=1)
    loaded = [LoadedColumns(None, 0.0, np.array([3.0, 5.0]), None)]
    assert assessed(batch, loaded, kl_coefficient=0.0).rewards_A.tolist() == [0.0, 1.0]
    assert assessed(batch, loaded, kl_coefficient=0.5).rewards_A.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
    ("anchors", "found"),
    [([7, 5, 6], [7, 5, 6]), ([7, 5, 6, 8], [7, 5, 6]), ([7, 5], None), ([7], None), ([], None)],
)
def test_states_are_compared_only_where_every_turn_has_one(anchors, found):
    one = trajectory(
        [[context(1), *(Piece(turn, 2) for turn in range(3))]], anchors=np.array(anchors, np.int64)
    )
    anchors_K = batch_of([one], group_size=1).anchors_K
    assert (None if anchors_K is None else anchors_K.tolist()) == found


def test_gigpo_compares_turns_by_their_anchors_in_the_order_of_sampling():
    """Two rows that grow in turn; a turn without tokens has an anchor too."""
    rows = [[context(1), Piece(0, 1), context(1), Piece(3, 1, 1.0)], [context(2), Piece(1, 2)]]
    first = trajectory(rows, anchors=np.array([7, 5, -1, 6]))
    second = trajectory([[context(1), Piece(0, 1), Piece(1, 1)]], member=1, anchors=np.array([7, 6]))
    batch = batch_of([first, second], group_size=2)
    assert batch.anchors_K is not None
    assert batch.anchors_K.tolist() == [7, 5, 6, 7, 6]
    [[one, other]] = credited([Group(0, (first, second))], AlgorithmConfig(advantage="gigpo"), group_size=2)
    half = 0.5 / (
        0.5**0.5 + 1e-6
    )  # a pair that earned 1 and 0: over the attempts, over state 7 and over state 6 alike; 5 was met once
    np.testing.assert_allclose(one.advantages[one.action_mask], [2 * half, 2 * half, half, half], rtol=1e-6)
    np.testing.assert_allclose(other.advantages[other.action_mask], [-2 * half, -2 * half], rtol=1e-6)


# --------------------------------------------------------------------------------------------------- refusals


def test_an_incomplete_group_ends_with_one_line():
    group = Group(4, (trajectory([[context(1), Piece(0, 1, 1.0)]], group=4),))
    with pytest.raises(ConfigError, match=r"algorithm.advantage=grpo: group 4 has 1 of 2 trajectories"):
        credited([group], AlgorithmConfig(), group_size=2)


def test_rewards_that_an_estimator_is_not_made_for_end_with_one_line():
    pair = [trajectory([[context(1), Piece(0, 1, reward)]], member=m) for m, reward in enumerate((1.0, -1.0))]
    with pytest.raises(ConfigError, match=r"algorithm.advantage=max_rl: max_rl divides"):
        credited([Group(0, tuple(pair))], AlgorithmConfig(advantage="max_rl"), group_size=2)


def test_a_critic_whose_estimator_has_no_targets_for_it_ends_with_one_line():
    pair = [trajectory([[context(1), Piece(0, 1, reward)]], member=m) for m, reward in enumerate((1.0, 0.0))]
    values = assessment_of(facts(Group(0, tuple(pair))), values=[np.zeros(1, np.float32)] * 2)
    with pytest.raises(ConfigError, match=r"advantage=grpo returns no value targets .* critic.enabled=false"):
        credited([Group(0, tuple(pair))], AlgorithmConfig(), group_size=2, assessment=values)


def test_the_config_serves_every_estimator():
    pair = [trajectory([[context(1), Piece(0, 1, reward)]], member=m) for m, reward in enumerate((1.0, 0.0))]
    for name in ESTIMATORS:
        algorithm, group = AlgorithmConfig(advantage=name, passk_k=1), Group(0, tuple(pair), greedy(0.5))
        [[best, worst]] = credited([group], algorithm, group_size=2, assessment=assessment_for(name, pair))
        assert best.advantages[1] > worst.advantages[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", "unknown estimator 'grop'; use one of dr_grpo, .*, or your own as file.py:NAME"),
    ],
)
def test_what_a_run_cannot_serve_is_refused(name, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(advantage=name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("remax", "remax needs greedy_rewards_N, the reward of a greedy attempt"),
        ("gigpo", "gigpo needs anchors_K"),
    ],
)
def test_trajectories_without_what_an_estimator_reads_end_with_one_line(name, message):
    pair = [
        trajectory([[context(1), Piece(0, 1, float(m))]], member=m, anchors=np.empty(0, np.int64))
        for m in (0, 1)
    ]
    with pytest.raises(ConfigError, match=rf"algorithm.advantage={name}: {message}"):
        credited([Group(0, tuple(pair))], AlgorithmConfig(advantage=name), group_size=2)


def test_which_groups_have_a_greedy_attempt():
    def attempts(**groups) -> int:
        return Config(rollout={"group_size": 3, **groups.pop("rollout", {})}, **groups).attempts_per_group

    assert attempts() == 3
    assert attempts(algorithm={"advantage": "remax"}) == 4
    assert attempts(rollout={"greedy_baseline": "always"}) == 4
    one = {"rollout": {"group_size": 1}, "buffer": {"drop_constant_groups": True}}
    assert (
        attempts(**one, algorithm={"advantage": "remax"}) == 2
    )  # it differs from its greedy attempt, or teaches nothing
    with pytest.raises(ValidationError, match="one attempt has no variance"):
        attempts(**one)


def test_pass_at_k_needs_groups_of_k():
    with pytest.raises(ValidationError, match=r"algorithm.passk_k=9 exceeds rollout.group_size=8"):
        Config(algorithm={"advantage": "pass_at_k", "passk_k": 9})
    assert Config(algorithm={"advantage": "grpo", "passk_k": 9}).algorithm.passk_k == 9


def test_pass_at_k_is_refused_where_groups_may_shrink_below_k():
    shrinks = {"on_outcome": {"timeout": "shrink"}}
    with pytest.raises(
        ValidationError,
        match=r"passk_k=4 exceeds rollout.min_group_size=2.*rollout.on_outcome.timeout=shrink",
    ):
        Config(algorithm={"advantage": "pass_at_k"}, rollout=shrinks)
    assert (
        Config(
            algorithm={"advantage": "pass_at_k"}, rollout={**shrinks, "min_group_size": 4}
        ).rollout.fixed_group_size
        is None
    )


# ------------------------------------------------------------------------------------------------ minibatches


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=12), num_minibatches=st.integers(1, 12), seed=seeds
)
def test_minibatches_hold_each_group_once_and_whole_and_as_many_as_the_others(sizes, num_minibatches, seed):
    """A group may have no sample left, and stays one of the groups that are dealt."""
    per_group = [[(group, member) for member in range(size)] for group, size in enumerate(sizes)]

    def split():
        return split_minibatches(
            per_group, num_minibatches=min(num_minibatches, len(sizes)), rng=np.random.default_rng(seed)
        )

    parts = split()
    assert sorted(sample for part in parts for sample in part) == [
        sample for group in per_group for sample in group
    ]
    groups_in = [{group for group, _ in part} for part in parts]
    assert sum(map(len, groups_in)) == sum(size > 0 for size in sizes), "no group is in two minibatches"
    if all(sizes):
        assert max(map(len, groups_in)) - min(map(len, groups_in)) <= 1
    assert split() == parts
