"""The compact batch: what the policy sampled and what it earned, with every context token left out.

Because prompts, tool output and user turns do not exist here, no estimator can discount over them, reset at them or lose a reward
to them; whatever is said of neighbours means the previous and the next sampled token.

Tensors on the CPU: credit is given by the controller, once per batch.

Shapes: A action tokens of the batch, K turns with at least one of them, N trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ActionBatch:
    """The action tokens of a whole global batch, trajectory after trajectory, each in the order of sampling.

    rewards_A: f[A], reward received on the token. turn_A: i64[A], the assistant turn it belongs to, never falling in a trajectory.
    num_tokens_N: i64[N], action tokens of each trajectory, may be 0; they sum to A. group_N: i64[N], equal within a group; any labels.
    is_truncated_N: bool[N], the attempt was cut at a token limit rather than ended.
    group_size: trajectories that every group must have; None only where groups may differ in size on purpose.
    values_A, values_after_N: f[A], f[N], the critic's estimate before the token, and after the last one (read where truncated).
    greedy_rewards_N: f[N], reward of a greedy attempt at the same task by the same version.
    anchors_K: i64[K], hash of the environment's state before each turn.

    Raises:
        ValueError: shapes disagree, a reward is not finite, or a group is incomplete.
    """

    rewards_A: Tensor
    turn_A: Tensor
    num_tokens_N: Tensor
    group_N: Tensor
    is_truncated_N: Tensor
    group_size: int | None
    values_A: Tensor | None = None
    values_after_N: Tensor | None = None
    greedy_rewards_N: Tensor | None = None
    anchors_K: Tensor | None = None

    def __post_init__(self) -> None:
        num_tokens = int(self.num_tokens_N.sum())
        _check_lengths(num_tokens, rewards_A=self.rewards_A, turn_A=self.turn_A, values_A=self.values_A)
        _check_lengths(
            len(self.num_tokens_N),
            group_N=self.group_N,
            is_truncated_N=self.is_truncated_N,
            values_after_N=self.values_after_N,
            greedy_rewards_N=self.greedy_rewards_N,
        )
        for name in ("rewards_A", "values_A", "values_after_N", "greedy_rewards_N"):
            _check_finite(name, getattr(self, name))
        if self.anchors_K is not None:
            _check_lengths(len(self.turns.lengths_K), anchors_K=self.anchors_K)
        if self.group_size is not None:
            _check_complete(self.group_N, self.group_size)

    @cached_property
    def sequence_A(self) -> Tensor:
        """i64[A], place of the token's trajectory in the batch."""
        return self.over_tokens(torch.arange(len(self.num_tokens_N)))

    @cached_property
    def outcomes_N(self) -> Tensor:
        """f[N], R_i: everything the trajectory earned."""
        return segment_sums(self.rewards_A, self.num_tokens_N)

    @cached_property
    def turns(self) -> CompactTurns:
        """The turns of all trajectories."""
        return CompactTurns.of(self.sequence_A, self.turn_A, num_sequences=len(self.num_tokens_N))

    def over_tokens(self, values_N: Tensor) -> Tensor:
        """Return [A]: each trajectory's value on all of its action tokens."""
        return repeat(values_N, self.num_tokens_N)


@dataclass(frozen=True, eq=False)
class CompactTurns:
    """K turns, ordered as their tokens. lengths_K: i64[K], action tokens. number_K: i64[K], which turn of its trajectory it is.
    sequence_K: i64[K], place of its trajectory. counts_N: i64[N], turns of each trajectory."""

    lengths_K: Tensor
    number_K: Tensor
    sequence_K: Tensor
    counts_N: Tensor

    @classmethod
    def of(cls, sequence_A: Tensor, turn_A: Tensor, *, num_sequences: int) -> CompactTurns:
        """Cut where the trajectory or the turn changes.

        Raises:
            ValueError: a trajectory's turns are not in order.
        """
        is_other_sequence = sequence_A.diff() != 0
        steps = turn_A.diff()
        if bool(((steps < 0) & ~is_other_sequence).any()):
            raise ValueError("turn_A falls within a trajectory: its tokens are not in the order in which they were sampled")
        is_start = torch.cat([torch.ones(len(turn_A[:1]), dtype=torch.bool), is_other_sequence | (steps != 0)])
        starts = torch.nonzero(is_start).flatten()
        lengths = torch.cat([starts, torch.tensor([len(turn_A)])]).diff()
        sequences = sequence_A[starts]
        return cls(lengths, turn_A[starts], sequences, torch.bincount(sequences, minlength=num_sequences))


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """What estimators may be told; each reads what its docstring names.

    gamma, lam: in [0, 1], discount and GAE's lambda, per action token or per turn.
    bootstrap_truncated: a truncated attempt goes on in value, values_after_N; else it ends at 0.
    singleton: advantage of a group of one, which has nothing to be compared with: 0, or its raw reward.
    passk_k: attempts of which one must be solved. solved_reward: reward from which an attempt counts as solved.
    step_weight: weight of the step advantage beside that of the episode.
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
    """What an estimator says. advantages_A: f[A]. returns_A: f[A], what a critic should have said; None without one."""

    advantages_A: Tensor
    returns_A: Tensor | None = None


def repeat(values: Tensor, counts: Tensor) -> Tensor:
    """Return each value as many times as `counts` says, in order."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))  # five times as fast as torch.repeat_interleave


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each run of `lengths` neighbours; an empty run sums to 0."""
    counts, numbers = lengths.numpy(), values.numpy()
    starts = np.cumsum(counts) - counts
    if len(counts) and counts.all():  # reduceat is four times as fast as torch.segment_reduce, and knows no empty runs
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
    # One sum first: it is finite only if every value is, and 30 times as fast as looking at each.
    if values is not None and not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        raise ValueError(f"{name} has a value of {values[~torch.isfinite(values)][0].item()}; all must be finite")


def _check_complete(group_N: Tensor, group_size: int) -> None:
    labels, counts = torch.unique(group_N, return_counts=True)
    wrong = torch.nonzero(counts != group_size).flatten()
    if len(wrong):
        label, count = labels[wrong[0]].item(), counts[wrong[0]].item()
        raise ValueError(f"group {label} has {count} of {group_size} trajectories: an incomplete group is never compared")
