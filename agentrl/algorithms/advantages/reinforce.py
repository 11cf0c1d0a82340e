"""Estimators of the REINFORCE family, and the whitening shared with PPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.advantages.groups import Groups
from agentrl.algorithms.advantages.scan import sums_to_go
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit, RunCredit, needed

VARIANCE_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Whitening:
    """The map x -> (x - mean) / std. An infinite std makes everything 0."""

    mean: float
    std: float

    def of(self, values: Tensor) -> Tensor:
        """Return the values whitened, f[.]."""
        return (values - self.mean) / self.std

    def then(self, other: Whitening) -> Whitening:
        """Return both maps as one."""
        if math.isinf(self.std):
            return self
        return Whitening(self.mean + self.std * other.mean, self.std * other.std)


@dataclass(frozen=True, slots=True)
class Moments:
    """How numbers are distributed: their count, mean, sum of squared deviations from it, and extremes."""

    count: int
    mean: float
    squares: float
    low: float
    high: float

    @classmethod
    def of(cls, values_R: Tensor, lengths_R: Tensor | None = None) -> Moments:
        """Return the moments of f[R], one per token or, with `lengths_R` (i64[R]), one per run of tokens."""
        if lengths_R is None:
            lengths_R = torch.ones(len(values_R), dtype=torch.int64)
        present_R = values_R[lengths_R > 0]
        if not len(present_R):
            return NO_MOMENTS
        count = int(lengths_R.sum())
        mean = (lengths_R * values_R).sum() / count
        squares = (lengths_R * (values_R - mean) ** 2).sum()
        return cls(count, float(mean), float(squares), float(present_R.min()), float(present_R.max()))

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """Return the moments of all numbers of `parts`.

        Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm".
        """
        some = [part for part in parts if part.count]
        if not some:
            return NO_MOMENTS
        count = sum(part.count for part in some)
        mean = math.fsum(part.count * part.mean for part in some) / count
        squares = math.fsum(part.squares + part.count * (part.mean - mean) ** 2 for part in some)
        return cls(count, mean, squares, min(part.low for part in some), max(part.high for part in some))

    @property
    def whitening(self) -> Whitening:
        """(x - mean) / sqrt(var + 1e-8), var with Bessel's correction; equal numbers become exactly 0."""
        if not self.count or self.low == self.high:
            return Whitening(self.mean, math.inf)
        return Whitening(self.mean, math.sqrt(self.squares / (self.count - 1) + VARIANCE_EPS))

    def whitened(self, by: Whitening) -> Moments:
        """Return the moments of the numbers after `by`."""

        def moved(number: float) -> float:
            return (number - by.mean) / by.std

        return Moments(
            self.count, moved(self.mean), self.squares / by.std**2, moved(self.low), moved(self.high)
        )


NO_MOMENTS = Moments(0, 0.0, 0.0, 0.0, 0.0)


def whiten(values_R: Tensor, lengths_R: Tensor | None = None) -> Tensor:
    """Return f[R] whitened by its own moments (see `Moments.whitening`).

    The statistics must be over all action tokens of the global batch. Per rank or microbatch, each would use
    a different estimator.

    Args:
        values_R: f[R], one per token or, with `lengths_R` (i64[R]), one per run of tokens.
    """
    return Moments.of(values_R, lengths_R).whitening.of(values_R)


def reinforce_plus_plus(batch: ActionBatch, options: AdvantageOptions) -> Credit | RunCredit:
    """A_t = whitened G_t, with G_t = r_t + gamma G_{t+} over action tokens.

    It needs neither groups nor a critic. G does not reset at tool calls.

    Reads: gamma.
    Source: Hu 2025, arXiv:2501.03262.
    """
    if options.gamma < 1:
        found = returns_to_go(batch, options)
        return found.with_advantages(whiten(found.advantages_A))
    # Without discount, G changes only behind a reward.
    lengths_R, counts_N = _runs_between_rewards(batch)
    returns_R = sums_to_go(batch.rewards.sums(lengths_R), counts_N, 1.0)
    return RunCredit(whiten(returns_R, lengths_R), lengths_R)


def returns_to_go(batch: ActionBatch, options: AdvantageOptions) -> Credit:
    """A_t = G_t = r_t + gamma G_{t+}: `reinforce_plus_plus` before it is whitened.

    Reads: gamma.
    """
    return Credit(sums_to_go(batch.rewards_A, batch.num_tokens_N, options.gamma))


def _runs_between_rewards(batch: ActionBatch) -> tuple[Tensor, Tensor]:
    """Cut each trajectory behind its rewards. Return the runs' lengths, i64[R], and numbers, i64[N]."""
    ends_N = batch.num_tokens_N.cumsum(0)
    cuts = torch.unique(torch.cat([batch.rewards.tokens_E + 1, ends_N]))
    counts_N = torch.bincount(torch.searchsorted(ends_N, cuts), minlength=len(ends_N))
    return torch.diff(cuts, prepend=cuts.new_zeros(1)), counts_N


def reinforce_plus_plus_baseline(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_t = whitened (R_i - mean_G), over the tokens of the batch; groups of equal outcomes are reset to 0.

    Long failures pull the mean over tokens below 0. Without the reset, whitening would push groups that carry
    no signal up or down.

    Reads: singleton.
    Source: Hu 2025, arXiv:2501.03262, the variant with a group baseline.
    """
    groups = Groups.of(batch)
    settled_N = groups.settle(groups.deviations, singleton=options.singleton)
    whitened_N = whiten(settled_N, batch.num_tokens_N)
    is_silent = (
        groups.is_constant if options.singleton == "zero" else groups.is_constant & (groups.sizes_N > 1)
    )
    return RunCredit(torch.where(torch.from_numpy(is_silent), 0.0, whitened_N), batch.num_tokens_N)


def remax(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_i = R_i - R(greedy), the outcome of a greedy attempt at the same task by the same version of the
    policy.

    Reads: greedy_rewards_N.
    Raises:
        ValueError: the batch has no greedy rewards.
    Source: Li et al. 2023, arXiv:2310.10505.
    """
    greedy = needed(
        batch.greedy_rewards_N, "remax", "greedy_rewards_N, the reward of a greedy attempt at each task"
    )
    return RunCredit(batch.outcomes_N - greedy, batch.num_tokens_N)
