"""Advantage estimators: pure functions of a compact batch, by name.

scan         discounted sums to the end of each trajectory, without a loop over tokens
gae          gae, gae_turn
groups       grpo, dr_grpo, rloo, opo, gpg, max_rl
pass_at_k    grpo_passk, pass_at_k
reinforce    reinforce_plus_plus, reinforce_plus_plus_baseline, remax; whiten, and its moments
turns        turn_group, gigpo
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from agentrl.algorithms.advantages.gae import gae, gae_turn
from agentrl.algorithms.advantages.groups import dr_grpo, gpg, grpo, max_rl, opo, rloo
from agentrl.algorithms.advantages.pass_at_k import grpo_passk, pass_at_k
from agentrl.algorithms.advantages.reinforce import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    returns_to_go,
)
from agentrl.algorithms.advantages.turns import gigpo, turn_group
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit, RunCredit
from agentrl.algorithms.registry import find_function

__all__ = ["ESTIMATORS", "SEPARATE_ESTIMATORS", "WHITENED", "Estimator", "checked", "find_estimator"]

Estimator = Callable[[ActionBatch, AdvantageOptions], Credit | RunCredit]

ENTRY_POINTS = "agentrl.advantages"

ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "max_rl": max_rl,
    "grpo_passk": grpo_passk,
    "pass_at_k": pass_at_k,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "turn_group": turn_group,
    "gigpo": gigpo,
    "gae": gae,
    "gae_turn": gae_turn,
}
"""Registered name (`algorithm.advantage`) -> estimator."""

SEPARATE_ESTIMATORS: Mapping[str, Callable[[ActionBatch, AdvantageOptions], Credit]] = {
    "reinforce_plus_plus": returns_to_go,
    "gae": gae,
    "gae_turn": gae_turn,
}
"""Those that look at each trajectory alone, so that the trajectories may be on different ranks; see
`WHITENED`.
"""
WHITENED = frozenset({"reinforce_plus_plus"})
"""Whose advantages are those of SEPARATE_ESTIMATORS, whitened over the batch."""


def find_estimator(name: str) -> Estimator:
    """Return a built-in estimator, an installed one (entry point), or the user's (`file.py:function`).

    Raises:
        PluginError: the name is unknown, or the estimator cannot be imported.
    """
    return find_function("advantage estimator", name, ESTIMATORS, group=ENTRY_POINTS)


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
