"""Credit assignment: turns a batch of groups into samples with advantages, and samples into minibatches.

It works on the facts of the attempts: how many tokens each turn has, and where its rewards lie. Only a critic
and KL in the reward bring a number per token here.

With `conversation_credit=own`, each conversation of an attempt is credited as an attempt of its own, and
compared with those of the same name in the group; the results are laid back onto the attempts.

Axes: A action tokens of the whole batch or of one trajectory, N trajectories of the batch, R runs of tokens
with equal advantages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.advantages import checked, find_estimator
from agentrl.algorithms.advantages.reinforce import whiten
from agentrl.algorithms.compact import (
    ActionBatch,
    AdvantageOptions,
    CompactTurns,
    Credit,
    RunCredit,
    TokenRewards,
)
from agentrl.algorithms.distillation import teacher_advantages
from agentrl.algorithms.reward_kl import penalize
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.data.attempt_facts import AttemptFacts, ConversationFacts
from agentrl.errors import ConfigError
from agentrl.learner.sample_refs import SampleRef
from agentrl.types import SCORED_OUTCOMES, A, Group, Lags, Outcome, RewardEvent, member_tuple


@dataclass(frozen=True, slots=True, eq=False)
class Assessment:
    """Model outputs that credit needs besides the rewards. A field is None if the algorithm does not use it.

    values: f32[A] per trajectory, the critic's estimate before each action token, in the order of positions.
    values_after: f64[N], the estimate after the last action token of truncated attempts, to bootstrap from.
    kl: f32[A] per trajectory, estimate of KL(policy || ref) on each action token, in nats; same order.
    kl_coefficient: reward subtracted per nat of `kl`.
    teacher_kl: f32[A] per trajectory, log policy - log teacher of each action token, in nats; same order.
    """

    values: Sequence[NDArray[np.float32]] | None = None
    values_after: NDArray[np.float64] | None = None
    kl: Sequence[NDArray[np.float32]] | None = None
    kl_coefficient: float = 0.0
    teacher_kl: Sequence[NDArray[np.float32]] | None = None


NOTHING = Assessment()


def credit(
    groups: Sequence[Group[AttemptFacts]],
    algorithm: AlgorithmConfig,
    *,
    group_size: int | None,
    assessment: Assessment = NOTHING,
) -> list[list[SampleRef]]:
    """Return the samples of each group with their advantages; with a critic, also with values and returns.

    Args:
        group_size: trajectories in a complete group; None if group sizes may differ.

    Raises:
        PluginError: the estimator is a plugin that cannot be found.
        ConfigError: the estimator refuses the batch: an incomplete group, or rewards that it cannot handle.
    """
    whole = [attempt for group in groups for attempt in group.trajectories]
    estimator = find_estimator(algorithm.advantage)
    attempts, parts = whole, None
    if algorithm.conversation_credit == "own" and any(t.conversation_names for t in whole):
        parts = ConversationParts.of(whole)
        attempts, assessment, group_size = parts.attempts, parts.assessed(assessment), None
    try:
        batch = action_batch(attempts, group_size=group_size)
        if parts is None:  # a greedy reward is of a whole attempt
            batch = replace(batch, greedy_rewards_N=greedy_rewards(groups))
        batch = assessed(batch, attempts, assessment)
        found = _without_rewards(batch)
        if not algorithm.distillation.replaces_rewards:
            found = checked(estimator(batch, advantage_options(algorithm)), batch)
    except ValueError as error:
        raise ConfigError(f"algorithm.advantage={algorithm.advantage}: {error}") from error
    if algorithm.whiten:
        found = found.with_advantages(whiten(*found.runs))
    if assessment.teacher_kl is not None:
        found = _taught(found, batch, _compact(assessment.teacher_kl, attempts), algorithm.distillation)
    credited = _with_returns(_samples(attempts, found), found, assessment, algorithm)
    if parts is not None:
        credited = parts.joined(credited)
    if algorithm.segment_credit == "last":
        credited = [_of_last_segments(sample) for sample in credited]
    samples = iter(credited)
    return [[next(samples) for _ in group.trajectories] for group in groups]


def action_batch(attempts: Sequence[AttemptFacts], *, group_size: int | None) -> ActionBatch:
    """Return the batch without context tokens; segments of a trajectory are joined in sampling order.

    Raises:
        ValueError: a group is incomplete, or a reward is not finite.
    """
    num_tokens = np.array([t.num_action_tokens for t in attempts], np.int64)
    starts = np.cumsum(num_tokens) - num_tokens
    turns = [_turns_in_order(t) for t in attempts]
    places, values = [], []
    for attempt, start in zip(attempts, starts.tolist(), strict=True):
        for place, event in sorted(zip(_reward_places(attempt), attempt.rewards, strict=True), key=_first):
            places.append(start + place)
            values.append(event.value)
    counts = np.array([len(own) for own in turns], np.int64)
    return ActionBatch(
        rewards=TokenRewards(
            torch.tensor(places, dtype=torch.int64), torch.tensor(values, dtype=torch.float64)
        ),
        turns=CompactTurns(
            lengths_K=torch.tensor([length for own in turns for _, length in own], dtype=torch.int64),
            number_K=torch.tensor([number for own in turns for number, _ in own], dtype=torch.int64),
            sequence_K=torch.from_numpy(np.repeat(np.arange(len(attempts)), counts)),
            counts_N=torch.from_numpy(counts),
        ),
        num_tokens_N=torch.from_numpy(num_tokens),
        group_N=torch.tensor([t.group_id for t in attempts], dtype=torch.int64),
        is_truncated_N=torch.tensor([t.outcome is Outcome.TRUNCATED for t in attempts], dtype=torch.bool),
        group_size=group_size,
        anchors_K=_anchors(attempts),
    )


def assessed(batch: ActionBatch, attempts: Sequence[AttemptFacts], assessment: Assessment) -> ActionBatch:
    """Return the batch with the values added and the KL penalty subtracted from the rewards."""
    if assessment.values is not None:
        after = assessment.values_after
        batch = replace(
            batch,
            values_A=_compact(assessment.values, attempts),
            values_after_N=None if after is None else torch.from_numpy(after),
        )
    if assessment.kl is not None:
        batch = penalize(batch, _compact(assessment.kl, attempts), coefficient=assessment.kl_coefficient)
    return batch


def _compact(columns: Sequence[NDArray[np.float32]], attempts: Sequence[AttemptFacts]) -> torch.Tensor:
    """Return f64[A], in sampling order, from the numbers of each trajectory in the order of positions."""
    rows = [column[sampling_order(t)].astype(np.float64) for column, t in zip(columns, attempts, strict=True)]
    return torch.from_numpy(np.concatenate([np.empty(0), *rows]))


def _without_rewards(batch: ActionBatch) -> Credit | RunCredit:
    return RunCredit(torch.zeros(len(batch.num_tokens_N), dtype=torch.float64), batch.num_tokens_N)


def _taught(
    found: Credit | RunCredit, batch: ActionBatch, kl_A: torch.Tensor, config: DistillationConfig
) -> Credit:
    """Return the advantages with the teacher's added: after whitening, so that its unit stays nats."""
    added = teacher_advantages(kl_A, batch.num_tokens_N, coefficient=config.coefficient, gamma=config.gamma)
    return Credit(found.advantages_A + added, found.returns_A)


