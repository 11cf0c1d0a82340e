"""Estimators that compare turns: credit per turn, in addition to or instead of credit per attempt.

Rewards count in the turn where they were received. The return of a turn is its reward plus the rewards of
later turns, discounted by gamma per turn.
"""

from __future__ import annotations

from torch import Tensor

from agentrl.algorithms.advantages.groups import STD_EPS, Groups, grpo
from agentrl.algorithms.advantages.scan import sums_to_go
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, RunCredit, needed


def turn_group(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_ik = (G_ik - mean) / (std + 1e-6) over the k-th turns of a group's attempts, with G_ik = r_ik + gamma
    G_i(k+1).

    A turn that no other attempt of the group reached is a group of one. Every token of a turn has the turn's
    advantage.

    Reads: gamma, singleton.
    Source: Zeng et al. 2025, arXiv:2505.11821, credit per turn; normalized as in `grpo`.
    """
    turns = batch.turns
    groups = Groups(_turn_returns(batch, options.gamma), [batch.group_N[turns.sequence_K], turns.number_K])
    advantages_K = groups.settle(groups.deviations / (groups.stds + STD_EPS), singleton=options.singleton)
    return RunCredit(advantages_K, turns.lengths_K)


def gigpo(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """A_ik = A_episode + step_weight * A_step: `grpo` plus a comparison of turns taken in the same state.

    A_episode is `grpo`. A_step = (G_ik - mean) / (std + 1e-6) over the turns of the group with an equal
    anchor, including several of one attempt. A state that was visited once has A_step = 0.

    Reads: anchors_K; gamma, singleton, step_weight.
    Raises:
        ValueError: the batch has no anchors.
    Source: Feng et al. 2025, arXiv:2505.10978.
    """
    anchors_K = needed(
        batch.anchors_K, "gigpo", "anchors_K, a hash of the environment's state before each turn"
    )
    turns = batch.turns
    steps = Groups(_turn_returns(batch, options.gamma), [batch.group_N[turns.sequence_K], anchors_K])
    steps_K = steps.settle(steps.deviations / (steps.stds + STD_EPS), singleton="zero")
    episodes_K = grpo(batch, options).values_R[turns.sequence_K]
    return RunCredit(episodes_K + options.step_weight * steps_K, turns.lengths_K)


def _turn_returns(batch: ActionBatch, gamma: float) -> Tensor:
    """Return f[K], the discounted return of each turn."""
    return sums_to_go(batch.turn_rewards_K, batch.turns.counts_N, gamma)
