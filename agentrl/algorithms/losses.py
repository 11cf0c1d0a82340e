"""The policy losses of this package, each as one object: its function, options, and what they mean.

The functions are in `policy_losses`, which needs torch; this module does not, because configs read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from agentrl.algorithms.rules import ClipConfig, WeightRule
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.losses import Loss, Sees, TokenSelection

FUNCTIONS = "agentrl.algorithms.policy_losses"
SEQUENCES = "sequence_mean_token_mean"
WEIGHT_LEVELS = {
    "token": "per token",
    "sequence": "multiplied over the sequence",
    "geometric": "in the geometric mean of the sequence",
}


def _clip(algorithm: AlgorithmConfig) -> dict[str, Any]:
    return {"clip": ClipConfig(algorithm.clip_low, algorithm.clip_high)}


def _clip_dual(algorithm: AlgorithmConfig) -> dict[str, Any]:
    return {"clip": ClipConfig(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)}


def _clipped(algorithm: AlgorithmConfig) -> str:
    return f" clipped to [{1 - algorithm.clip_low:g}, {1 + algorithm.clip_high:g}]"


def _dual(algorithm: AlgorithmConfig) -> str:
    return "" if algorithm.dual_clip is None else f"at most {algorithm.dual_clip:g} |A| where A < 0"


PPO_CLIP = Loss(
    "ppo_clip", f"{FUNCTIONS}:ppo_clip", from_config=_clip_dual, sees="token", words=_dual, bound=_clipped
)


def _gspo_warnings(algorithm: AlgorithmConfig, updates: int) -> Iterator[str]:
    if algorithm.clip_high > 0.05:
        yield (
            f"algorithm.clip_high={algorithm.clip_high:g} with policy_loss=gspo clips nothing: a sequence's "
            "mean log-ratio hardly moves; the paper has clip_low=3e-4, clip_high=4e-4"
        )
    if algorithm.aggregation != SEQUENCES:
        yield (
            f"algorithm.aggregation={algorithm.aggregation} with policy_loss=gspo weighs a sequence by its "
            f"length; the paper has {SEQUENCES}"
        )


GSPO = Loss(
    "gspo",
    f"{FUNCTIONS}:gspo",
    from_config=_clip,
    bound=lambda a: f" of a sequence{_clipped(a)}",
    warnings=_gspo_warnings,
)


def _gmpo_objection(algorithm: AlgorithmConfig) -> str | None:
    # A mean over tokens counts a sequence by its length. gspo may do so: each of its tokens has a gradient of
    # its own.
    if algorithm.aggregation == SEQUENCES:
        return None
    return (
        f"policy_loss=gmpo has one loss per sequence, and aggregation={algorithm.aggregation} would "
        f"weight it by length; use aggregation={SEQUENCES}"
    )


GMPO = Loss(
    "gmpo",
    f"{FUNCTIONS}:gmpo",
    from_config=_clip,
    objection=_gmpo_objection,
    bound=lambda a: (
        f" clipped to [e^-{a.clip_low:g}, e^{a.clip_high:g}], in the geometric mean of a sequence"
    ),
)

CISPO = Loss(
    "cispo",
    f"{FUNCTIONS}:cispo",
    from_config=_clip,
    sees="token",
    bound=lambda a: f" bounded to [{1 - a.clip_low:g}, {1 + a.clip_high:g}] as a weight",
)


def _weight_rule(algorithm: AlgorithmConfig) -> dict[str, Any]:
    config = algorithm.reinforce
    cap = math.inf if config.cap is None else config.cap
    return {"weight": WeightRule(config.weight, cap, config.floor, config.outside)}


def _reinforce_sees(algorithm: AlgorithmConfig) -> Sees:
    return "token" if algorithm.reinforce.weight == "token" else "sequence"


def _reinforce_words(algorithm: AlgorithmConfig) -> str:
    config = algorithm.reinforce
    floor = "" if config.floor is None else f", at least {config.floor:g}"
    cap = ", without a bound" if config.cap is None else f", at most {config.cap:g}"
    outside = ", 0 outside" if config.outside == "mask" else ""
    return f"weighted by the ratio {WEIGHT_LEVELS[config.weight]}{floor}{cap}{outside}"


REINFORCE = Loss(
    "reinforce",
    f"{FUNCTIONS}:reinforce",
    from_config=_weight_rule,
    keys="reinforce",
    sees=_reinforce_sees,
    words=_reinforce_words,
)


def _gpg_warnings(algorithm: AlgorithmConfig, updates: int) -> Iterator[str]:
    if updates > 1:
        yield (
            "algorithm.policy_loss=gpg has no trust region: with several updates per step, nothing keeps the "
            "policy close to the one that sampled the data"
        )


GPG = Loss("gpg", f"{FUNCTIONS}:gpg", from_config=lambda a: {}, sees="token", warnings=_gpg_warnings)

SAPO = Loss(
    "sapo",
    f"{FUNCTIONS}:sapo",
    from_config=lambda a: {"tau_positive": a.sapo.tau_positive, "tau_negative": a.sapo.tau_negative},
    keys="sapo",
    sees="token",
    words=lambda a: f"gates with temperature {a.sapo.tau_positive:g} (A > 0) and {a.sapo.tau_negative:g}",
)


def _clip_cov_words(algorithm: AlgorithmConfig) -> str:
    left_out = f"{algorithm.clip_cov.share:g} of the tokens left out because of their covariance"
    return ", ".join(filter(None, (left_out, _dual(algorithm))))


CLIP_COV = Loss(
    "clip_cov",
    f"{FUNCTIONS}:clip_cov",
    from_config=_clip_dual,
    keys="clip_cov",
    sees="token",
    selects=lambda a: TokenSelection(a.clip_cov.share, "chance", a.clip_cov.lower, a.clip_cov.upper),
    words=_clip_cov_words,
    bound=_clipped,
)

KL_COV = Loss(
    "kl_cov",
    f"{FUNCTIONS}:kl_cov",
    from_config=lambda a: {"coefficient": a.kl_cov.coefficient},
    keys="kl_cov",
    sees="token",
    selects=lambda a: TokenSelection(a.kl_cov.share, "largest"),
    words=lambda a: f"{a.kl_cov.share:g} of the tokens penalized by {a.kl_cov.coefficient:g} |log ratio|",
)


def _dppo_options(algorithm: AlgorithmConfig) -> dict[str, Any]:
    config = algorithm.dppo_tv
    cap = math.inf if config.cap is None else config.cap
    return {"delta_low": config.delta_low, "delta_high": config.delta_high, "cap": cap}


def _dppo_words(algorithm: AlgorithmConfig) -> str:
    config = algorithm.dppo_tv
    cap = "" if config.cap is None else f", and is weighted by a ratio of at most {config.cap:g}"
    return f"a token may lose {config.delta_low:g} and gain {config.delta_high:g} of its probability{cap}"


DPPO_TV = Loss(
    "dppo_tv",
    f"{FUNCTIONS}:dppo_tv",
    from_config=_dppo_options,
    keys="dppo_tv",
    sees="token",
    words=_dppo_words,
)
