"""Credit per token: what the rank that learns from an attempt computes about the attempt's action tokens.

The controller compares attempts by their rewards, and sends advantages over runs of tokens. What needs a
number per token is left to the ranks, sample by sample: estimators that look at each trajectory alone
(`gae`, `gae_turn`, and `reinforce_plus_plus` with a discount or KL in the reward), the values and returns of
a critic, and a teacher's advantages. The columns that they read come by reference from the ranks that
assessed the batch. Only moments travel to the controller, one set per sample, and one mean and deviation
back: whitening is over the whole batch, and the same however it is cut.

Axes: A action tokens of one attempt, in the order of positions; S the same tokens, part after part (see
`parts_of`), each in sampling order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.advantages.reinforce import Moments, Whitening
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit
from agentrl.algorithms.distillation import teacher_advantages
from agentrl.algorithms.registry import find_estimator
from agentrl.algorithms.reward_kl import penalize
from agentrl.data.attempt_facts import AttemptFacts, ConversationCredit, ConversationFacts
from agentrl.data.token_columns import TokenColumn
from agentrl.fast_pickle import pickled_fast
from agentrl.learner.action_batches import action_batch, parts_of, sampling_order


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How credit per token follows from facts and columns; the same for all samples of a batch.

    estimator: the name of one that is `separate`; None: the advantages are the runs of the controller.
    options: of the estimator.
    kl_coefficient: reward subtracted per nat of KL.
    num_whitenings: how often the estimator's advantages are whitened over the batch.
    whitening: all of these as one map; None until the batch is measured.
    teacher: coefficient and gamma of `teacher_advantages`.
    conversation_credit, segment_credit: of `algorithm`.
    """

    estimator: str | None
    options: AdvantageOptions
    kl_coefficient: float
    num_whitenings: int
    whitening: Whitening | None
    teacher: tuple[float, float]
    conversation_credit: ConversationCredit
    is_of_last_segments: bool


@pickled_fast
@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """What models found about the action tokens of one attempt, f32[A] each. None: nobody asked them.

    values: the critic's estimate before each token; with one number more, behind the attempt's end (see
    `end_place`), if it is bootstrapped from there.
    kl: estimate of KL(policy || reference) in nats. teacher_kl: log policy - log teacher, in nats.
    """

    values: TokenColumn | None = None
    kl: TokenColumn | None = None
    teacher_kl: TokenColumn | None = None


NO_COLUMNS = TokenColumns()


@dataclass(frozen=True, slots=True, eq=False)
class LoadedColumns:
    """The columns of an attempt in the order of crediting, f64[S]. after: the value behind its end, or 0."""

    values: NDArray[np.float64] | None
    after: float
    kl: NDArray[np.float64] | None
    teacher_kl: NDArray[np.float64] | None

    @classmethod
    def of(cls, columns: TokenColumns, attempt: AttemptFacts, order_S: NDArray[np.int64]) -> LoadedColumns:
        """Read the columns.

        Raises:
            DiskError: one of them is missing.
        """

        def read(column: TokenColumn | None) -> NDArray[np.float64] | None:
            return None if column is None else column.load()[order_S].astype(np.float64)

        values, after = None, 0.0
        if columns.values is not None:
            values_A, after = split_end(columns.values.load(), attempt)
            values = values_A[order_S].astype(np.float64)
        return cls(values, after, read(columns.kl), read(columns.teacher_kl))


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """The result of credit, f32[A] each. values, returns: None without a critic."""

    advantages: NDArray[np.float32]
    values: NDArray[np.float32] | None
    returns: NDArray[np.float32] | None


def order_of(parts: Sequence[ConversationFacts], attempt: AttemptFacts) -> NDArray[np.int64]:
    """Return i64[S]: for each action token in the order of crediting, its index in the order of positions."""
    return np.concatenate([sampling_order(attempt, part.runs) for part in parts])


def assessed(batch: ActionBatch, loaded: Sequence[LoadedColumns], *, kl_coefficient: float) -> ActionBatch:
    """Return the batch with the values added and the KL penalty subtracted from the rewards.

    loaded: of each attempt of the batch, in order.
    """
    values = [one.values for one in loaded if one.values is not None]
    if values:
        batch = replace(batch, values_A=torch.from_numpy(np.concatenate(values)))
        if len(loaded) == len(batch.num_tokens_N):  # no attempt is divided
            batch = replace(batch, values_after_N=torch.tensor([o.after for o in loaded]).double())
    kl = [one.kl for one in loaded if one.kl is not None]
    if kl:
        batch = penalize(batch, torch.from_numpy(np.concatenate(kl)), coefficient=kl_coefficient)
    return batch


