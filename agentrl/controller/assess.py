"""Forward passes before credit assignment: the critic's values, and the policy's KL to the reference.

A step without a critic and without KL in the reward makes none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.kl import KL_ESTIMATORS, k1
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.controller.credit import Assessment, sampling_order
from agentrl.controller.learner import pack_for
from agentrl.controller.roles import Roles
from agentrl.errors import LearnerError
from agentrl.learner.batch import Floats, Microbatch, Sample, samples_from
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.learner.packing import filler, pack
from agentrl.types import Group, Outcome, Trajectory
from agentrl.workers.workers import Handle, Workers

REWARD_KL_ESTIMATORS = {"k1": k1, **KL_ESTIMATORS}

PerToken = list[NDArray[np.float32]]
"""One f32[T] per trajectory, 0 outside the action mask."""


def assess(
    roles: Roles, groups: Sequence[Group], algorithm: AlgorithmConfig, config: LearnerConfig
) -> Assessment:
    """Return the model outputs that credit needs besides the rewards; empty if the algorithm needs none.

    Raises:
        LearnerError: a value or the KL is not finite. Non-finite updates are skipped, so the cause is the
            weights of a model or a dtype that is too narrow; later batches would fail as well.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    assessment = Assessment()
    if roles.critic is not None:
        values, after = _values(roles.critic, trajectories, algorithm, config)
        _refuse_non_finite(values if after is None else [*values, after], "the critic's values")
        assessment = replace(assessment, values=values, values_after=after)
    if roles.reward_kl is not None:
        kl = _kl(roles.learner, trajectories, algorithm.kl.estimator, config)
        _refuse_non_finite(kl, "the policy's KL to the reference")
        assessment = replace(assessment, kl=kl, kl_coefficient=roles.reward_kl.coefficient)
    return assessment


def _refuse_non_finite(columns: Sequence[Floats], what: str) -> None:
    numbers = np.concatenate([np.empty(0), *columns])
    bad = int((~np.isfinite(numbers)).sum())
    if bad:
        raise LearnerError(
            f"{what}: {bad} of {len(numbers)} numbers are not finite; resume from an earlier checkpoint with "
            "a lower learning rate"
        )


def settle(roles: Roles, groups: Sequence[Group], assessment: Assessment) -> list[dict[str, float]]:
    """Adapt the coefficient of KL in the reward to the assessed batch; return its metrics, if any."""
    if roles.reward_kl is None or assessment.kl is None:
        return []
    num_tokens = sum(t.num_action_tokens for group in groups for t in group.trajectories)
    return [roles.reward_kl.observe(assessment.kl, num_tokens)]


def begin_critic_updates(
    roles: Roles,
    minibatches: Sequence[Sequence[Sample]],
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
    *,
    num_epochs: int,
) -> list[Handle[dict[str, float]]]:
    """Start the critic's updates of one step and return a handle per update; empty without a critic.

    In its own pool the critic computes in parallel with the policy. In the policy's pool this waits for the
    updates: the activations of two models might not fit into the GPUs at once.
    """
    critic = roles.critic
    if critic is None:
        return []
    packed = [pack_for_critic(critic, minibatch, algorithm, config) for minibatch in minibatches]
    updates = [
        critic.begin(Critic.update, microbatches) for _ in range(num_epochs) for microbatches in packed
    ]
    if not roles.is_critic_apart:
        for update in updates:
            update.wait()
    return updates


def pack_for_critic(
    critic: Workers[Critic], samples: Sequence[Sample], algorithm: AlgorithmConfig, config: LearnerConfig
) -> list[Microbatch]:
    """Return the microbatches of all critic ranks, concatenated by rank; fillers if there are no samples."""
    if not samples:
        return [filler() for _ in range(critic.dp_size)]
    shards = pack(
        samples,
        max_tokens=config.microbatch_tokens,
        world_size=critic.dp_size,
        parity_tokens=critic.run(Critic.parity_tokens),
        # The value loss reads a sequence's length from its microbatch: means per sequence forbid splits.
        may_split=algorithm.aggregation != "sequence_mean_token_mean",
    )
    return [microbatch for shard in shards for microbatch in shard]


