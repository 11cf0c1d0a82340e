"""The estimators of advantages of this package, each as one object: its function, and what it needs.

The functions are in `advantages`, which needs torch; this module does not, because configs read it.
"""

from __future__ import annotations

from typing import Literal

from agentrl.config.estimators import Estimator

ROOM = "agentrl.algorithms.advantages"


def _of_groups(name: str, module: str, *keys: str, draws: str | None = None) -> Estimator:
    read = frozenset({"singleton", *keys})
    return Estimator(name, f"{ROOM}.{module}:{name}", frozenset(), read, compares="group", draws=draws)


def _of_critic(name: str, *, steps: Literal["action tokens", "turns"]) -> Estimator:
    place, read = f"{ROOM}.gae:{name}", frozenset({"gamma", "lam", "bootstrap_truncated"})
    return Estimator(name, place, frozenset({"critic"}), read, separate=place, steps=steps)


GRPO = _of_groups("grpo", "groups")
DR_GRPO = _of_groups("dr_grpo", "groups")
RLOO = _of_groups("rloo", "groups")
OPO = _of_groups("opo", "groups")
GPG = _of_groups("gpg", "groups")
MAX_RL = _of_groups("max_rl", "groups")
GRPO_PASSK = _of_groups("grpo_passk", "pass_at_k")
PASS_AT_K = _of_groups("pass_at_k", "pass_at_k", "passk_k", "solved_reward", draws="passk_k")
REINFORCE_PLUS_PLUS_BASELINE = _of_groups("reinforce_plus_plus_baseline", "reinforce")
TURN_GROUP = _of_groups("turn_group", "turns", "gamma")
GIGPO = _of_groups("gigpo", "turns", "gamma", "step_weight")
REINFORCE_PLUS_PLUS = Estimator(
    "reinforce_plus_plus",
    f"{ROOM}.reinforce:reinforce_plus_plus",
    frozenset(),
    frozenset({"gamma"}),
    separate=f"{ROOM}.reinforce:returns_to_go",
    is_whitened=True,
)
REMAX = Estimator("remax", f"{ROOM}.reinforce:remax", frozenset({"greedy"}))
GAE = _of_critic("gae", steps="action tokens")
GAE_TURN = _of_critic("gae_turn", steps="turns")