def _samples(attempts: Sequence[AttemptFacts], found: Credit | RunCredit) -> list[SampleRef]:
    """Return the samples with their runs of equal advantages, in the order of positions."""
    values_R, lengths_R = (column.numpy() for column in found.runs)
    ends = np.cumsum([t.num_action_tokens for t in attempts])
    run_ends = np.cumsum(lengths_R)
    samples, start = [], 0
    for index, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        stop = int(np.searchsorted(run_ends, end, side="right"))
        values, lengths = values_R[start:stop].astype(np.float32), lengths_R[start:stop]
        assert lengths.sum() == attempt.num_action_tokens, (
            "a run of advantages crosses the end of a trajectory"
        )
        start = stop
        if not _is_in_order(attempt):
            laid = np.empty(attempt.num_action_tokens, np.float32)
            laid[sampling_order(attempt)] = np.repeat(values, lengths)
            values, lengths = laid, np.ones(len(laid), np.int64)
        samples.append(SampleRef(index, attempt, values, lengths))
    return samples


@dataclass(frozen=True, slots=True, eq=False)
class ConversationParts:
    """The conversations of a batch's attempts, each as an attempt of its own.

    whole: the attempts. owners: of each conversation, the index of its attempt.
    """

    whole: Sequence[AttemptFacts]
    conversations: Sequence[ConversationFacts]
    owners: Sequence[int]

    @classmethod
    def of(cls, whole: Sequence[AttemptFacts]) -> ConversationParts:
        """Divide attempts. An attempt without an action token keeps one part, which has none."""
        found = [
            (index, part)
            for index, attempt in enumerate(whole)
            for part in attempt.parts() or [attempt.as_part()]
        ]
        return cls(whole, [part for _, part in found], [index for index, _ in found])

    @property
    def attempts(self) -> list[AttemptFacts]:
        """The conversations; those of one group and one name have the same group id."""
        labels: dict[tuple[int, str], int] = {}
        return [
            part.attempt.replace(group_id=labels.setdefault((part.attempt.group_id, part.name), len(labels)))
            for part in self.conversations
        ]

    def assessed(self, assessment: Assessment) -> Assessment:
        """Return the model outputs of each conversation."""
        return replace(
            assessment,
            values=self._divided(assessment.values),
            kl=self._divided(assessment.kl),
            teacher_kl=self._divided(assessment.teacher_kl),
        )

    def _divided(self, columns: Sequence[NDArray[np.float32]] | None) -> list[NDArray[np.float32]] | None:
        if columns is None:
            return None
        return [
            columns[owner][part.is_own_A] for owner, part in zip(self.owners, self.conversations, strict=True)
        ]

    def joined(self, samples: Sequence[SampleRef]) -> list[SampleRef]:
        """Return one sample for each attempt, with the columns of its conversations on their tokens."""
        own: list[list[tuple[ConversationFacts, SampleRef]]] = [[] for _ in self.whole]
        for owner, part, sample in zip(self.owners, self.conversations, samples, strict=True):
            own[owner].append((part, sample))
        return [_joined(index, self.whole[index], parts) for index, parts in enumerate(own)]


