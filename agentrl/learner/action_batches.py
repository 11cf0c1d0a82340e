"""From the facts of attempts to the compact batch that advantage estimators read.

The controller makes one of a whole batch, for estimators that compare attempts; a rank makes one of each
attempt that it learns from, for those that look at each trajectory alone.

With `conversation_credit=own`, each conversation of an attempt is credited as an attempt of its own, and
compared with those of the same name in the group.

Axes: A action tokens, K turns, N trajectories.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, CompactTurns, TokenRewards
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.data.attempt_facts import AttemptFacts, ConversationCredit, ConversationFacts
from agentrl.types import Outcome


def action_batch(attempts: Sequence[AttemptFacts], *, group_size: int | None) -> ActionBatch:
    """Return the batch without context tokens; segments of a trajectory are joined in sampling order.

    Raises:
        ValueError: a group is incomplete, or a reward is not finite.
    """
    num_tokens = np.array([t.num_action_tokens for t in attempts], np.int64)
    starts = np.cumsum(num_tokens) - num_tokens
    turns = [turns_in_order(t) for t in attempts]
    places, values = [], []
    for attempt, start in zip(attempts, starts.tolist(), strict=True):
        paid = zip(_reward_places(attempt), attempt.rewards, strict=True)
        for place, event in sorted(paid, key=lambda pair: pair[0]):
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


def turns_in_order(attempt: AttemptFacts) -> Sequence[tuple[int, int]]:
    """Return (turn, action tokens) of each turn, in the order of sampling."""
    if _is_in_order(attempt):
        return attempt.turns
    lengths: Counter[int] = Counter()
    for number, length in attempt.turns:
        lengths[number] += length
    return sorted(lengths.items())


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


def _is_in_order(attempt: AttemptFacts) -> bool:
    """Return whether positions are in the order of sampling, as they are unless segments grew alternately."""
    return all(first < second for (first, _), (second, _) in itertools.pairwise(attempt.turns))


def _reward_places(attempt: AttemptFacts) -> Sequence[int]:
    """Return the index of each reward's token in sampling order."""
    if _is_in_order(attempt):
        return attempt.reward_places
    ends = np.cumsum([length for _, length in attempt.turns])
    shifts, end = {}, 0
    for run in runs_in_order(attempt, range(len(attempt.turns))):
        end += attempt.turns[run][1]
        shifts[run] = end - int(ends[run])
    return [
        place + shifts[int(np.searchsorted(ends, place, side="right"))] for place in attempt.reward_places
    ]


def _anchors(attempts: Sequence[AttemptFacts]) -> torch.Tensor | None:
    """Return the anchors of turns with action tokens, i64[K], in order; None if a trajectory lacks one."""
    found: list[int] = []
    for attempt in attempts:
        if attempt.anchors is None:
            return None
        found += attempt.anchors
    return torch.tensor(found, dtype=torch.int64)


# ----------------------------------------------------------------------------------- order and conversations


def runs_in_order(attempt: AttemptFacts, runs: Sequence[int]) -> list[int]:
    """Return those runs of `attempt.turns` in the order of sampling.

    They are sorted by turn: segments may grow alternately, so positions are not ordered by time.
    """
    return sorted(runs, key=lambda run: attempt.turns[run][0])


def sampling_order(attempt: AttemptFacts, runs: Sequence[int] | None = None) -> NDArray[np.int64]:
    """Return i64[A]: for each action token in sampling order, its index in the order of positions.

    runs: indices of `attempt.turns`, to which the tokens belong; None: all.
    """
    ends = np.cumsum([length for _, length in attempt.turns])
    chosen = runs_in_order(attempt, range(len(attempt.turns)) if runs is None else runs)
    spans = [np.arange(ends[run] - attempt.turns[run][1], ends[run]) for run in chosen]
    return np.concatenate([np.empty(0, np.int64), *spans])


def parts_of(attempt: AttemptFacts, by: ConversationCredit) -> list[ConversationFacts]:
    """Return what of an attempt is credited on its own: the attempt, or each of its conversations.

    An attempt without an action token has one part, which has none.
    """
    return [attempt.as_part()] if by == "attempt" else attempt.parts() or [attempt.as_part()]


def as_attempts(parts: Sequence[ConversationFacts]) -> list[AttemptFacts]:
    """Return conversations as attempts; those of one group and one name have the same group id."""
    labels: dict[tuple[int, str], int] = {}
    return [
        part.attempt.replace(group_id=labels.setdefault((part.attempt.group_id, part.name), len(labels)))
        for part in parts
    ]
