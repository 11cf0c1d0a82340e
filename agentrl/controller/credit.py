"""Credit assignment: turns a batch of groups into samples with advantages, and samples into minibatches.

It works on the facts of the attempts: how many tokens each turn has, and where its rewards lie. What needs a
number per token is left to the ranks (`agentrl.learner.token_credit`): here are only its references, sums
over turns, and moments. The one exception is an estimator of the user's own that reads numbers per token: it
sees the whole batch, so its columns are read here.

With `conversation_credit=own`, each conversation of an attempt is credited as an attempt of its own, and
compared with those of the same name in the group.

Axes: A action tokens of the whole batch, N trajectories of the batch, R runs of tokens with equal advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.advantages import checked
from agentrl.algorithms.advantages.reinforce import Moments, whiten
from agentrl.algorithms.compact import ActionBatch, Credit, RunCredit
from agentrl.algorithms.registry import find_estimator
from agentrl.algorithms.reward_kl import penalize_turns
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.data.attempt_facts import AttemptFacts, ConversationFacts
from agentrl.errors import ConfigError
from agentrl.learner.action_batches import (
    action_batch,
    advantage_options,
    as_attempts,
    parts_of,
    runs_in_order,
)
from agentrl.learner.sample_refs import SampleRef
from agentrl.learner.token_credit import (
    NO_COLUMNS,
    LoadedColumns,
    TokenColumns,
    TokenRules,
    assessed,
    order_of,
)
from agentrl.types import SCORED_OUTCOMES, A, Group, Lags, Outcome, member_tuple

Parts = list[list[ConversationFacts]]
"""What of each attempt is credited on its own (see `parts_of`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Assessment:
    """Model outputs that credit needs besides the rewards.

    columns: of each trajectory, by reference; () if the algorithm uses none.
    kl_sums: of each trajectory, the sum of its column `kl` over each run of its `turns`, f64, in nats; None
        without KL in the reward.
    kl_coefficient: reward subtracted per nat of KL.
    teacher_kl_sum: of the column `teacher_kl` over the batch, in nats; None without a teacher.
    """

    columns: Sequence[TokenColumns] = ()
    kl_sums: Sequence[NDArray[np.float64]] | None = None
    kl_coefficient: float = 0.0
    teacher_kl_sum: float | None = None


NOTHING = Assessment()


def credit(
    groups: Sequence[Group[AttemptFacts]],
    algorithm: AlgorithmConfig,
    *,
    group_size: int | None,
    assessment: Assessment = NOTHING,
) -> list[list[SampleRef]]:
    """Return the samples of each group with their advantages, or with the rules by which ranks compute them.

    `whitened` must follow before they are loaded.

    Args:
        group_size: trajectories in a complete group; None if group sizes may differ.

    Raises:
        PluginError: the estimator is a plugin that cannot be found.
        ConfigError: the estimator refuses the batch: an incomplete group, or rewards that it cannot handle.
    """
    attempts = [attempt for group in groups for attempt in group.trajectories]
    parts = [parts_of(attempt, algorithm.conversation_credit) for attempt in attempts]
    columns = assessment.columns or [NO_COLUMNS] * len(attempts)
    rules = _rules(algorithm, assessment)
    try:
        batch = _batch(groups, parts, group_size=group_size)
        found = _without_rewards(batch)
        if rules.estimator is None and not algorithm.distillation.replaces_rewards:
            batch = _assessed(batch, attempts, parts, algorithm, assessment)
            estimate = find_estimator(algorithm.advantage).function
            assert callable(estimate)
            found = checked(estimate(batch, advantage_options(algorithm)), batch)
    except ValueError as error:
        raise ConfigError(f"algorithm.advantage={algorithm.advantage}: {error}") from error
    if rules.estimator is None:
        columns = [replace(own, kl=None) for own in columns]  # it is in the rewards already
        _check_targets(found, columns, algorithm)
        if algorithm.whiten:
            found = found.with_advantages(whiten(*found.runs))
    samples = iter(_samples(attempts, found, columns, rules))
    return [[next(samples) for _ in group.trajectories] for group in groups]


def measured(samples: Sequence[SampleRef]) -> list[Moments]:
    """Return the moments of each sample's advantages, computed in this process."""
    return [sample.moments() for sample in samples]


def whitened(
    samples: Sequence[Sequence[SampleRef]],
    measure: Callable[[Sequence[SampleRef]], Sequence[Moments]] = measured,
) -> list[list[SampleRef]]:
    """Return the samples ready to be loaded: with the whitening that their rules ask for, over the batch.

    Args:
        measure: returns the moments of the advantages of samples, in any order.
    """
    flat = [sample for members in samples for sample in members]
    rules = flat[0].rules if flat else None
    if rules is None or not rules.num_whitenings:
        return [list(members) for members in samples]
    moments = Moments.joined(measure(flat))
    whitening = moments.whitening
    for _ in range(rules.num_whitenings - 1):
        whitening = whitening.then(moments.whitened(whitening).whitening)
    found = replace(rules, whitening=whitening)
    return [[sample.replace(rules=found) for sample in members] for members in samples]


def _rules(algorithm: AlgorithmConfig, assessment: Assessment) -> TokenRules:
    distillation = algorithm.distillation
    has_values = any(own.values is not None for own in assessment.columns)
    # Without a discount, returns-to-go change only behind rewards; a penalty per token is a reward.
    needs_tokens = has_values or assessment.kl_sums is not None or algorithm.gamma < 1
    named = algorithm.estimator
    is_separate = named.separate is not None and not distillation.replaces_rewards
    estimator = named.name if is_separate and needs_tokens else None
    return TokenRules(
        estimator=estimator,
        options=advantage_options(algorithm),
        kl_coefficient=assessment.kl_coefficient,
        num_whitenings=0 if estimator is None else named.is_whitened + algorithm.whiten,
        whitening=None,
        teacher=(distillation.coefficient, distillation.gamma),
        conversation_credit=algorithm.conversation_credit,
        is_of_last_segments=algorithm.segment_credit == "last",
    )


def _batch(groups: Sequence[Group[AttemptFacts]], parts: Parts, *, group_size: int | None) -> ActionBatch:
    flat = [part for own in parts for part in own]
    attempts = [attempt for group in groups for attempt in group.trajectories]
    if all(own[0].attempt is attempt for own, attempt in zip(parts, attempts, strict=True)):
        batch = action_batch(attempts, group_size=group_size)
        return replace(batch, greedy_rewards_N=greedy_rewards(groups))
    # A greedy reward is of a whole attempt, and not every attempt has every conversation.
    return action_batch(as_attempts(flat), group_size=None)


def _without_rewards(batch: ActionBatch) -> Credit | RunCredit:
    return RunCredit(torch.zeros(len(batch.num_tokens_N), dtype=torch.float64), batch.num_tokens_N)


def _assessed(
    batch: ActionBatch,
    attempts: Sequence[AttemptFacts],
    parts: Parts,
    algorithm: AlgorithmConfig,
    assessment: Assessment,
) -> ActionBatch:
    """Return the batch with the KL penalty on the turns, or with all columns for an estimator of the user's
    own.
    """
    if "columns" in find_estimator(algorithm.advantage).reads and assessment.columns:
        three = zip(assessment.columns, attempts, parts, strict=True)
        loaded = [
            LoadedColumns.of(columns, attempt, order_of(own, attempt)) for columns, attempt, own in three
        ]
        return assessed(batch, loaded, kl_coefficient=assessment.kl_coefficient)
    if assessment.kl_sums is None:
        return batch
    sums = [
        _over_turns(attempt, part, own)
        for attempt, owned, own in zip(attempts, parts, assessment.kl_sums, strict=True)
        for part in owned
    ]
    kl_K = torch.from_numpy(np.concatenate([np.empty(0), *sums]))
    return penalize_turns(batch, kl_K, coefficient=assessment.kl_coefficient)


def _over_turns(
    attempt: AttemptFacts, part: ConversationFacts, sums: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sums of a part's turns, f64[K], in the order of sampling, from those of the attempt's
    runs.
    """
    totals: dict[int, float] = {}
    for run in runs_in_order(attempt, part.runs):
        number, _ = attempt.turns[run]
        totals[number] = totals.get(number, 0.0) + float(sums[run])
    return np.array(list(totals.values()))


def _check_targets(
    found: Credit | RunCredit, columns: Sequence[TokenColumns], algorithm: AlgorithmConfig
) -> None:
    if found.returns_A is None and any(own.values is not None for own in columns):
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} returns no value targets for the critic; use "
            "critic.enabled=false"
        )


def _samples(
    attempts: Sequence[AttemptFacts],
    found: Credit | RunCredit,
    columns: Sequence[TokenColumns],
    rules: TokenRules,
) -> list[SampleRef]:
    """Return the samples with their runs of equal advantages, in the order of crediting."""
    values_R, lengths_R = (column.numpy() for column in found.runs)
    returns_A = None if found.returns_A is None else found.returns_A.numpy()
    ends = np.cumsum([t.num_action_tokens for t in attempts])
    run_ends = np.cumsum(lengths_R)
    samples, start = [], 0
    for index, (attempt, own, end) in enumerate(zip(attempts, columns, ends.tolist(), strict=True)):
        stop = int(np.searchsorted(run_ends, end, side="right"))
        values, lengths = values_R[start:stop], lengths_R[start:stop]
        assert lengths.sum() == attempt.num_action_tokens, (
            "a run of advantages crosses the end of a trajectory"
        )
        start = stop
        returns = None if returns_A is None else returns_A[end - attempt.num_action_tokens : end]
        samples.append(SampleRef(index, attempt, values, lengths, columns=own, rules=rules, returns=returns))
    return samples


def greedy_rewards(groups: Sequence[Group[A]]) -> torch.Tensor | None:
    """Return each trajectory's greedy baseline, f64[N]: the reward of the greedy attempt of its group.

    None unless every group has a greedy attempt.
    """
    rewards = [group.greedy.reward for group in groups if group.greedy is not None]
    if not groups or len(rewards) < len(groups):
        return None
    return torch.from_numpy(np.repeat(np.array(rewards), [len(group.trajectories) for group in groups]))


# ------------------------------------------------------------------------------------- groups and minibatches


def with_reward(groups: Sequence[Group[A]]) -> list[Group[A]]:
    """Return the groups without failed attempts.

    A failure has no reward, so it is neither trained on nor compared.
    """
    return [
        replace(group, trajectories=tuple(t for t in group.trajectories if t.outcome in SCORED_OUTCOMES))
        for group in groups
    ]


def leave_out_masked(
    samples: Sequence[Sequence[SampleRef]], masked: Collection[Outcome]
) -> list[list[SampleRef]]:
    """Return the samples of each group without those whose attempt ended in a masked outcome.

    Masked attempts still count in the group's baseline: call this after `credit`. They are removed, not
    zeroed in the loss, so that means over sequences do not count them.
    """
    return [[sample for sample in members if sample.attempt.outcome not in masked] for members in samples]


def leave_out_old(
    samples: Sequence[Sequence[SampleRef]], *, lags: Lags, max_lag: int | None
) -> list[list[SampleRef]]:
    """Remove tokens that lag by more than `max_lag` versions from the loss; None removes none.

    Their advantages stay: the reward of an old token is as valid as before.
    """
    if max_lag is None:
        return [list(members) for members in samples]

    def without_old(sample: SampleRef) -> SampleRef:
        versions = np.array([version for version, _ in sample.attempt.versions], np.int32)
        return sample.replace(dropped_versions=tuple(versions[lags(versions) > max_lag].tolist()))

    return [[without_old(sample) for sample in members] for members in samples]


def split_minibatches(
    per_group: Sequence[Sequence[SampleRef]], *, num_minibatches: int, rng: np.random.Generator
) -> list[list[SampleRef]]:
    """Split a batch into minibatches of whole groups, in random order, as evenly as possible.

    Groups stay whole because their members are compared with each other: half a group could have only
    positive, or only negative, advantages. A minibatch whose members are all masked is empty.
    """
    order = rng.permutation(len(per_group))
    return [
        [sample for index in part for sample in per_group[index]]
        for part in np.array_split(order, num_minibatches)
    ]


def group_attempts(attempts: Sequence[A]) -> list[Group[A]]:
    """Group attempts by task visit, in order of first appearance; greedy attempts are kept separately."""
    members: dict[int, list[A]] = {}
    greedy: dict[int, A] = {}
    for attempt in attempts:
        sampled = members.setdefault(attempt.group_id, [])
        if attempt.is_greedy:
            greedy[attempt.group_id] = attempt
        else:
            sampled.append(attempt)
    return [
        Group(group_id, member_tuple(sampled), greedy.get(group_id)) for group_id, sampled in members.items()
    ]