def _joined(
    index: int, attempt: AttemptFacts, parts: Sequence[tuple[ConversationFacts, SampleRef]]
) -> SampleRef:
    if not attempt.conversation_names:
        ((_, sample),) = parts
        return sample.replace(index=index, attempt=attempt)

    def laid(column: Callable[[SampleRef], NDArray[np.float32]]) -> NDArray[np.float32]:
        values = np.zeros(attempt.num_action_tokens, np.float32)
        for part, sample in parts:
            values[part.is_own_A] = column(sample)
        return values

    _, first = parts[0]
    has_values, has_returns = first.values is not None, first.returns is not None
    return SampleRef(
        index,
        attempt,
        laid(lambda sample: np.repeat(sample.advantages, sample.run_lengths)),
        np.ones(attempt.num_action_tokens, np.int64),
        values=laid(lambda sample: _needed(sample.values)) if has_values else None,
        returns=laid(lambda sample: _needed(sample.returns)) if has_returns else None,
    )


def _needed(column: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert column is not None, "all samples of a batch have the same columns"
    return column


def _of_last_segments(sample: SampleRef) -> SampleRef:
    """Return the sample with the advantage 0 on all tokens before the last segment of their conversation."""
    segments = sample.attempt.segments
    owners = sample.attempt.segment_conversations or (0,) * len(segments)
    lasts = {owner: place for place, owner in enumerate(owners)}
    counts = [num_actions for _, num_actions in segments]
    is_kept = np.repeat([place == lasts[owner] for place, owner in enumerate(owners)], counts)
    if is_kept.all():
        return sample
    laid = np.where(is_kept, np.repeat(sample.advantages, sample.run_lengths), np.float32(0))
    return sample.replace(advantages=laid, run_lengths=np.ones(len(laid), np.int64))


def _with_returns(
    samples: Sequence[SampleRef],
    found: Credit | RunCredit,
    assessment: Assessment,
    algorithm: AlgorithmConfig,
) -> list[SampleRef]:
    if assessment.values is None:
        return list(samples)
    if found.returns_A is None:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} returns no value targets for the critic; use "
            "critic.enabled=false"
        )
    returns = lay_in_positions([s.attempt for s in samples], found.returns_A.numpy())
    return [
        s.replace(values=values, returns=own)
        for s, values, own in zip(samples, assessment.values, returns, strict=True)
    ]


