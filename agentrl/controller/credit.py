"""Credit assignment: turns a batch of groups into samples with advantages, and samples into minibatches.

Axes: A action tokens of the whole batch, N trajectories of the batch, T tokens of one trajectory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.advantages import checked, find_estimator
from agentrl.algorithms.advantages.reinforce import whiten
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit
from agentrl.algorithms.reward_kl import penalize
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.learner.batch import Sample, samples_from
from agentrl.types import SCORED_OUTCOMES, Group, Lags, Outcome, Trajectory, member_tuple


@dataclass(frozen=True, slots=True, eq=False)
class Assessment:
    """Model outputs that credit needs besides the rewards. A field is None if the algorithm does not use it.

    values: f32[T] per trajectory, the critic's estimate before each action token, 0 elsewhere.
    values_after: f64[N], the estimate after the last action token of truncated attempts, to bootstrap from.
    kl: f32[T] per trajectory, estimate of KL(policy || ref) on each action token, in nats.
    kl_coefficient: reward subtracted per nat of `kl`.
    """

    values: Sequence[NDArray[np.float32]] | None = None
    values_after: NDArray[np.float64] | None = None
    kl: Sequence[NDArray[np.float32]] | None = None
    kl_coefficient: float = 0.0


NOTHING = Assessment()


def credit(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    group_size: int | None,
    assessment: Assessment = NOTHING,
) -> list[list[Sample]]:
    """Return the samples of each group with their advantages; with a critic, also with values and returns.

    Args:
        group_size: trajectories in a complete group; None if group sizes may differ.

    Raises:
        PluginError: the estimator is a plugin that cannot be found.
        ConfigError: the estimator refuses the batch: an incomplete group, or rewards that it cannot handle.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    estimator = find_estimator(algorithm.advantage)
    try:
        batch = replace(
            action_batch(trajectories, group_size=group_size), greedy_rewards_N=greedy_rewards(groups)
        )
        batch = assessed(batch, trajectories, assessment)
        found = checked(estimator(batch, advantage_options(algorithm)), batch)
    except ValueError as error:
        raise ConfigError(f"algorithm.advantage={algorithm.advantage}: {error}") from error
    advantages_A = whiten(found.advantages_A) if algorithm.whiten else found.advantages_A
    plain = samples_from(trajectories, lay_on_tokens(trajectories, advantages_A.numpy()))
    samples = iter(
        plain
        if assessment.values is None
        else _with_returns(plain, trajectories, found, assessment.values, algorithm)
    )
    return [[next(samples) for _ in group.trajectories] for group in groups]


def action_batch(trajectories: Sequence[Trajectory], *, group_size: int | None) -> ActionBatch:
    """Return the batch without context tokens; segments of a trajectory are joined in sampling order.

    Raises:
        ValueError: a group is incomplete, or a reward is not finite.
    """
    orders = [sampling_order(t) for t in trajectories]
    rewards = [_rewards(t)[order] for t, order in zip(trajectories, orders, strict=True)]
    turns = [t.turn_ids[order].astype(np.int64) for t, order in zip(trajectories, orders, strict=True)]
    return ActionBatch(
        rewards_A=torch.from_numpy(np.concatenate([np.empty(0), *rewards])),
        turn_A=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *turns])),
        num_tokens_N=torch.tensor([len(order) for order in orders], dtype=torch.int64),
        group_N=torch.tensor([t.group_id for t in trajectories], dtype=torch.int64),
        is_truncated_N=torch.tensor([t.outcome is Outcome.TRUNCATED for t in trajectories], dtype=torch.bool),
        group_size=group_size,
        anchors_K=_anchors(trajectories),
    )


def assessed(batch: ActionBatch, trajectories: Sequence[Trajectory], assessment: Assessment) -> ActionBatch:
    """Return the batch with the values added and the KL penalty subtracted from the rewards."""

    def compact(columns: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        rows = [
            column[sampling_order(t)].astype(np.float64)
            for column, t in zip(columns, trajectories, strict=True)
        ]
        return torch.from_numpy(np.concatenate([np.empty(0), *rows]))

    if assessment.values is not None:
        after = assessment.values_after
        batch = replace(
            batch,
            values_A=compact(assessment.values),
            values_after_N=None if after is None else torch.from_numpy(after),
        )
    if assessment.kl is not None:
        batch = penalize(batch, compact(assessment.kl), coefficient=assessment.kl_coefficient)
    return batch


def _with_returns(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory],
    found: Credit,
    values: Sequence[NDArray[np.float32]],
    algorithm: AlgorithmConfig,
) -> list[Sample]:
    if found.returns_A is None:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} returns no value targets for the critic; use "
            "critic.enabled=false"
        )
    returns = lay_on_tokens(trajectories, found.returns_A.numpy())
    return [replace(s, values=v, returns=r) for s, v, r in zip(samples, values, returns, strict=True)]


