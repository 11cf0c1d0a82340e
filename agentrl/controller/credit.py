"""From a batch of groups to what the learner reads: advantages on action tokens, samples, minibatches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.advantages import estimate, find_estimator
from agentrl.algorithms.advantages.reinforce import whiten
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit
from agentrl.algorithms.reward_kl import penalize
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.learner.batch import Sample, samples_from
from agentrl.types import SCORED_OUTCOMES, Group, Lags, Outcome, Trajectory, member_tuple


@dataclass(frozen=True, slots=True, eq=False)
class Assessment:
    """What is known of a batch beside its rewards, of each trajectory; None: nobody asked.

    values: f32[T], the critic's estimate before each action token, 0 elsewhere. values_after: f64[N], behind the last one of truncated
    attempts. kl: f32[T], estimate of KL(policy || ref) on each action token, in nats, for which the reward pays `kl_coefficient`.
    """

    values: Sequence[NDArray[np.float32]] | None = None
    values_after: NDArray[np.float64] | None = None
    kl: Sequence[NDArray[np.float32]] | None = None
    kl_coefficient: float = 0.0


NOTHING = Assessment()


def credit(
    groups: Sequence[Group], algorithm: AlgorithmConfig, *, group_size: int | None, assessment: Assessment = NOTHING
) -> list[list[Sample]]:
    """Return the samples of each group, with the advantage of every action token on it, and with a critic values and returns.

    `group_size`: trajectories of a complete group; None where groups may differ in size on purpose.

    Raises:
        PluginError: the estimator is the user's and cannot be found.
        ConfigError: the estimator refuses the batch: an incomplete group, rewards that it is not made for.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    estimator = find_estimator(algorithm.advantage)
    try:
        batch = replace(action_batch(trajectories, group_size=group_size), greedy_rewards_N=greedy_rewards(groups))
        found = estimate(estimator, assessed(batch, trajectories, assessment), advantage_options(algorithm))
    except ValueError as error:
        raise ConfigError(f"algorithm.advantage={algorithm.advantage}: {error}") from error
    advantages_A = whiten(found.advantages_A) if algorithm.whiten else found.advantages_A
    plain = samples_from(trajectories, lay_on_tokens(trajectories, advantages_A.numpy()))
    samples = iter(plain if assessment.values is None else _with_returns(plain, trajectories, found, assessment.values, algorithm))
    return [[next(samples) for _ in group.trajectories] for group in groups]


def action_batch(trajectories: Sequence[Trajectory], *, group_size: int | None) -> ActionBatch:
    """Return what was sampled and earned, without context tokens; rows of one attempt are joined in the order of sampling.

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
    """Return the batch with values, and with rewards that paid for KL to the reference."""

    def compact(columns: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        rows = [column[sampling_order(t)].astype(np.float64) for column, t in zip(columns, trajectories, strict=True)]
        return torch.from_numpy(np.concatenate([np.empty(0), *rows]))

    if assessment.values is not None:
        after = assessment.values_after
        batch = replace(batch, values_A=compact(assessment.values), values_after_N=None if after is None else torch.from_numpy(after))
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
        raise ConfigError(f"algorithm.advantage={algorithm.advantage} gives no returns for the critic to learn; use critic.enabled=false")
    returns = lay_on_tokens(trajectories, found.returns_A.numpy())
    return [replace(s, values=v, returns=r) for s, v, r in zip(samples, values, returns, strict=True)]


def greedy_rewards(groups: Sequence[Group]) -> torch.Tensor | None:
    """Return f64[N]: for each trajectory what the greedy attempt of its group earned; None unless every group has one."""
    rewards = [group.greedy.reward for group in groups if group.greedy is not None]
    if not groups or len(rewards) < len(groups):
        return None
    return torch.from_numpy(np.repeat(np.array(rewards), [len(group.trajectories) for group in groups]))


def lay_on_tokens(trajectories: Sequence[Trajectory], values_A: NDArray[np.float64]) -> list[NDArray[np.float32]]:
    """Return f32[T] of each trajectory: the values of the compact batch where its action tokens stand, 0 elsewhere."""
    laid, start = [], 0
    for trajectory in trajectories:
        positions = sampling_order(trajectory)
        values_T = np.zeros(trajectory.num_tokens, np.float32)
        values_T[positions] = values_A[start : start + len(positions)]
        start += len(positions)
        laid.append(values_T)
    assert start == len(values_A), "the values are not of these trajectories"
    return laid


def sampling_order(trajectory: Trajectory) -> NDArray[np.int64]:
    """Return the positions of action tokens as they were sampled: by turn, because rows of an attempt may grow in turn."""
    positions = np.flatnonzero(trajectory.action_mask)
    return positions[np.argsort(trajectory.turn_ids[positions], kind="stable")]


def advantage_options(algorithm: AlgorithmConfig) -> AdvantageOptions:
    """Return what the config says to estimators."""
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
    """Return the groups without attempts that failed: those have no reward, and neither learn nor are compared with."""
    return [replace(group, trajectories=tuple(t for t in group.trajectories if t.outcome in SCORED_OUTCOMES)) for group in groups]


def leave_out_masked(samples: Sequence[Sequence[Sample]], groups: Sequence[Group], masked: Collection[Outcome]) -> list[list[Sample]]:
    """Return the samples of each group whose attempts did not end in a masked outcome.

    Their rewards are in the advantages of the others. They are gone, not only out of the loss: no mean over sequences counts them.
    """
    return [
        [sample for sample, trajectory in zip(members, group.trajectories, strict=True) if trajectory.outcome not in masked]
        for members, group in zip(samples, groups, strict=True)
    ]


def leave_out_old(samples: Sequence[Sequence[Sample]], groups: Sequence[Group], *, lags: Lags, max_lag: int | None) -> list[list[Sample]]:
    """Return the samples with tokens whose lag is more than `max_lag` versions out of the loss; None: as they are.

    Advantages stay: what an old token earned is as true as before.
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


def split_minibatches(per_group: Sequence[Sequence[Sample]], *, num_minibatches: int, rng: np.random.Generator) -> list[list[Sample]]:
    """Cut a batch into minibatches of whole groups, as even as can be, in random order; one whose members are all masked is empty.

    Groups stay whole so that a minibatch never sees only the good, or only the bad, half of a comparison.
    """
    order = rng.permutation(len(per_group))
    return [[sample for index in part for sample in per_group[index]] for part in np.array_split(order, num_minibatches)]


def group_trajectories(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Return the groups of a batch in order of first appearance, members in order, greedy attempts apart from the others."""
    members: dict[int, list[Trajectory]] = {}
    greedy: dict[int, Trajectory] = {}
    for trajectory in trajectories:
        sampled = members.setdefault(trajectory.group_id, [])
        if trajectory.is_greedy:
            greedy[trajectory.group_id] = trajectory
        else:
            sampled.append(trajectory)
    return [Group(group_id, member_tuple(sampled), greedy.get(group_id)) for group_id, sampled in members.items()]


def _anchors(trajectories: Sequence[Trajectory]) -> torch.Tensor | None:
    """Return i64[K]: the anchors of turns with an action token, in order of trajectory and turn; None where one recorded none."""
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
        assert trajectory.action_mask[event.position], f"reward {event.name!r} lies on a context token"
        rewards_T[event.position] += event.value
    return rewards_T
