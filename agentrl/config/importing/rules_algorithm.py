"""Rules of translation about advantages, losses, KL and off-policy correction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.config.algorithm import ADVANTAGES, POLICY_LOSSES, SEQUENCE_LOSSES
from agentrl.config.importing.findings import Dropped, Finding, Setting
from agentrl.config.importing.rules_data import ACTOR
from agentrl.config.importing.source import Source
from agentrl.errors import ConfigError

ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo", "ppo_clip": "ppo_clip", "reinforce": "reinforce"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "constant",
}
LOSS_KL = {
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3_k2grad"),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+", "kl+", "k1+", "abs+"), "k2"),  # `+`: the gradient of k2, whatever the value
    "abs": "abs",
}
REWARD_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LEVELS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
RATIO_LEVELS = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence_mean"}
"""Of verl up to 0.6, where a stage is a ratio within bounds."""


CORRECTION = "algorithm.rollout_correction"


def advantages(source: Source) -> Iterator[Finding]:
    """GRPO without the division by the standard deviation is an estimator of its own here."""
    key, by_std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = ESTIMATORS.get(source.get(key), source.get(key))
    if name == "grpo" and not source.get(by_std):
        yield Setting("algorithm.advantage", "dr_grpo", (key, by_std))
    elif name in ADVANTAGES:
        yield Setting("algorithm.advantage", name, (key,))
    else:
        yield Dropped(key, f"there is no {name}; choose algorithm.advantage among {', '.join(ADVANTAGES)}, or write your own")


def losses(source: Source) -> Iterator[Finding]:
    """The loss, and how losses of tokens become one number."""
    mode, aggregation = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
    if source.get(f"{CORRECTION}.bypass_mode") and source.has(f"{CORRECTION}.loss_type"):
        mode = f"{CORRECTION}.loss_type"  # in verl it counts in this mode alone
    loss = LOSSES.get(source.get(mode), source.get(mode))
    if loss in POLICY_LOSSES:
        yield Setting("algorithm.policy_loss", loss, (mode,))
    else:
        yield Dropped(mode, f"there is no {loss}; choose algorithm.policy_loss among {', '.join(POLICY_LOSSES)}, or write your own")
    how = AGGREGATIONS.get(source.get(aggregation))
    if loss in SEQUENCE_LOSSES and how != "sequence_mean_token_mean":
        note = f"{loss} has one ratio per sequence, and counts sequences alike"
        yield Setting("algorithm.aggregation", "sequence_mean_token_mean", (aggregation, mode), note)
    elif how is not None:
        yield Setting("algorithm.aggregation", how, (aggregation,))
    else:
        yield Dropped(aggregation, f"{source.get(aggregation)} is unknown; there is: {', '.join(AGGREGATIONS)}")


def clips(source: Source) -> Iterator[Finding]:
    """`clip_ratio` stands for the side of which nothing is said."""
    both = f"{ACTOR}.clip_ratio"
    sides = {side: f"{both}_{side}" for side in ("low", "high")}
    for side, key in sides.items():
        used = key if source.has(key) else both
        if source.has(used):
            yield Setting(f"algorithm.clip_{side}", source.get(used), (used,))
    if source.has(both) and all(map(source.has, sides.values())):
        yield Dropped(both, "clip_ratio_low and clip_ratio_high are both set")


def divergences(source: Source) -> Iterator[Finding]:
    """One KL here, in the loss or in the reward; verl's switches for both become its place."""
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    of_loss = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    of_reward = ("algorithm.kl_penalty", *(f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")))
    if source.get(in_loss):
        yield Setting("algorithm.kl.coefficient", source.get(of_loss[0]), (of_loss[0], in_loss))
        yield from _estimator(source, of_loss[1], LOSS_KL, why="its gradient has the expectation zero")
        unused, why = (in_reward, *of_reward), "there is one KL here, and the one of the loss was taken"
    elif source.get(in_reward):
        yield Setting("algorithm.kl.coefficient", source.get("algorithm.kl_ctrl.kl_coef"), ("algorithm.kl_ctrl.kl_coef", in_reward))
        yield Setting("algorithm.kl.place", "reward", (in_reward,))
        yield from _estimator(source, of_reward[0], REWARD_KL, why="it is unknown")
        if source.get("algorithm.kl_ctrl.type") == "adaptive":
            kind = ("algorithm.kl_ctrl.type",)
            yield Setting("algorithm.kl.target", source.get("algorithm.kl_ctrl.target_kl"), ("algorithm.kl_ctrl.target_kl", *kind))
            yield Setting("algorithm.kl.horizon", source.get("algorithm.kl_ctrl.horizon"), ("algorithm.kl_ctrl.horizon", *kind))
            unused, why = of_loss, "the KL is in the reward"
        else:
            unused, why = (*of_loss, *of_reward[1:2], *of_reward[3:]), "the KL is in the reward, with a fixed coefficient"
    else:
        yield Setting("algorithm.kl.coefficient", 0.0, (in_loss, in_reward))
        unused, why = (*of_loss, *of_reward), "without effect in verl: use_kl_loss and use_kl_in_reward are off"
    yield from (Dropped(key, why) for key in unused if source.has(key))


def _estimator(source: Source, key: str, known: dict[str, str], *, why: str) -> Iterator[Finding]:
    name = source.get(key)
    if name in known:
        yield Setting("algorithm.kl.estimator", known[name], (key,))
    else:
        yield Dropped(key, f"{name} is not taken over: {why}; there is: {', '.join(known)}")


def corrections(source: Source) -> Iterator[Finding]:
    """Importance weights and stages of rejection; verl up to 0.6 has them as keys of `algorithm` itself."""
    section = CORRECTION if source.below(CORRECTION) else "algorithm"
    weight, threshold = f"{section}.rollout_is", f"{section}.rollout_is_threshold"
    mode, stage = f"{section}.bypass_mode", f"{section}.rollout_rs"
    if source.get(mode):
        yield Setting("algorithm.mode", "bypass", (mode,))
    elif source.has(mode):
        yield Dropped(mode, "false: algorithm.mode is chosen by what else is set")
    if source.has(weight):
        level = "token" if source.get(weight) is True else source.get(weight) or "none"
        yield Setting("algorithm.correction.weight", level, (weight,))
    if source.has(threshold):
        yield from _cap(threshold, source.get(threshold))
    for key in (stage, f"{section}.rollout_is_batch_normalize"):
        if source.get(key) and source.get(mode):
            yield Dropped(key, "it compares with the proximal policy, and in bypass mode there is none")
        elif source.get(key):
            yield from _stages(source, stage) if key == stage else ()
            yield Setting("algorithm.mode", "decoupled", (key,))


def _cap(key: str, value: Any) -> Iterator[Finding]:
    """Translate 2.0, or "0.5_2.0": weights out of a band count nothing."""
    *floor, cap = _bounds(key, str(value))
    yield Setting("algorithm.correction.cap", cap, (key,))
    if floor:
        yield Setting("algorithm.correction.floor", floor[0], (key,))
        yield Setting("algorithm.correction.outside", "mask", (key,))


def _bounds(key: str, text: str) -> list[float]:
    """Read "2.0" or "0.5_2.0"."""
    try:
        bounds = [float(part) for part in text.split("_")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 2 or min(bounds) <= 0:
        raise ConfigError(f"{key}={text}: must be a number above 0, or a lower and an upper one as in 0.5_2.0")
    return bounds


def _stages(source: Source, key: str) -> Iterator[Finding]:
    bounds, floor = f"{key}_threshold", f"{key}_threshold_lower"
    names = [name.strip() for name in str(source.get(key)).split(",")]
    texts = [text.strip() for text in str(source.get(bounds)).split(",")]
    if len(texts) not in (1, len(names)):
        raise ConfigError(f"{bounds}={source.get(bounds)}: must be one for all of {key}={source.get(key)}, or one for each")
    for name, text in zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True):
        stage = _stage(name, _bounds(bounds, text), source.get(floor))
        if stage is None:
            yield Dropped(key, f"{name} is unknown; stages are {', '.join(f'{each}_k1' for each in LEVELS)}, k2 and k3 too")
        else:
            old = (key, bounds, *((floor,) if source.has(floor) else ()))
            yield Setting(f"algorithm.correction.reject.{name}", stage, old)


def _stage(name: str, bounds: list[float], floor: float | None) -> dict[str, Any] | None:
    level, _, statistic = name.rpartition("_")
    upper = bounds[-1]
    lower = bounds[0] if len(bounds) == 2 else floor or 1 / upper
    if name in RATIO_LEVELS:
        return {"level": RATIO_LEVELS[name], "lower": lower, "upper": upper}
    if level in LEVELS and statistic == "k1":
        # verl's k1 is log(behavior / proximal): its bounds are those of the inverse of our ratio
        return {"level": LEVELS[level], "lower": 1 / upper, "upper": 1 / lower}
    return {"level": LEVELS[level], "statistic": statistic, "upper": upper} if level in LEVELS else None


RULES = (advantages, losses, clips, divergences, corrections)
