"""Forward passes before credit assignment: the critic's values, and the policy's KL to reference and teacher.

A step without a critic, KL in the reward or a teacher makes none of them. The ranks keep what they find as
columns; the controller gets references to them, sums over turns, and moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentrl.algorithms.advantages.reinforce import Moments
from agentrl.cluster.workers import Handle, Workers
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.controller.credit import Assessment
from agentrl.controller.learner import plan_for
from agentrl.controller.roles import Roles
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.token_columns import TokenColumn
from agentrl.errors import LearnerError
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.learner.packing import MicrobatchPlan, plan_microbatches
from agentrl.learner.sample_refs import (
    Assessed,
    PlannedMicrobatch,
    SampleRef,
    columns_by_sample,
    planned,
    sums_by_sample,
)
from agentrl.learner.token_credit import NO_COLUMNS
from agentrl.types import Group, Outcome


def assess(
    roles: Roles,
    groups: Sequence[Group[AttemptFacts]],
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
    *,
    folder: str | None = None,
) -> Assessment:
    """Return the model outputs that credit needs besides the rewards; empty if the algorithm needs none.

    Args:
        folder: where the ranks keep columns with a number per token; None: in memory, for a single process.

    Raises:
        LearnerError: a value or the KL is not finite. Non-finite updates are skipped, so the cause is the
            weights of a model or a dtype that is too narrow; later batches would fail as well.
        DiskError: a column cannot be written.
    """
    attempts = [attempt for group in groups for attempt in group.trajectories]
    columns, assessment = [NO_COLUMNS] * len(attempts), Assessment()
    if roles.critic is not None:
        values = _values(roles.critic, attempts, algorithm, config, folder)
        columns = [replace(own, values=v) for own, v in zip(columns, values, strict=True)]
    if roles.reward_kl is not None:
        kl = _kl(roles.learner, Learner.reward_kl, attempts, config, folder, "reference")
        columns = [replace(own, kl=k) for own, k in zip(columns, kl.columns, strict=True)]
        assessment = replace(assessment, kl_sums=kl.sums, kl_coefficient=roles.reward_kl.coefficient)
    if algorithm.distillation.is_used:
        kl = _kl(roles.learner, Learner.teacher_kl, attempts, config, folder, "teacher")
        columns = [replace(own, teacher_kl=k) for own, k in zip(columns, kl.columns, strict=True)]
        assessment = replace(assessment, teacher_kl_sum=kl.total)
    return assessment if all(own is NO_COLUMNS for own in columns) else replace(assessment, columns=columns)


def measure_on_ranks(learner: Workers[Learner], samples: Sequence[SampleRef]) -> list[Moments]:
    """Return the moments of the samples' advantages, in any order; the ranks share the samples.

    Raises:
        DiskError: a column is missing.
    """
    shares = [list(samples[rank :: learner.dp_size]) for rank in range(learner.dp_size)]
    return [one for own in learner.run(Learner.moments, shares) for one in own]


def settle(
    roles: Roles, groups: Sequence[Group[AttemptFacts]], assessment: Assessment
) -> list[dict[str, float]]:
    """Adapt the coefficient of KL in the reward to the assessed batch; return the metrics of KL to reference
    and teacher, if any: `teacher_kl` is the mean of log policy - log teacher per action token, in nats.
    """
    attempts = [t for group in groups for t in group.trajectories]
    num_tokens = sum(t.num_action_tokens for t in attempts)
    found = []
    if roles.reward_kl is not None and assessment.kl_sums is not None:
        total = sum(float(sums.sum()) for sums in assessment.kl_sums)
        found.append(
            roles.reward_kl.observe(total, num_sequences=len(attempts), num_action_tokens=num_tokens)
        )
    if assessment.teacher_kl_sum is not None:
        found.append({"teacher_kl": assessment.teacher_kl_sum / max(num_tokens, 1)})
    return found


def begin_critic_updates(
    roles: Roles,
    minibatches: Sequence[Sequence[SampleRef]],
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
    critic: Workers[Critic], samples: Sequence[SampleRef], algorithm: AlgorithmConfig, config: LearnerConfig
) -> list[PlannedMicrobatch]:
    """Return the microbatches of all critic ranks, concatenated by rank; fillers if there are no samples."""
    if not samples:
        return [PlannedMicrobatch(MicrobatchPlan(), {}) for _ in range(critic.dp_size)]
    shards = plan_microbatches(
        [sample.shape for sample in samples],
        max_tokens=config.microbatch_tokens,
        world_size=critic.dp_size,
        parity_tokens=critic.run(Critic.parity_tokens),
        # The value loss reads a sequence's length from its microbatch: means per sequence forbid splits.
        may_split=algorithm.aggregation != "sequence_mean_token_mean",
    )
    return planned([plan for shard in shards for plan in shard], samples)


def _values(
    critic: Workers[Critic],
    attempts: Sequence[AttemptFacts],
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
    folder: str | None,
) -> list[TokenColumn]:
    """Return each attempt's values before action tokens.

    Those of a truncated attempt have V(s_T) too if it is bootstrapped from there: the value behind its last
    action token, which is the value before an additional one.
    """
    samples = [
        SampleRef.plain(index, attempt).replace(
            has_end=algorithm.bootstrap_truncated
            and attempt.outcome is Outcome.TRUNCATED
            and attempt.num_action_tokens > 0
        )
        for index, attempt in enumerate(attempts)
    ]
    microbatches = pack_for_critic(critic, samples, algorithm, config)
    found = critic.run(Critic.values, microbatches, folder)
    _refuse_non_finite(found, "the critic's values")
    return columns_by_sample(samples, microbatches, found)


@dataclass(frozen=True, slots=True, eq=False)
class _KL:
    """Estimates of KL(policy || other) on action tokens: per attempt a column, and its sums over turns."""

    columns: list[TokenColumn]
    sums: list[NDArray[np.float64]]

    @property
    def total(self) -> float:
        return sum(float(own.sum()) for own in self.sums)


def _kl(
    learner: Workers[Learner],
    method: Callable[[Learner, Sequence[PlannedMicrobatch], str | None], Sequence[Assessed]],
    attempts: Sequence[AttemptFacts],
    config: LearnerConfig,
    folder: str | None,
    other: str,
) -> _KL:
    samples = [SampleRef.plain(index, attempt) for index, attempt in enumerate(attempts)]
    microbatches = plan_for(learner, samples, config)
    found = learner.run(method, microbatches, folder)
    _refuse_non_finite(found, f"the policy's KL to the {other}")
    return _KL(columns_by_sample(samples, microbatches, found), sums_by_sample(samples, microbatches, found))


def _refuse_non_finite(found: Sequence[Assessed], what: str) -> None:
    bad = sum(one.num_bad for one in found)
    if bad:
        count = sum(len(one.numbers) for one in found)
        raise LearnerError(
            f"{what}: {bad} of {count} numbers are not finite; resume from an earlier checkpoint with "
            "a lower learning rate"
        )
