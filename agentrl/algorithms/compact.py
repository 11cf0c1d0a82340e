"""The compact batch: sampled tokens and their rewards, without any context token.

Prompts, tool output and user turns are absent. An estimator therefore cannot discount over them, reset at
them or lose a reward to them. The neighbors of a token are always the previous and the next sampled token.

Tensors are on the CPU: the controller computes advantages once per batch.

Shapes: A action tokens of the batch, K turns with at least one of them, N trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ActionBatch:
    """The action tokens of a whole global batch, trajectory after trajectory, each in sampling order.

    Only lengths and rewards are stored. Columns with a value per token are made when an estimator reads them,
    so that an estimator with one advantage per trajectory or turn costs nothing per token.

    rewards: the rewards and their tokens.
    turns: the turns of all trajectories.
    num_tokens_N: i64[N], action tokens of each trajectory, may be 0; they sum to A.
    group_N: i64[N], any labels, equal within a group.
    is_truncated_N: bool[N], True if a token limit cut the attempt off.
    group_size: trajectories that every group must have; None only where groups differ in size on purpose.
    values_A: f[A], the critic's estimate before the token.
    values_after_N: f[N], the critic's estimate after the last token; read only where truncated.
    greedy_rewards_N: f[N], reward of a greedy attempt at the same task by the same version.
    anchors_K: i64[K], hash of the environment's state before each turn.

    Raises:
        ValueError: shapes disagree, a reward or value is not finite, or a group is incomplete.
    """

    rewards: TokenRewards
    turns: CompactTurns
    num_tokens_N: Tensor
    group_N: Tensor
    is_truncated_N: Tensor
    group_size: int | None
    values_A: Tensor | None = None
    values_after_N: Tensor | None = None
    greedy_rewards_N: Tensor | None = None
    anchors_K: Tensor | None = None

    def __post_init__(self) -> None:
        _check_lengths(self.num_tokens, values_A=self.values_A)
        _check_lengths(
            len(self.num_tokens_N),
            group_N=self.group_N,
            is_truncated_N=self.is_truncated_N,
            values_after_N=self.values_after_N,
            greedy_rewards_N=self.greedy_rewards_N,
        )
        _check_finite("rewards_A", self.rewards.values_E)
        for name in ("values_A", "values_after_N", "greedy_rewards_N"):
            _check_finite(name, getattr(self, name))
        _check_lengths(len(self.turns.lengths_K), anchors_K=self.anchors_K)
        if self.group_size is not None:
            _check_complete(self.group_N, self.group_size)

    @classmethod
    def of_tokens(
        cls,
        rewards_A: Tensor,
        turn_A: Tensor,
        num_tokens_N: Tensor,
        group_N: Tensor,
        is_truncated_N: Tensor,
        group_size: int | None,
        **columns: Tensor | None,
    ) -> ActionBatch:
        """Return the batch of these columns with a value per token.

        rewards_A: f[A], reward received on the token.
        turn_A: i64[A], index of the token's assistant turn; never decreases within a trajectory.

        Raises:
            ValueError: as for the class, or a trajectory's turns are not in order.
        """
        _check_lengths(int(num_tokens_N.sum()), rewards_A=rewards_A, turn_A=turn_A)
        sequence_A = repeat(torch.arange(len(num_tokens_N)), num_tokens_N)
        turns = CompactTurns.of(sequence_A, turn_A, num_sequences=len(num_tokens_N))
        rewards = TokenRewards.of_tokens(rewards_A)
        return cls(rewards, turns, num_tokens_N, group_N, is_truncated_N, group_size, **columns)

    @property
    def num_tokens(self) -> int:
        """A, the number of action tokens."""
        return int(self.num_tokens_N.sum())

    @cached_property
    def rewards_A(self) -> Tensor:
        """f[A], reward received on the token."""
        dense = self.rewards.values_E.new_zeros(self.num_tokens)
        return dense.index_add_(0, self.rewards.tokens_E, self.rewards.values_E)

    @cached_property
    def turn_A(self) -> Tensor:
        """i64[A], index of the token's assistant turn; never decreases within a trajectory."""
        return repeat(self.turns.number_K, self.turns.lengths_K)

    @cached_property
    def sequence_A(self) -> Tensor:
        """i64[A], index of each token's trajectory in the batch."""
        return self.over_tokens(torch.arange(len(self.num_tokens_N)))

    @cached_property
    def outcomes_N(self) -> Tensor:
        """f[N], R_i: the total reward of each trajectory."""
        return self.rewards.sums(self.num_tokens_N)

    @cached_property
    def turn_rewards_K(self) -> Tensor:
        """f[K], the total reward of each turn."""
        return self.rewards.sums(self.turns.lengths_K)

    def over_tokens(self, values_N: Tensor) -> Tensor:
        """Return [A]: each trajectory's value, repeated on all of its action tokens."""
        return repeat(values_N, self.num_tokens_N)

    def with_rewards(self, rewards_A: Tensor) -> ActionBatch:
        """Return the batch with other rewards, f[A]."""
        _check_lengths(self.num_tokens, rewards_A=rewards_A)
        return replace(self, rewards=TokenRewards.of_tokens(rewards_A))


