"""Resolution of the configured policy loss, with its options bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl.algorithms.corrections import WeightRule
from agentrl.algorithms.policy_losses import POLICY_LOSSES, ClipConfig, PolicyLoss, PolicyTokens
from agentrl.algorithms.registry import find_function
from agentrl.config.algorithm import SEQUENCE_LOSSES, AlgorithmConfig

GROUP = "agentrl.policy_losses"
"""Entry point group of installed packages: name -> function."""


def bind_policy_loss(algorithm: AlgorithmConfig) -> Callable[[PolicyTokens], PolicyLoss]:
    """Return `algorithm.policy_loss` with its options bound.

    Raises:
        PluginError: the loss is unknown, or its import fails.
    """
    function = find_function("policy loss", algorithm.policy_loss, POLICY_LOSSES, group=GROUP)
    options_of = _OPTIONS.get(algorithm.policy_loss, lambda a: a.loss_options)
    return partial(function, **options_of(algorithm))


def sees_sequences(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss of a token depends on the policy at other tokens of its sequence.

    A user's own loss is assumed to do so.
    """
    sees_tokens = algorithm.policy_loss in POLICY_LOSSES and algorithm.policy_loss not in SEQUENCE_LOSSES
    if algorithm.policy_loss == "reinforce":
        sees_tokens = algorithm.reinforce.weight == "token"
    return not sees_tokens or algorithm.correction.opsm_delta is not None


def _clip(algorithm: AlgorithmConfig) -> Mapping[str, Any]:
    return {"clip": ClipConfig(algorithm.clip_low, algorithm.clip_high)}


def _clip_dual(algorithm: AlgorithmConfig) -> Mapping[str, Any]:
    return {"clip": ClipConfig(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)}


def _weight_rule(algorithm: AlgorithmConfig) -> WeightRule:
    config = algorithm.reinforce
    return WeightRule(config.weight, _or_inf(config.cap), config.floor, config.outside)


def _or_inf(bound: float | None) -> float:
    return math.inf if bound is None else bound


_OPTIONS: Mapping[str, Callable[[AlgorithmConfig], Mapping[str, Any]]] = {
    "ppo_clip": _clip_dual,
    "gspo": _clip,
    "gmpo": _clip,
    "cispo": _clip,
    "reinforce": lambda a: {"weight": _weight_rule(a)},
    "gpg": lambda a: {},
    "sapo": lambda a: {"tau_positive": a.sapo.tau_positive, "tau_negative": a.sapo.tau_negative},
    "clip_cov": _clip_dual,
    "kl_cov": lambda a: {"coefficient": a.kl_cov.coefficient},
    "dppo_tv": lambda a: {
        "delta_low": a.dppo_tv.delta_low,
        "delta_high": a.dppo_tv.delta_high,
        "cap": _or_inf(a.dppo_tv.cap),
    },
}
