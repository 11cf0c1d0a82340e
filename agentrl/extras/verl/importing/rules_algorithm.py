"""Translation rules for advantages, losses, KL and off-policy correction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.config.estimators import GROUP as ADVANTAGE_GROUP
from agentrl.config.estimators import estimator_named
from agentrl.config.losses import GROUP as LOSS_GROUP
from agentrl.errors import ConfigError
from agentrl.extras.verl.importing.findings import Dropped, Finding, Setting
from agentrl.extras.verl.importing.rules_data import ACTOR, is_asynchronous, minibatches_per_step
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.registered import names_of_ours

ADVANTAGES, POLICY_LOSSES = names_of_ours(ADVANTAGE_GROUP), names_of_ours(LOSS_GROUP)
ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "constant",
}
LOSS_KL = {
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3_k2grad"),
    # `+`: the gradient of k2, whatever the value
    **dict.fromkeys(("mse", "k2", "mse+", "k2+", "kl+", "k1+", "abs+"), "k2"),
    "abs": "abs",
}
REWARD_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LEVELS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
RATIO_LEVELS = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence_mean"}
"""Levels of verl up to 0.6, where a stage is a ratio within bounds."""


MEANS_OF_SEQUENCES = ("gmpo", "sapo")
"""Losses whose loss_agg_mode verl ignores."""
SELECTED = (
    "tokens are selected once per step, by the policy at its start; verl selects in each microbatch, by the "
    "policy of that moment"
)
LOSS_NOTES = {
    **dict.fromkeys(("clip_cov", "kl_cov"), SELECTED),
    "gmpo": "over all sequences of an update; verl takes the mean of a microbatch, and adds microbatches up",
}
OTHER_ADVANTAGES = {
    "gpg": "verl multiplies by the share of attempts whose reward is not 0, inverted; agentrl by that of "
    "groups with unequal outcomes",
    "grpo_passk": "verl divides by the standard deviation of the group unless norm_adv_by_std_in_grpo is "
    "false; agentrl never does",
    "reinforce_plus_plus_baseline": "verl whitens groups of equal outcomes too; agentrl gives them an "
    "advantage of 0",
}
"""Estimators of the same name that compute something else."""
SIDES = {"low": "algorithm.clip_low", "high": "algorithm.clip_high"}
BOUNDS = {
    "gspo": SIDES,
    "gmpo": SIDES,
    "cispo": SIDES,
    "clip_cov": SIDES,
    "ppo_clip": {**SIDES, "dual": "algorithm.dual_clip"},
    "dppo_tv": {
        "low": "algorithm.dppo_tv.delta_low",
        "high": "algorithm.dppo_tv.delta_high",
        "dual": "algorithm.dppo_tv.cap",
    },
}
"""Loss -> the targets of clip_ratio_low, clip_ratio_high and clip_ratio_c."""

CORRECTION = "algorithm.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
OLD_CAP = f"{ACTOR}.tis_imp_ratio_cap"
"""Key of verl 0.5."""
REUSED = "async_training.use_rollout_log_probs"


ROLLOUT_N = "actor_rollout_ref.rollout.n"
AGGREGATION = f"{ACTOR}.loss_agg_mode"
USE_KL_LOSS = f"{ACTOR}.use_kl_loss"


def advantages(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the advantage estimator.

    GRPO without division by the standard deviation is a separate estimator here.
    """
    key, by_std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = ESTIMATORS.get(source.get(key), source.get(key))
    if name == "grpo" and not source.get(by_std):
        yield Setting("algorithm.advantage", "dr_grpo", (key, by_std))
    elif name in ADVANTAGES:
        note = (
            "of whole attempts; verl uses rewards-to-go, which differ if turns earn rewards"
            if name == "remax"
            else ""
        )
        yield Setting("algorithm.advantage", name, (key,), note)
        if name in OTHER_ADVANTAGES and not _is_the_same(name, source):
            yield Dropped(key, OTHER_ADVANTAGES[name], is_decisive=True)
    else:
        why = (
            f"unknown estimator {name}; choose algorithm.advantage among {', '.join(ADVANTAGES)}, or write "
            "your own"
        )
        yield Dropped(key, why, is_decisive=True)
    # An unknown estimator is replaced by the default, which compares attempts too
    compares = name not in ADVANTAGES or estimator_named(name).compares == "group"
    if compares and source.get(ROLLOUT_N) == 1:
        yield Setting(
            "algorithm.singleton", "raw", (key, ROLLOUT_N), "verl uses the raw reward of a group of one"
        )
    if name == "gae":
        yield Setting("algorithm.whiten", True, (key,), "verl always whitens the advantages of gae")