def _values(
    critic: Workers[Critic],
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
) -> tuple[PerToken, NDArray[np.float64] | None]:
    """Return the values before action tokens, and f64[N]: V(s_T) of truncated attempts.

    V(s_T) is the value after the last action token, from which a truncated attempt bootstraps. It is 0 for
    other attempts, and None without `algorithm.bootstrap_truncated`.
    """
    asks_after = [
        algorithm.bootstrap_truncated and t.outcome is Outcome.TRUNCATED and t.num_action_tokens > 0
        for t in trajectories
    ]
    plain = samples_from(trajectories, [0.0] * len(trajectories))
    samples = [
        _with_one_more(s, t) if asks else s
        for s, t, asks in zip(plain, trajectories, asks_after, strict=True)
    ]
    microbatches = pack_for_critic(critic, samples, algorithm, config)
    laid = lay_by_sample(samples, microbatches, critic.run(Critic.values, microbatches))
    after = np.zeros(len(trajectories))
    for index, trajectory in enumerate(trajectories):
        if asks_after[index]:
            end = _end_of_last_segment(trajectory)
            after[index] = laid[index][end]  # the dummy token's value is V(s_T)
            laid[index] = np.delete(laid[index], end)
    return laid, after if algorithm.bootstrap_truncated else None


def _kl(
    learner: Workers[Learner], trajectories: Sequence[Trajectory], estimator: str, config: LearnerConfig
) -> PerToken:
    samples = samples_from(trajectories, [0.0] * len(trajectories))
    microbatches = pack_for(learner, samples, config)
    estimate = REWARD_KL_ESTIMATORS[estimator]
    pairs = learner.run(Learner.logprobs, microbatches)
    found = [
        estimate(torch.from_numpy(policy).double(), torch.from_numpy(ref).double()).numpy()
        for policy, ref in pairs
    ]
    return lay_by_sample(samples, microbatches, found)


def lay_by_sample(
    samples: Sequence[Sample], microbatches: Sequence[Microbatch], columns: Sequence[Floats]
) -> PerToken:
    """Scatter `columns`, f[A] per microbatch, to the action tokens of each sample: f32[T], else 0."""
    by_index = {sample.index: np.zeros(sample.num_tokens, np.float32) for sample in samples}
    positions = {sample.index: np.flatnonzero(sample.action_mask) for sample in samples}
    for microbatch, column in zip(microbatches, columns, strict=True):
        indices = microbatch.sample_indices[microbatch.sequence_ids]
        for index in np.unique(indices):
            own = indices == index
            by_index[int(index)][positions[int(index)][microbatch.action_places[own]]] = column[own]
    return [by_index[sample.index] for sample in samples]


def _with_one_more(sample: Sample, trajectory: Trajectory) -> Sample:
    """Return the sample with a dummy action token after the segment of its last token.

    The critic's value before this token is V(s_T).
    """
    end = _end_of_last_segment(trajectory)

    def grown(column: NDArray[Any], value: float | bool) -> NDArray[Any]:
        return np.insert(column, end, value)

    return replace(
        sample,
        token_ids=grown(sample.token_ids, 0),
        action_mask=grown(sample.action_mask, True),
        loss_mask=grown(sample.loss_mask, False),
        behavior_logprobs=grown(sample.behavior_logprobs, 0.0),
        advantages=grown(sample.advantages, 0.0),
        segment_starts=tuple(start + 1 if start >= end else start for start in sample.segment_starts),
    )


def _end_of_last_segment(trajectory: Trajectory) -> int:
    """Return the end (exclusive) of the segment that contains the last sampled token."""
    last = sampling_order(trajectory)[-1]
    return next((start for start in trajectory.segment_starts if start > last), trajectory.num_tokens)