def greedy_rewards(groups: Sequence[Group]) -> torch.Tensor | None:
    """Return each trajectory's greedy baseline, f64[N]: the reward of the greedy attempt of its group.

    None unless every group has a greedy attempt.
    """
    rewards = [group.greedy.reward for group in groups if group.greedy is not None]
    if not groups or len(rewards) < len(groups):
        return None
    return torch.from_numpy(np.repeat(np.array(rewards), [len(group.trajectories) for group in groups]))


def lay_on_tokens(
    trajectories: Sequence[Trajectory], values_A: NDArray[np.float64]
) -> list[NDArray[np.float32]]:
    """Scatter `values_A` to the tokens of each trajectory: f32[T], 0 on context tokens."""
    laid, start = [], 0
    for trajectory in trajectories:
        positions = sampling_order(trajectory)
        values_T = np.zeros(trajectory.num_tokens, np.float32)
        values_T[positions] = values_A[start : start + len(positions)]
        start += len(positions)
        laid.append(values_T)
    assert start == len(values_A), "the values do not belong to these trajectories"
    return laid


def sampling_order(trajectory: Trajectory) -> NDArray[np.int64]:
    """Return the positions of the action tokens in sampling order, i64.

    They are sorted by turn: segments may grow alternately, so positions are not ordered by time.
    """
    positions = np.flatnonzero(trajectory.action_mask)
    return positions[np.argsort(trajectory.turn_ids[positions], kind="stable")]


def advantage_options(algorithm: AlgorithmConfig) -> AdvantageOptions:
    """Return the options of the config that estimators read."""
    return AdvantageOptions(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        bootstrap_truncated=algorithm.bootstrap_truncated,
        singleton=algorithm.singleton,
        passk_k=algorithm.passk_k,
        solved_reward=algorithm.solved_reward,
        step_weight=algorithm.step_weight,
    )


def with_reward(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without failed attempts.

    A failure has no reward, so it is neither trained on nor compared.
    """
    return [
        replace(group, trajectories=tuple(t for t in group.trajectories if t.outcome in SCORED_OUTCOMES))
        for group in groups
    ]


def leave_out_masked(
    samples: Sequence[Sequence[Sample]], groups: Sequence[Group], masked: Collection[Outcome]
) -> list[list[Sample]]:
    """Return the samples of each group without those whose attempt ended in a masked outcome.

    Masked attempts still count in the group's baseline: call this after `credit`. They are removed, not
    zeroed in the loss, so that means over sequences do not count them.
    """
    return [
        [
            sample
            for sample, trajectory in zip(members, group.trajectories, strict=True)
            if trajectory.outcome not in masked
        ]
        for members, group in zip(samples, groups, strict=True)
    ]


def leave_out_old(
    samples: Sequence[Sequence[Sample]], groups: Sequence[Group], *, lags: Lags, max_lag: int | None
) -> list[list[Sample]]:
    """Remove tokens that lag by more than `max_lag` versions from the loss; None removes none.

    Their advantages stay: the reward of an old token is as valid as before.
    """
    if max_lag is None:
        return [list(members) for members in samples]
    return [
        [
            replace(sample, loss_mask=sample.loss_mask & (lags(trajectory.versions) <= max_lag))
            for sample, trajectory in zip(members, group.trajectories, strict=True)
        ]
        for members, group in zip(samples, groups, strict=True)
    ]


def split_minibatches(
    per_group: Sequence[Sequence[Sample]], *, num_minibatches: int, rng: np.random.Generator
) -> list[list[Sample]]:
    """Split a batch into minibatches of whole groups, in random order, as evenly as possible.

    Groups stay whole because their members are compared with each other: half a group could have only
    positive, or only negative, advantages. A minibatch whose members are all masked is empty.
    """
    order = rng.permutation(len(per_group))
    return [
        [sample for index in part for sample in per_group[index]]
        for part in np.array_split(order, num_minibatches)
    ]


def group_trajectories(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Group trajectories by task visit, in order of first appearance; greedy attempts are kept separately."""
    members: dict[int, list[Trajectory]] = {}
    greedy: dict[int, Trajectory] = {}
    for trajectory in trajectories:
        sampled = members.setdefault(trajectory.group_id, [])
        if trajectory.is_greedy:
            greedy[trajectory.group_id] = trajectory
        else:
            sampled.append(trajectory)
    return [
        Group(group_id, member_tuple(sampled), greedy.get(group_id)) for group_id, sampled in members.items()
    ]


def _anchors(trajectories: Sequence[Trajectory]) -> torch.Tensor | None:
    """Return the anchors of turns with action tokens, i64[K], in order; None if a trajectory lacks one."""
    found = [np.empty(0, np.int64)]
    for trajectory in trajectories:
        turns = np.unique(trajectory.turn_ids[trajectory.action_mask])
        if len(turns) and turns[-1] >= len(trajectory.anchors):
            return None
        found.append(trajectory.anchors[turns])
    return torch.from_numpy(np.concatenate(found))


def _rewards(trajectory: Trajectory) -> NDArray[np.float64]:
    rewards_T = np.zeros(trajectory.num_tokens)
    for event in trajectory.rewards:
        assert trajectory.action_mask[event.position], f"reward {event.name!r} is placed on a context token"
        rewards_T[event.position] += event.value
    return rewards_T
