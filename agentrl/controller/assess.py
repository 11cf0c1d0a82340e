"""Forward passes before credit assignment: the critic's values, and the policy's KL to reference and teacher.

A step without a critic, KL in the reward or a teacher makes none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.kl import KL_ESTIMATORS, KLEstimator, k1
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.controller.credit import Assessment
from agentrl.controller.learner import plan_for
from agentrl.controller.roles import Roles
from agentrl.controller.teacher import teacher_metrics
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import LearnerError
from agentrl.learner.batch import Floats
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.learner.packing import MicrobatchPlan, plan_microbatches
from agentrl.learner.sample_refs import (
    Packed,
    PlannedMicrobatch,
    SampleRef,
    end_place,
    lay_by_sample,
    planned,
)
from agentrl.types import Group, Outcome
from agentrl.workers.workers import Handle, Workers

REWARD_KL_ESTIMATORS = {"k1": k1, **KL_ESTIMATORS}

PerToken = list[NDArray[np.float32]]
"""One f32[A] per trajectory: a number for each action token, in the order of positions."""


def assess(
    roles: Roles, groups: Sequence[Group[AttemptFacts]], algorithm: AlgorithmConfig, config: LearnerConfig
) -> Assessment:
    """Return the model outputs that credit needs besides the rewards; empty if the algorithm needs none.

    Raises:
        LearnerError: a value or the KL is not finite. Non-finite updates are skipped, so the cause is the
            weights of a model or a dtype that is too narrow; later batches would fail as well.
    """
    attempts = [attempt for group in groups for attempt in group.trajectories]
    assessment = Assessment()
    if roles.critic is not None:
        values, after = _values(roles.critic, attempts, algorithm, config)
        _refuse_non_finite(values if after is None else [*values, after], "the critic's values")
        assessment = replace(assessment, values=values, values_after=after)
    if roles.reward_kl is not None:
        estimate = REWARD_KL_ESTIMATORS[algorithm.kl.estimator]
        kl = _per_token(roles.learner, Learner.logprobs, attempts, estimate, config)
        _refuse_non_finite(kl, "the policy's KL to the reference")
        assessment = replace(assessment, kl=kl, kl_coefficient=roles.reward_kl.coefficient)
    if algorithm.distillation.is_used:
        kl = _per_token(roles.learner, Learner.teacher_logprobs, attempts, k1, config)
        _refuse_non_finite(kl, "the policy's KL to the teacher")
        assessment = replace(assessment, teacher_kl=kl)
    return assessment


def _refuse_non_finite(columns: Sequence[Floats], what: str) -> None:
    numbers = np.concatenate([np.empty(0), *columns])
    bad = int((~np.isfinite(numbers)).sum())
    if bad:
        raise LearnerError(
            f"{what}: {bad} of {len(numbers)} numbers are not finite; resume from an earlier checkpoint with "
            "a lower learning rate"
        )


def settle(
    roles: Roles, groups: Sequence[Group[AttemptFacts]], assessment: Assessment
) -> list[dict[str, float]]:
    """Adapt the coefficient of KL in the reward to the assessed batch; return the metrics of KL to reference
    and teacher, if any.
    """
    num_tokens = sum(t.num_action_tokens for group in groups for t in group.trajectories)
    found = []
    if roles.reward_kl is not None and assessment.kl is not None:
        found.append(roles.reward_kl.observe(assessment.kl, num_tokens))
    if assessment.teacher_kl is not None:
        found.append(teacher_metrics(assessment.teacher_kl, num_tokens))
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
) -> tuple[PerToken, NDArray[np.float64] | None]:
    """Return the values before action tokens, and f64[N]: V(s_T) of truncated attempts.

    V(s_T) is the value after the last action token, from which a truncated attempt bootstraps. It is 0 for
    other attempts, and None without `algorithm.bootstrap_truncated`.
    """
    asks_after = [
        algorithm.bootstrap_truncated and t.outcome is Outcome.TRUNCATED and t.num_action_tokens > 0
        for t in attempts
    ]
    samples = [
        SampleRef.plain(index, attempt).replace(has_end=asks)
        for index, (attempt, asks) in enumerate(zip(attempts, asks_after, strict=True))
    ]
    microbatches = pack_for_critic(critic, samples, algorithm, config)
    laid = lay_by_sample(samples, microbatches, critic.run(Critic.values, microbatches))
    after = np.zeros(len(attempts))
    for index, attempt in enumerate(attempts):
        if asks_after[index]:
            _, place = end_place(attempt)
            after[index] = laid[index][place]  # the value before the additional token is V(s_T)
            laid[index] = np.delete(laid[index], place)
    return laid, after if algorithm.bootstrap_truncated else None


def _per_token(
    learner: Workers[Learner],
    method: Callable[[Learner, Sequence[Packed]], Sequence[tuple[Floats, Floats]]],
    attempts: Sequence[AttemptFacts],
    estimate: KLEstimator,
    config: LearnerConfig,
) -> PerToken:
    """Return the estimate of KL(policy || other) on each action token; `method` returns their
    log-probabilities.
    """
    samples = [SampleRef.plain(index, attempt) for index, attempt in enumerate(attempts)]
    microbatches = plan_for(learner, samples, config)
    found = [
        estimate(torch.tensor(policy, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)).numpy()
        for policy, other in learner.run(method, microbatches)
    ]
    return lay_by_sample(samples, microbatches, found)
