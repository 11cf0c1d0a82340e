"""Credit per conversation: what a conversation gets is what it would get as an attempt of its own."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.controller.credit import NOTHING, credit, whitened
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.types import ConversationRecord, Group, RewardEvent
from parts.columns import assessment_of
from parts.trajectories import facts, make_trajectory

ROLES = ("main", "planner", "worker")


def spoken(rng, group: int, member: int):
    """Return an attempt whose conversations speak in turn, in one or two segments each, and their names."""
    names = ["main", *rng.choice(ROLES[1:], rng.integers(1, 4))]
    ids: list[int] = []
    starts: list[int] = []
    order = rng.permutation(np.repeat(np.arange(len(names)), rng.integers(0, 3, len(names))))
    owners = order.tolist() or [1]
    numbers = rng.permutation(len(owners))  # turns are sampled in another order than segments began
    for place in range(len(owners)):
        starts.append(len(ids))
        ids += [-1] * int(rng.integers(1, 3)) + [int(numbers[place])] * int(rng.integers(1, 4))
    turns = np.array(ids)
    actions = np.flatnonzero(turns >= 0)
    rewards = tuple(
        RewardEvent("r", float(rng.normal()), int(position))
        for position in rng.choice(actions, rng.integers(0, 4))
    )
    trajectory = make_trajectory(
        ids,
        group_id=group,
        member=member,
        rewards=rewards,
        segment_starts=tuple(starts),
        conversations=tuple(ConversationRecord(name, ()) for name in names),
        segment_conversations=tuple(owners),
        anchors=rng.integers(0, 2, len(owners)),
    )
    return trajectory, names


def alone(trajectory, conversation: int, *, group: int):
    """Return one conversation as the attempt that the session would have recorded of it alone, its turns
    counted from 0; None if it never spoke. The places of its tokens are the second value.
    """
    ends = (*trajectory.segment_starts[1:], trajectory.num_tokens)
    places = np.concatenate(
        [np.empty(0, int)]
        + [
            np.arange(start, end)
            for start, end, owner in zip(
                trajectory.segment_starts, ends, trajectory.segment_conversations, strict=True
            )
            if owner == conversation
        ]
    )
    if not len(places):
        return None
    starts = np.flatnonzero(np.isin(places, trajectory.segment_starts))
    own = {int(place): index for index, place in enumerate(places)}
    turns = trajectory.turn_ids[places]
    numbers, own_turns = np.unique(turns, return_inverse=True)  # the first number is that of context
    return (
        make_trajectory(
            own_turns - 1,
            group_id=group,
            rewards=tuple(
                replace(e, position=own[e.position]) for e in trajectory.rewards if e.position in own
            ),
            segment_starts=tuple(starts.tolist()),
            anchors=trajectory.anchors[numbers[1:]],
        ),
        places,
    )


def advantages(groups, algorithm, assessment=NOTHING):
    found = credit(facts(*groups), algorithm, group_size=None, assessment=assessment)
    return [[ref.load() for ref in members] for members in whitened(found)]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    estimator=st.sampled_from(["grpo", "rloo", "turn_group", "gigpo", "gae", "reinforce_plus_plus"]),
    segment_credit=st.sampled_from(["all", "last"]),
)
def test_own_credit_is_that_of_attempts_of_their_own(seed, estimator, segment_credit):
    rng = np.random.default_rng(seed)
    played = [[spoken(rng, group, member) for member in range(3)] for group in range(2)]
    groups = [Group(index, tuple(t for t, _ in members)) for index, members in enumerate(played)]
    algorithm = AlgorithmConfig(
        advantage=estimator, conversation_credit="own", gamma=0.9, lam=0.8, segment_credit=segment_credit
    )
    has_values = estimator == "gae"
    values = [rng.normal(size=t.num_action_tokens).astype(np.float32) for g in groups for t in g.trajectories]
    kl = [np.abs(v) for v in values]
    assessment = assessment_of(
        facts(*groups), values=values if has_values else None, kl=kl, kl_coefficient=0.1
    )
    found = advantages(groups, algorithm, assessment)

    singles, where, own_values, own_kl = {}, [], [], []
    for group, members in enumerate(played):
        for member, (trajectory, names) in enumerate(members):
            number = 3 * group + member
            actions = np.flatnonzero(trajectory.action_mask)
            for conversation, name in enumerate(names):
                # A group per group and name, in whatever order.
                label = 10 * group + ROLES.index(name)
                if (one := alone(trajectory, conversation, group=label)) is not None:
                    single, places = one
                    singles.setdefault(label, []).append(
                        (single, group, member, places, number, np.isin(actions, places))
                    )
    single_groups = []
    for label, members in singles.items():
        single_groups.append(Group(label, tuple(single for single, *_ in members)))
        for _, group, member, places, number, is_own in members:
            where.append((group, member, places))
            own_values.append(values[number][is_own])
            own_kl.append(kl[number][is_own])
    expected = advantages(
        single_groups,
        algorithm.model_copy(update={"conversation_credit": "attempt"}),
        assessment_of(
            facts(*single_groups), values=own_values if has_values else None, kl=own_kl, kl_coefficient=0.1
        ),
    )
    for (group, member, places), sample in zip(where, [s for g in expected for s in g], strict=True):
        np.testing.assert_array_equal(found[group][member].advantages[places], sample.advantages)
        if has_values:
            np.testing.assert_array_equal(found[group][member].returns[places], sample.returns)
            np.testing.assert_array_equal(found[group][member].values[places], sample.values)


def test_the_kth_turns_of_a_conversation_are_compared_however_often_others_spoke_before():
    def shared(member: int, planned: int, reward: float):
        """Return an attempt in which a planner speaks `planned` times, and a worker once."""
        ids = [token for turn in range(planned + 1) for token in (-1, turn)]
        return make_trajectory(
            ids,
            member=member,
            segment_starts=(0, 2 * planned),
            conversations=tuple(ConversationRecord(name, ()) for name in ("planner", "worker")),
            segment_conversations=(0, 1),
            rewards=(RewardEvent("r", reward, len(ids) - 1),),
        )

    group = Group(0, (shared(0, 1, 1.0), shared(1, 2, 0.0)))
    (found,) = advantages([group], AlgorithmConfig(advantage="turn_group", conversation_credit="own"))
    workers = [sample.advantages[-1] for sample in found]
    np.testing.assert_allclose(workers, [2**-0.5, -(2**-0.5)], atol=1e-5)
    assert not any(sample.advantages[:-1].any() for sample in found)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), estimator=st.sampled_from(["grpo", "turn_group", "gpg"]))
def test_attempts_with_one_conversation_get_the_same_either_way(seed, estimator):
    rng = np.random.default_rng(seed)
    groups = [
        Group(
            group,
            tuple(
                spoken(rng, group, member)[0].replace(conversations=(), segment_conversations=())
                for member in range(3)
            ),
        )
        for group in range(2)
    ]
    one, other = (
        advantages(groups, AlgorithmConfig(advantage=estimator, conversation_credit=credit))
        for credit in ("attempt", "own")
    )
    for left, right in zip([s for g in one for s in g], [s for g in other for s in g], strict=True):
        np.testing.assert_array_equal(left.advantages, right.advantages)


def test_by_default_every_conversation_gets_the_credit_of_the_attempt():
    rng = np.random.default_rng(0)
    group = Group(0, tuple(spoken(rng, 0, member)[0] for member in range(4)))
    (found,) = advantages([group], AlgorithmConfig())
    plain = Group(0, tuple(t.replace(conversations=(), segment_conversations=()) for t in group.trajectories))
    (expected,) = advantages([plain], AlgorithmConfig())
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left.advantages, right.advantages)


def test_zero_sum_rewards_cancel_for_the_attempt_and_not_for_its_conversations():
    def game(member: int, first: float):
        return make_trajectory(
            [-1, 0, -1, 1],
            member=member,
            segment_starts=(0, 2),
            conversations=tuple(ConversationRecord(name, ()) for name in ("main", "first", "second")),
            segment_conversations=(1, 2),
            rewards=(RewardEvent("win", first, 1), RewardEvent("win", -first, 3)),
        )

    group = Group(0, (game(0, 1.0), game(1, -1.0)))
    (together,) = advantages([group], AlgorithmConfig())
    (apart,) = advantages([group], AlgorithmConfig(advantage="dr_grpo", conversation_credit="own"))
    assert not any(sample.advantages.any() for sample in together)
    assert [sample.advantages.tolist() for sample in apart] == [[0, 1, 0, -1], [0, -1, 0, 1]]
    own = [AttemptFacts.of(t).compared_rewards("own") for t in group.trajectories]
    assert own == [[("first", 1.0), ("second", -1.0)], [("first", -1.0), ("second", 1.0)]]
    assert AttemptFacts.of(group.trajectories[0]).compared_rewards("attempt") == [("main", 0.0)]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"advantage": "remax"}, "advantage=remax"),
        ({"advantage": "pass_at_k"}, "advantage=pass_at_k"),
        ({"advantage": "gae", "bootstrap_truncated": True}, "bootstrap_truncated=false"),
    ],
)
def test_what_needs_whole_attempts_is_refused(options, wrong):
    with pytest.raises(ValidationError, match=wrong):
        AlgorithmConfig(conversation_credit="own", **options)
    assert AlgorithmConfig(**options)
