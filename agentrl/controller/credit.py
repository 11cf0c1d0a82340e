"""From a batch of groups to what the learner reads: advantages per trajectory, samples, minibatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.algorithms.advantages import ESTIMATORS
from agentrl.learner.batch import Sample, samples_from
from agentrl.types import Group, Trajectory


def credit(groups: Sequence[Group], *, estimator: str) -> list[list[Sample]]:
    """Return the samples of each group, with the advantage of every trajectory on its action tokens."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    group_ids = torch.tensor([t.group_id for t in trajectories], dtype=torch.int64)
    advantages = ESTIMATORS[estimator](rewards, group_ids).to(torch.float32)
    samples = iter(samples_from(trajectories, [float(a) for a in advantages]))
    return [[next(samples) for _ in group.trajectories] for group in groups]


def split_minibatches(per_group: Sequence[Sequence[Sample]], *, num_minibatches: int, rng: np.random.Generator) -> list[list[Sample]]:
    """Cut a batch into minibatches of whole groups, as even as can be, in random order.

    Groups stay whole so that a minibatch never sees only the good, or only the bad, half of a comparison.
    """
    order = rng.permutation(len(per_group))
    return [[sample for index in part for sample in per_group[index]] for part in np.array_split(order, num_minibatches)]


def group_trajectories(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Return the groups of a batch in order of first appearance, members in order."""
    members: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.group_id, []).append(trajectory)
    return [Group(group_id, tuple(sorted(m, key=lambda t: t.member))) for group_id, m in members.items()]
