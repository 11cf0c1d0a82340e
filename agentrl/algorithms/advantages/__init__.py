"""Advantage estimators: pure functions of a compact batch. `agentrl.algorithms.estimators` names them.

scan         discounted sums to the end of each trajectory, without a loop over tokens
gae          gae, gae_turn
groups       grpo, dr_grpo, rloo, opo, gpg, max_rl
pass_at_k    grpo_passk, pass_at_k
reinforce    reinforce_plus_plus, reinforce_plus_plus_baseline, remax; whiten, and its moments
turns        turn_group, gigpo
"""

from __future__ import annotations

import torch

from agentrl.algorithms.compact import ActionBatch, Credit, RunCredit

__all__ = ["checked"]


def checked(credit: object, batch: ActionBatch) -> Credit | RunCredit:
    """Return what an estimator returned for `batch`, checked because the estimator may be the user's own.

    Raises:
        ValueError: it is not a Credit or RunCredit with one finite advantage per action token.
    """
    expected = f"a Credit with advantages_A of shape [{batch.num_tokens}]"
    if not isinstance(credit, (Credit, RunCredit)):
        raise ValueError(f"an estimator returns {expected}; got {type(credit).__name__}")
    values_R, lengths_R = credit.runs
    if values_R.shape != lengths_R.shape or values_R.dim() != 1 or int(lengths_R.sum()) != batch.num_tokens:
        raise ValueError(
            f"an estimator returns {expected}; got shape {list(values_R.shape)}"
            + ("" if isinstance(credit, Credit) else f" for {int(lengths_R.sum())} tokens")
        )
    if not bool(torch.isfinite(values_R.sum())):
        raise ValueError("an estimator returned an advantage that is not finite")
    return credit