def token_credit(
    attempt: AttemptFacts,
    columns: TokenColumns,
    rules: TokenRules,
    runs: tuple[NDArray[np.float64], NDArray[np.int64]],
    returns_S: NDArray[np.float64] | None,
) -> TokenCredit:
    """Return the credit of one attempt.

    Args:
        runs: advantages by runs of tokens in the order of crediting, from the controller: values f64[R] and
            lengths i64[R]. Not read if the rules name an estimator.
        returns_S: returns from the controller, f64[S]; None: those of the estimator, if any.

    Raises:
        DiskError: a column is missing.
    """
    parts = parts_of(attempt, rules.conversation_credit)
    order_S = order_of(parts, attempt)
    loaded = LoadedColumns.of(columns, attempt, order_S)
    if rules.estimator is None:
        advantages_S = np.repeat(*runs)
    else:
        found = _estimated(parts, loaded, rules)
        advantages, returns = found.advantages_A, found.returns_A
        if rules.num_whitenings:
            assert rules.whitening is not None, "a sample is loaded before the batch was measured"
            advantages = rules.whitening.of(advantages)
        advantages_S, returns_S = advantages.numpy(), None if returns is None else returns.numpy()
    if loaded.teacher_kl is not None:
        coefficient, gamma = rules.teacher
        added = teacher_advantages(
            torch.from_numpy(loaded.teacher_kl),
            torch.tensor([part.attempt.num_action_tokens for part in parts]),
            coefficient=coefficient,
            gamma=gamma,
        )
        advantages_S = advantages_S + added.numpy()
    laid = _in_positions(advantages_S, order_S)
    if rules.is_of_last_segments:
        laid[~is_in_last_segment(attempt)] = 0.0
    return TokenCredit(
        laid,
        None if loaded.values is None else _in_positions(loaded.values, order_S),
        None if returns_S is None else _in_positions(returns_S, order_S),
    )


def moments_of(attempt: AttemptFacts, columns: TokenColumns, rules: TokenRules) -> Moments:
    """Return the moments of the estimator's advantages of one attempt, before they are whitened.

    Raises:
        DiskError: a column is missing.
    """
    parts = parts_of(attempt, rules.conversation_credit)
    loaded = LoadedColumns.of(columns, attempt, order_of(parts, attempt))
    return Moments.of(_estimated(parts, loaded, rules).advantages_A)


def _estimated(parts: Sequence[ConversationFacts], loaded: LoadedColumns, rules: TokenRules) -> Credit:
    assert rules.estimator is not None
    batch = action_batch([part.attempt for part in parts], group_size=None)
    batch = assessed(batch, [loaded], kl_coefficient=rules.kl_coefficient)
    estimate = find_estimator(rules.estimator).separate
    assert callable(estimate)
    credit = estimate(batch, rules.options)
    assert isinstance(credit, Credit)
    return credit


def is_in_last_segment(attempt: AttemptFacts) -> NDArray[np.bool_]:
    """Return bool[A]: whether each action token is in the last segment of its conversation."""
    owners = attempt.segment_conversations or (0,) * len(attempt.segments)
    lasts = {owner: place for place, owner in enumerate(owners)}
    counts = [num_actions for _, num_actions in attempt.segments]
    return np.repeat([place == lasts[owner] for place, owner in enumerate(owners)], counts)


def end_place(attempt: AttemptFacts) -> tuple[int, int]:
    """Return the segment of the token sampled last, and the action tokens up to that segment's end."""
    last_turn = max(turn for turn, _ in attempt.turns)
    ends = np.cumsum([length for _, length in attempt.turns])
    last = max(end for (turn, _), end in zip(attempt.turns, ends, strict=True) if turn == last_turn)
    segment_ends = np.cumsum([number for _, number in attempt.segments])
    segment = int(np.searchsorted(segment_ends, last))
    return segment, int(segment_ends[segment])


def split_end(values: NDArray[np.float32], attempt: AttemptFacts) -> tuple[NDArray[np.float32], float]:
    """Return the values before action tokens, f32[A], and the one behind the attempt's end, 0 without."""
    if len(values) == attempt.num_action_tokens:
        return values, 0.0
    _, place = end_place(attempt)
    return np.delete(values, place), float(values[place])


def _in_positions(numbers_S: NDArray[np.float64], order_S: NDArray[np.int64]) -> NDArray[np.float32]:
    laid = np.empty(len(order_S), np.float32)
    laid[order_S] = numbers_S
    return laid