@dataclass(frozen=True, slots=True, eq=False)
class TokenRewards:
    """The E rewards of a batch: values_E, f[E], on the tokens tokens_E, i64[E], ascending.

    A token may have several. All other tokens have reward 0.
    """

    tokens_E: Tensor
    values_E: Tensor

    @classmethod
    def of_tokens(cls, rewards_A: Tensor) -> TokenRewards:
        """Return the rewards of f[A], one reward per token."""
        tokens = rewards_A.nonzero().squeeze(1)
        return cls(tokens, rewards_A[tokens])

    def sums(self, lengths: Tensor) -> Tensor:
        """Return the sum of the rewards in each run of `lengths` neighboring tokens; f64 or the own dtype."""
        ends = np.cumsum(lengths.numpy())
        owners = np.searchsorted(ends, self.tokens_E.numpy(), side="right")
        values = self.values_E.numpy()
        return torch.from_numpy(np.bincount(owners, values, minlength=len(ends)).astype(values.dtype))


@dataclass(frozen=True, eq=False)
class CompactTurns:
    """The K turns of a batch, in the order of their tokens.

    lengths_K: i64[K], action tokens. number_K: i64[K], index of the turn in its trajectory.
    sequence_K: i64[K], index of its trajectory. counts_N: i64[N], turns of each trajectory.
    """

    lengths_K: Tensor
    number_K: Tensor
    sequence_K: Tensor
    counts_N: Tensor

    @classmethod
    def of(cls, sequence_A: Tensor, turn_A: Tensor, *, num_sequences: int) -> CompactTurns:
        """Start a turn wherever the trajectory or the turn index changes.

        Raises:
            ValueError: a trajectory's turns are not in order.
        """
        is_other_sequence = sequence_A.diff() != 0
        steps = turn_A.diff()
        if bool(((steps < 0) & ~is_other_sequence).any()):
            raise ValueError(
                "turn_A falls within a trajectory: its tokens are not in the order in which they were sampled"
            )
        is_start = torch.cat(
            [torch.ones(len(turn_A[:1]), dtype=torch.bool), is_other_sequence | (steps != 0)]
        )
        starts = torch.nonzero(is_start).flatten()
        lengths = torch.cat([starts, torch.tensor([len(turn_A)])]).diff()
        sequences = sequence_A[starts]
        return cls(lengths, turn_A[starts], sequences, torch.bincount(sequences, minlength=num_sequences))


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """Options of the estimators. The docstring of an estimator names those that it reads.

    gamma, lam: in [0, 1], discount and GAE's lambda, per action token or per turn.
    bootstrap_truncated: bootstrap a truncated attempt from values_after_N; otherwise its value after the last
    token is 0.
    singleton: advantage of a group of one, which has no other member to compare with: 0, or its raw reward.
    passk_k: k of pass@k; a subset of k attempts succeeds if at least one of them is solved.
    solved_reward: smallest reward of a solved attempt.
    step_weight: weight of GiGPO's step advantage relative to the episode advantage.
    """

    gamma: float
    lam: float
    bootstrap_truncated: bool
    singleton: Literal["zero", "raw"]
    passk_k: int
    solved_reward: float
    step_weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The result of an estimator with an advantage for each token.

    advantages_A: f[A]. returns_A: f[A], regression targets of the critic; None without a critic.
    """

    advantages_A: Tensor
    returns_A: Tensor | None = None

    @property
    def runs(self) -> tuple[Tensor, Tensor]:
        """The advantages as runs of equal neighbors: values f[R], lengths i64[R]."""
        return self.advantages_A, torch.ones(len(self.advantages_A), dtype=torch.int64)

    def with_advantages(self, values_R: Tensor) -> Credit:
        """Return the same with other values of its runs."""
        return replace(self, advantages_A=values_R)


@dataclass(frozen=True, slots=True, eq=False)
class RunCredit:
    """The result of an estimator whose advantages are equal over runs of tokens: trajectories, or turns.

    values_R: f[R], of each run. lengths_R: i64[R], tokens of each run, may be 0; they sum to A, and no run
    crosses the end of a trajectory.
    """

    values_R: Tensor
    lengths_R: Tensor

    @property
    def returns_A(self) -> Tensor | None:
        return None

    @property
    def advantages_A(self) -> Tensor:
        """f[A], the advantage of each token."""
        return repeat(self.values_R, self.lengths_R)

    @property
    def runs(self) -> tuple[Tensor, Tensor]:
        return self.values_R, self.lengths_R

    def with_advantages(self, values_R: Tensor) -> RunCredit:
        return replace(self, values_R=values_R)


def needed(value: Tensor | None, estimator: str, what: str) -> Tensor:
    """Return a column that an estimator needs beyond rewards.

    Raises:
        ValueError: the batch lacks it: `value` is None.
    """
    if value is None:
        raise ValueError(f"{estimator} needs {what}, and the batch has none")
    return value


def repeat(values: Tensor, counts: Tensor) -> Tensor:
    """Repeat each value `counts` times, in order."""
    # Five times as fast as torch.repeat_interleave.
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each run of `lengths` neighbors; an empty run sums to 0."""
    counts, numbers = lengths.numpy(), values.numpy()
    starts = np.cumsum(counts) - counts
    # reduceat is four times as fast as torch.segment_reduce, but wrong for empty runs.
    if len(counts) and counts.all():
        return torch.from_numpy(np.add.reduceat(numbers, starts))
    sums, is_any = np.zeros(len(counts), numbers.dtype), counts > 0
    if is_any.any():
        sums[is_any] = np.add.reduceat(numbers, starts[is_any])
    return torch.from_numpy(sums)


def _check_lengths(expected: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (expected,):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but the batch needs [{expected}]")


def _check_finite(name: str, values: Tensor | None) -> None:
    # A finite sum implies finite values. An infinite sum may be an overflow, so only then test each value.
    # Summing is 30 times as fast as testing each.
    if values is not None and not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        raise ValueError(
            f"{name} has a value of {values[~torch.isfinite(values)][0].item()}; all must be finite"
        )


def _check_complete(group_N: Tensor, group_size: int) -> None:
    labels, counts = torch.unique(group_N, return_counts=True)
    wrong = torch.nonzero(counts != group_size).flatten()
    if len(wrong):
        label, count = labels[wrong[0]].item(), counts[wrong[0]].item()
        raise ValueError(
            f"group {label} has {count} of {group_size} trajectories: an incomplete group is never compared"
        )