def _is_the_same(name: str, source: WrittenConfig) -> bool:
    """Return whether one of OTHER_ADVANTAGES computes the same with the rest of the config."""
    if name == "grpo_passk":
        return not source.get("algorithm.norm_adv_by_std_in_grpo")
    return name == "reinforce_plus_plus_baseline" and bool(source.get("algorithm.filter_groups.enable"))


def losses(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the policy loss."""
    loss, keys = _loss(source)
    if _is_bypass(source) and source.has(LOSS_MODE):
        yield Dropped(
            LOSS_MODE,
            "in bypass mode verl computes rollout_correction.loss_type instead, or ppo_clip if it is not set",
        )
    if loss in POLICY_LOSSES:
        plain = "without rollout_is verl's reinforce has no ratio"
        note = plain if loss == "gpg" and _is_bypass(source) else LOSS_NOTES.get(loss, "")
        yield Setting("algorithm.policy_loss", loss, keys, note)
        if note == SELECTED and updates_per_step(source) > 1:
            yield Dropped(keys[0], note, is_decisive=True)
        elif note == SELECTED and not source.get(REUSED):
            note = "the learner's own log-probabilities choose the tokens"
            yield Setting("algorithm.mode", "decoupled", keys, note)
    else:
        why = (
            f"unknown policy loss {loss}; choose algorithm.policy_loss among {', '.join(POLICY_LOSSES)}, or "
            "write your own"
        )
        yield Dropped(keys[0], why, is_decisive=True)


def aggregations(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the aggregation of token losses, which is also that of KL and entropy here."""
    loss, keys = _loss(source)
    how = AGGREGATIONS.get(source.get(AGGREGATION))
    if loss in MEANS_OF_SEQUENCES and how != "sequence_mean_token_mean":
        note = f"verl's {source.get(keys[0])} is a mean over sequences, whatever loss_agg_mode is"
        yield Setting("algorithm.aggregation", "sequence_mean_token_mean", (AGGREGATION, *keys), note)
        if _has_kl_loss(source) or _has_entropy(source):
            why = f"verl aggregates KL and entropy so, and {source.get(keys[0])} as seq-mean-token-mean; "
            yield Dropped(AGGREGATION, why + "agentrl aggregates all alike", is_decisive=True)
    elif how is None:
        why = f"{source.get(AGGREGATION)} has no counterpart; available: {', '.join(AGGREGATIONS)}"
        yield Dropped(AGGREGATION, why, is_decisive=True)
    elif loss == "gspo" and how != "sequence_mean_token_mean":
        note = "as in verl since 0.9; before, gspo was a mean over sequences, whatever loss_agg_mode is"
        yield Setting("algorithm.aggregation", how, (AGGREGATION, *keys), note)
    else:
        yield Setting("algorithm.aggregation", how, (AGGREGATION,))
        if how == "constant" and not source.has(f"{ACTOR}.loss_scale_factor"):
            why = (
                "verl divides by the longest response of each microbatch, agentrl by a constant; give "
                f"{ACTOR}.loss_scale_factor, such as data.max_response_length"
            )
            yield Dropped(AGGREGATION, why, is_decisive=True)


def _has_kl_loss(source: WrittenConfig) -> bool:
    return bool(source.get(USE_KL_LOSS) and source.get(f"{ACTOR}.kl_loss_coef"))


def _has_entropy(source: WrittenConfig) -> bool:
    return bool(source.get(f"{ACTOR}.entropy_coeff"))


def _is_bypass(source: WrittenConfig) -> bool:
    """Return whether verl compares with the server's log-probabilities; its asynchronous trainer does, unless
    told otherwise.
    """
    key = f"{CORRECTION}.bypass_mode"
    if not is_asynchronous(source) or source.has(key) or source.has(REUSED):
        return bool(source.get(key))
    return not source.get("async_training.compute_prox_log_prob")


def updates_per_step(source: WrittenConfig) -> int:
    """Return the number of optimizer updates on a batch, all its passes included."""
    return minibatches_per_step(source) * int(source.get(f"{ACTOR}.ppo_epochs"))


def _loss(source: WrittenConfig) -> tuple[str, tuple[str, ...]]:
    """Return the name of the loss (ours, if it exists) and the keys of verl that set it.

    They differ in bypass mode.
    """
    if not _is_bypass(source):
        name = source.get(LOSS_MODE)
        return LOSSES.get(name, name), (LOSS_MODE,)
    kind, old_kind, weight = (
        f"{CORRECTION}.{name}" for name in ("loss_type", "use_policy_gradient", "rollout_is")
    )
    if source.get(kind) != "reinforce" and not source.get(old_kind):
        name = source.get(kind) or "ppo_clip"
        return LOSSES.get(name, name), (kind,)
    keys = (old_kind,) if source.get(old_kind) else (kind,)
    return ("reinforce" if source.has(weight) else "gpg"), keys


def clips(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the bounds of the ratio. Some losses use them as bounds of something else, or not at all.

    verl's own config sets both sides to 0.2, so its `clip_ratio` is used only if a script sets a side to
    null.
    """
    both, dual, loss = f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_c", _loss(source)[0]
    targets = BOUNDS.get(loss, {} if loss in POLICY_LOSSES else BOUNDS["ppo_clip"])
    is_used = False
    for side in ("low", "high"):
        key = f"{both}_{side}"
        is_null = key in source.written and not source.has(key)
        used, value = (both, source.get(both)) if is_null else (key, source.get(key))
        is_used |= is_null
        if side in targets:
            is_none = targets[side] == "algorithm.clip_low" and value > 1
            note = "a ratio is never below 0" if is_none else ""
            yield Setting(targets[side], 1.0 if is_none else value, (used,), note)
        elif source.has(used):
            yield Dropped(used, f"{loss} does not bound the ratio with it")
    if source.has(both) and not is_used:
        yield Dropped(
            both,
            "without effect in verl, whose clip_ratio_low and clip_ratio_high are 0.2 unless set; write "
            "algorithm.clip_low",
        )
    if "dual" in targets:
        yield Setting(targets["dual"], source.get(dual), (dual,))
    elif loss == "clip_cov":
        yield Setting(
            "algorithm.dual_clip",
            None,
            (LOSS_MODE, *([dual] if source.has(dual) else [])),
            "verl's clip_cov has no such bound",
        )
    elif source.has(dual):
        yield Dropped(dual, f"{loss} has no such bound")


def selections(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the selection of tokens by kl_cov, for which verl has its own defaults."""
    if _loss(source)[0] == "kl_cov":
        for name, ours in (("kl_cov_ratio", "share"), ("ppo_kl_coef", "coefficient")):
            key = f"{ACTOR}.policy_loss.{name}"
            yield Setting(f"algorithm.kl_cov.{ours}", source.get(key), (key,))


def divergences(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the KL.

    There is only one here, in the loss or in the reward; verl's two switches decide its place.
    """
    in_loss, in_reward = USE_KL_LOSS, "algorithm.use_kl_in_reward"
    of_loss = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    of_reward = (
        "algorithm.kl_penalty",
        *(f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")),
    )
    if source.get(in_loss):
        yield Setting("algorithm.kl.coefficient", source.get(of_loss[0]), (of_loss[0], in_loss))
        yield from _estimator(source, of_loss[1], LOSS_KL, why="its expected gradient is zero")
        if _has_kl_loss(source) and _has_weights(source) and not _is_bypass(source):
            why = "with importance weights, agentrl weighs the KL too; verl weighs only the policy loss"
            yield Dropped(in_loss, why, is_decisive=True)
        unused, why = (in_reward, *of_reward), "agentrl has one KL, and that of the loss was used"
    elif source.get(in_reward):
        yield Setting(
            "algorithm.kl.coefficient",
            source.get("algorithm.kl_ctrl.kl_coef"),
            ("algorithm.kl_ctrl.kl_coef", in_reward),
        )
        yield Setting("algorithm.kl.place", "reward", (in_reward,))
        yield from _estimator(source, of_reward[0], REWARD_KL, why="it is unknown")
        if source.get("algorithm.kl_ctrl.type") == "adaptive":
            kind = ("algorithm.kl_ctrl.type",)
            yield Setting(
                "algorithm.kl.target",
                source.get("algorithm.kl_ctrl.target_kl"),
                ("algorithm.kl_ctrl.target_kl", *kind),
            )
            yield Setting(
                "algorithm.kl.horizon",
                source.get("algorithm.kl_ctrl.horizon"),
                ("algorithm.kl_ctrl.horizon", *kind),
            )
            unused, why = of_loss, "the KL is in the reward"
        else:
            unused, why = (
                (*of_loss, *of_reward[1:2], *of_reward[3:]),
                "the KL is in the reward, with a fixed coefficient",
            )
    else:
        yield Setting("algorithm.kl.coefficient", 0.0, (in_loss, in_reward))
        unused, why = (
            (*of_loss, *of_reward),
            "without effect in verl: use_kl_loss and use_kl_in_reward are off",
        )
    yield from (Dropped(key, why) for key in unused if source.has(key))


def _estimator(source: WrittenConfig, key: str, known: dict[str, str], *, why: str) -> Iterator[Finding]:
    name = source.get(key)
    if name in known:
        is_cut = known[name] in ("k3", "k3_k2grad")
        note = "verl cuts the value of a token at 10, about 2.5 nats below the reference" if is_cut else ""
        yield Setting("algorithm.kl.estimator", known[name], (key,), note)
    else:
        text = f"{name} is not translated: {why}; available: {', '.join(known)}"
        yield Dropped(key, text, is_decisive=True)


def corrections(source: WrittenConfig) -> Iterator[Finding]:
    """Translate importance weights and rejection stages.

    Up to verl 0.6, they are keys of `algorithm` itself.
    """
    section = CORRECTION if source.below(CORRECTION) else "algorithm"
    mode, stage, normalize = (
        f"{section}.{name}" for name in ("bypass_mode", "rollout_rs", "rollout_is_batch_normalize")
    )
    if _is_bypass(source):
        yield Setting("algorithm.mode", "bypass", (mode,))
        yield from _weights_in_bypass(source, section)
        if source.get(normalize):
            is_used = _loss(source)[0] == "reinforce"
            why = "verl divides by the mean of a microbatch" if is_used else "there are no weights to divide"
            yield Dropped(normalize, why, is_decisive=is_used)
    elif source.get(REUSED):
        for key in (f"{section}.rollout_is", stage, normalize):
            if source.get(key):
                yield Dropped(
                    key, f"with {REUSED} verl compares the server's log-probabilities with themselves"
                )
        yield Setting("algorithm.mode", "bypass", (REUSED,))
        return
    else:
        if source.has(mode):
            yield Dropped(mode, "false: algorithm.mode follows from the other keys")
        yield from _weights(source, section)
        if source.get(normalize):
            yield from _normalized(source, section)
    if source.get(stage):
        yield from _stages(source, stage)
        yield Setting("algorithm.mode", "bypass" if _is_bypass(source) else "decoupled", (stage,))
        if _is_bypass(source) and updates_per_step(source) > 1:
            why = "judged once per step; in bypass mode verl judges anew at every update"
            yield Dropped(stage, why, is_decisive=True)
        yield from _counted(source, stage)
    elif source.has(f"{stage}_threshold"):
        yield Dropped(f"{stage}_threshold", "without rollout_rs verl rejects nothing")


def _normalized(source: WrittenConfig, section: str) -> Iterator[Finding]:
    """Translate the division of weights by their mean, over a step in verl and over an update here."""
    key, stage = f"{section}.rollout_is_batch_normalize", f"{section}.rollout_rs"
    if not _has_weights(source):
        yield Dropped(key, "without rollout_is verl applies no weight")
        return
    yield Setting("algorithm.correction.self_normalize", True, (key,))
    if minibatches_per_step(source) > 1 or source.get(stage):
        why = "verl divides by the mean of the step, agentrl by that of the tokens that an update accepts"
        yield Dropped(key, why, is_decisive=True)


def _counted(source: WrittenConfig, stage: str) -> Iterator[Finding]:
    """Translate the denominator of a mean over tokens, from which verl takes no rejected token out.

    Its older trainer does, unless the loss itself rejects, as in bypass mode.
    """
    is_bypass = _is_bypass(source)
    is_over_tokens = source.get(AGGREGATION) == "token-mean" and _loss(source)[0] not in MEANS_OF_SEQUENCES
    if is_over_tokens and (is_bypass or source.get("trainer.use_v1")):
        note = "verl divides by all tokens" + ("" if is_bypass else ", unless trainer.use_v1 is false")
        yield Setting("algorithm.correction.denominator", "original", (stage, AGGREGATION), note)
    if is_bypass and (_has_kl_loss(source) or _has_entropy(source)):
        why = "in bypass mode, KL and entropy of rejected tokens stay in verl's loss; here they leave it too"
        yield Dropped(stage, why, is_decisive=True)


def _has_weights(source: WrittenConfig) -> bool:
    """Return whether the policy loss has importance weights."""
    named = (source.get(f"{section}.rollout_is") for section in (CORRECTION, "algorithm"))
    return any(named) or (source.get(OLD_CAP) or 0) > 0


def _weights(source: WrittenConfig, section: str) -> Iterator[Finding]:
    """Translate the weights proximal / behavior. verl applies none unless a script asks for them."""
    weight, level, threshold = (
        f"{section}.{name}" for name in ("rollout_is", "rollout_is_level", "rollout_is_threshold")
    )
    if source.get(weight):
        name, keys = source.get(weight), [weight]
        if name is True:  # verl up to 0.6
            name = source.get(level) or "token"
            keys += [level] if source.has(level) else []
        note = (
            "verl takes the geometric mean of bounded weights"
            if _loss(source)[0] == "gmpo" and name == "token"
            else ""
        )
        yield Setting("algorithm.correction.weight", "geometric" if note else name, tuple(keys), note)
        if note:
            why = f"{note}; agentrl bounds their geometric mean"
            yield Dropped(weight, why, is_decisive=True)
        yield from _cap(threshold, source.get(threshold) or 2.0, "algorithm.correction")
        yield Setting("algorithm.mode", "decoupled", (weight,))
    elif (source.get(OLD_CAP) or 0) > 0:
        yield Setting("algorithm.correction.weight", "token", (OLD_CAP,))
        yield Setting("algorithm.correction.cap", source.get(OLD_CAP), (OLD_CAP,))
        yield Setting("algorithm.mode", "decoupled", (OLD_CAP,))
    else:
        yield Setting(
            "algorithm.correction.weight",
            "none",
            (weight,),
            "as in verl; agentrl's default is token, which corrects for stale data",
        )
        if source.has(threshold):
            yield Dropped(threshold, "without rollout_is verl applies no weight")


def _weights_in_bypass(source: WrittenConfig, section: str) -> Iterator[Finding]:
    """Translate the weights policy / behavior, which belong to the loss itself."""
    weight, threshold = f"{section}.rollout_is", f"{section}.rollout_is_threshold"
    loss = _loss(source)[0]
    if loss == "reinforce":
        yield Setting("algorithm.reinforce.weight", source.get(weight), (weight,))
        yield from _cap(threshold, source.get(threshold) or 2.0, "algorithm.reinforce")
        return
    for key in (weight, threshold):
        if source.has(key):
            yield Dropped(
                key,
                "in bypass mode verl applies no weight with "
                f"{'reinforce without rollout_is' if loss == 'gpg' else loss}",
            )


def _cap(key: str, value: Any, target: str) -> Iterator[Finding]:
    """Translate a bound 2.0, or a band "0.5_2.0", outside of which weights are 0."""
    *floor, cap = _bounds(key, str(value))
    yield Setting(f"{target}.cap", cap, (key,))
    if floor:
        yield Setting(f"{target}.floor", floor[0], (key,))
        yield Setting(f"{target}.outside", "mask", (key,))


def _bounds(key: str, text: str) -> list[float]:
    """Parse "2.0" or "0.5_2.0".

    Raises:
        ConfigError: the text has another form, or a bound is not above 0.
    """
    try:
        bounds = [float(part) for part in text.split("_")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 2 or min(bounds) <= 0:
        raise ConfigError(
            f"{key}={text}: must be a number above 0, or a lower and an upper bound such as 0.5_2.0"
        )
    return bounds


def _stages(source: WrittenConfig, key: str) -> Iterator[Finding]:
    bounds, floor = f"{key}_threshold", f"{key}_threshold_lower"
    names = [name.strip() for name in str(source.get(key)).split(",")]
    texts = [text.strip() for text in str(source.get(bounds)).split(",")]
    if len(texts) not in (1, len(names)):
        raise ConfigError(
            f"{bounds}={source.get(bounds)}: must be one value for all of {key}={source.get(key)}, or one "
            "for each"
        )
    for name, text in zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True):
        stage = _stage(name, _bounds(bounds, text), source.get(floor))
        if stage is None:
            why = f"{name} is unknown; stages are {', '.join(f'{each}_k1' for each in LEVELS)}, k2 and k3 too"
            yield Dropped(key, why, is_decisive=True)
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
        # verl's k1 is log(behavior / proximal), so its bounds are those of the inverse of our ratio.
        return {"level": LEVELS[level], "lower": 1 / upper, "upper": 1 / lower}
    return {"level": LEVELS[level], "statistic": statistic, "upper": upper} if level in LEVELS else None


RULES = (advantages, losses, aggregations, clips, selections, divergences, corrections)