def greedy_rewards(groups: Sequence[Group[A]]) -> torch.Tensor | None:
    """Return each trajectory's greedy baseline, f64[N]: the reward of the greedy attempt of its group.

    None unless every group has a greedy attempt.
    """
    rewards = [group.greedy.reward for group in groups if group.greedy is not None]
    if not groups or len(rewards) < len(groups):
        return None
    return torch.from_numpy(np.repeat(np.array(rewards), [len(group.trajectories) for group in groups]))


# ------------------------------------------------------------------------------------- order of action tokens


def sampling_order(attempt: AttemptFacts) -> NDArray[np.int64]:
    """Return i64[A]: for each action token in sampling order, its index in the order of positions.

    They are sorted by turn: segments may grow alternately, so positions are not ordered by time.
    """
    numbers, lengths = np.array(attempt.turns, np.int64).reshape(-1, 2).T
    return np.argsort(np.repeat(numbers, lengths), kind="stable")


def lay_in_positions(
    attempts: Sequence[AttemptFacts], values_A: NDArray[np.float64]
) -> list[NDArray[np.float32]]:
    """Cut values in sampling order into those of each trajectory: f32[A], in the order of positions."""
    laid, start = [], 0
    for attempt in attempts:
        own = np.empty(attempt.num_action_tokens, np.float32)
        own[sampling_order(attempt)] = values_A[start : start + len(own)]
        start += len(own)
        laid.append(own)
    assert start == len(values_A), "the values do not belong to these trajectories"
    return laid


def _is_in_order(attempt: AttemptFacts) -> bool:
    """Return whether positions are in the order of sampling, as they are unless segments grew alternately."""
    return all(first < second for (first, _), (second, _) in itertools.pairwise(attempt.turns))


def _turns_in_order(attempt: AttemptFacts) -> Sequence[tuple[int, int]]:
    if _is_in_order(attempt):
        return attempt.turns
    lengths: Counter[int] = Counter()
    for number, length in attempt.turns:
        lengths[number] += length
    return sorted(lengths.items())


def _reward_places(attempt: AttemptFacts) -> Sequence[int]:
    """Return the index of each reward's token in sampling order."""
    if _is_in_order(attempt):
        return attempt.reward_places
    in_time = np.argsort(sampling_order(attempt))
    return [int(in_time[place]) for place in attempt.reward_places]


def _first(pair: tuple[int, RewardEvent]) -> int:
    return pair[0]


def _anchors(attempts: Sequence[AttemptFacts]) -> torch.Tensor | None:
    """Return the anchors of turns with action tokens, i64[K], in order; None if a trajectory lacks one."""
    found: list[int] = []
    for attempt in attempts:
        if attempt.anchors is None:
            return None
        found += attempt.anchors
    return torch.tensor(found, dtype=torch.int64)


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
