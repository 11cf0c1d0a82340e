"""Explain the algorithm of a config in words: ratio, correction with its stages, and aggregation."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.algorithm import AlgorithmConfig, DPPOConfig, ReinforceConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.critic import CriticConfig
from agentrl.config.proximal import score_reasons
from agentrl.config.schema import Config

Lines = list[tuple[str, str]]

DEFAULTS = AlgorithmConfig()

MODES = {
    "decoupled": "ratio policy / proximal{bound}; proximal is the policy at the start of the step",
    "bypass": "ratio policy / behavior{bound}; proximal is the behavior policy itself",
    "on_policy": "ratio is exactly 1; proximal is the policy itself, held constant",
}

_WEIGHT_LEVELS = {
    "token": "per token",
    "sequence": "multiplied over the sequence",
    "geometric": "in the geometric mean of the sequence",
}
_LEVELS = {
    "token": "of a token",
    "sequence_sum": "summed over a sequence",
    "sequence_mean": "in the mean of a sequence",
    "sequence_max": "of the most extreme token of a sequence",
}
_STATISTICS = {"k1": "rho'", "k2": "(log rho')^2 / 2", "k3": "rho' - 1 - log rho'"}


def loss_lines(config: Config) -> Lines:
    """Return the lines about the policy loss, its correction, aggregation, KL and entropy."""
    algorithm, mode = config.algorithm, config.policy_mode
    rejected = _rejected(algorithm.correction, is_bypass=mode == "bypass")
    resolved = f"{mode} (auto)" if algorithm.mode == "auto" else mode
    counted = ", rejected tokens counted" if algorithm.correction.denominator == "original" else ""
    lines = [
        ("policy loss", _policy_loss(algorithm)),
        ("policy mode", f"{resolved}: {MODES[mode].format(bound=_bound(algorithm))}"),
        *(("scored" if number == 0 else "", text) for number, text in enumerate(_scored(config))),
        ("importance weight", _weight(config)),
        *(("rejected" if number == 0 else "", text) for number, text in enumerate(rejected)),
        ("aggregation", algorithm.aggregation + _constant_length(config) + counted),
        ("KL", _kl(algorithm)),
        *_teacher(config),
        ("entropy bonus", f"{algorithm.entropy_coefficient:g}" if algorithm.entropy_coefficient else "none"),
    ]
    if config.buffer.drop_constant_groups:
        lines.append(("groups", "without variance are dropped and replaced before a batch is formed"))
    return lines


def critic_lines(config: Config) -> Lines:
    """Return the lines about the critic; empty without a critic."""
    if not config.has_critic:
        return []
    critic, updates = config.critic, config.learner.minibatches_per_step * config.critic_epochs
    start = critic.model.path or "model.path"
    bound = (
        "plain squared error"
        if critic.cliprange_value is None
        else f"values move at most {critic.cliprange_value:g} per step"
    )
    warmup = f", alone in the first {critic.warmup_steps:,} steps" if critic.warmup_steps else ""
    return [
        (
            "critic",
            f"from {start}, learning rate {critic.optimizer.lr:g}, {updates:,} update(s) per step{warmup}",
        ),
        ("value loss", f"{bound}; aggregated as the policy loss"),
    ]


def loss_warnings(config: Config) -> Iterator[str]:
    """Yield one sentence for each setting of the loss that works but is probably a mistake."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    if algorithm.constant_length is not None and algorithm.aggregation != "constant":
        yield (
            f"algorithm.constant_length={algorithm.constant_length} has no effect with "
            f"algorithm.aggregation={algorithm.aggregation}"
        )
    if config.policy_mode == "decoupled" and correction.weight == "none" and config.buffer.max_staleness > 0:
        yield (
            f"algorithm.correction.weight=none with buffer.max_staleness={config.buffer.max_staleness}:"
            " old tokens are trained on as if they were new"
        )
    if correction.max_lag is not None and correction.max_lag >= config.buffer.max_staleness:
        yield (
            f"algorithm.correction.max_lag={correction.max_lag} has no effect: the buffer drops all that is "
            f"older than buffer.max_staleness={config.buffer.max_staleness}"
        )
    if (
        algorithm.policy_loss == "gpg"
        and (config.learner.minibatches_per_step * config.learner.epochs_per_step) > 1
    ):
        yield (
            "algorithm.policy_loss=gpg has no trust region: with several updates per step, nothing "
            "keeps the policy close to the one that sampled the data"
        )
    yield from _gspo_warnings(algorithm)
    for name in ("reinforce", "sapo", "clip_cov", "kl_cov", "dppo_tv"):
        if algorithm.policy_loss != name and getattr(algorithm, name) != getattr(DEFAULTS, name):
            yield (
                f"the keys of algorithm.{name} have no effect with "
                f"algorithm.policy_loss={algorithm.policy_loss}"
            )
    if config.policy_mode != "decoupled" and (correction.floor is not None or correction.outside == "mask"):
        yield (
            "algorithm.correction.floor and outside have no effect: with the policy mode "
            f"{config.policy_mode} no weight enters the loss"
        )
    if not config.has_critic and config.critic != CriticConfig():
        yield (
            f"the keys of critic have no effect with algorithm.advantage={algorithm.advantage}, which needs "
            "no critic"
        )
    if (
        config.has_critic
        and config.trainer.steps is not None
        and config.critic.warmup_steps >= config.trainer.steps
    ):
        yield (
            f"critic.warmup_steps={config.critic.warmup_steps} is the whole run of {config.trainer.steps} "
            "steps: the policy never learns"
        )
    if algorithm.distillation.replaces_rewards and config.buffer.drop_constant_groups:
        yield (
            "buffer.drop_constant_groups drops groups because of rewards that "
            "algorithm.distillation.with_rewards=false learns nothing from"
        )
    if not algorithm.distillation.is_used and algorithm.distillation != DEFAULTS.distillation:
        yield "the keys of algorithm.distillation have no effect without a teacher"
    if algorithm.kl.off_policy_ratio and algorithm.kl.place == "reward":
        yield "algorithm.kl.off_policy_ratio has no effect with algorithm.kl.place=reward"
    if algorithm.kl.off_policy_ratio and not algorithm.kl.coefficient:
        yield "algorithm.kl.off_policy_ratio has no effect with algorithm.kl.coefficient=0"


def _gspo_warnings(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.policy_loss != "gspo":
        return
    if algorithm.clip_high > 0.05:
        yield (
            f"algorithm.clip_high={algorithm.clip_high:g} with policy_loss=gspo clips nothing: a sequence's "
            "mean log-ratio hardly moves; the paper has clip_low=3e-4, clip_high=4e-4"
        )
    if algorithm.aggregation != "sequence_mean_token_mean":
        yield (
            f"algorithm.aggregation={algorithm.aggregation} with policy_loss=gspo weighs a sequence by its "
            "length; the paper has sequence_mean_token_mean"
        )


def _scored(config: Config) -> list[str]:
    """Return whether the learner scores the batch before the first update, with each reason."""
    reasons = score_reasons(config)
    if reasons:
        return [f"by the policy before the first update: {reason}" for reason in reasons]
    if config.policy_mode == "decoupled":
        return [
            "not before the update: its own forward gives proximal (unless a trajectory is longer than a "
            "microbatch)"
        ]
    return ["not before the update: nothing needs it"]


def _policy_loss(algorithm: AlgorithmConfig) -> str:
    details = {
        "sapo": f"gates with temperature {algorithm.sapo.tau_positive:g} (A > 0) and "
        f"{algorithm.sapo.tau_negative:g}",
        "clip_cov": f"{algorithm.clip_cov.share:g} of the tokens left out because of their covariance",
        "kl_cov": f"{algorithm.kl_cov.share:g} of the tokens penalized by {algorithm.kl_cov.coefficient:g} "
        "|log ratio|",
        "dppo_tv": _trust_region(algorithm.dppo_tv),
        "reinforce": _reinforce(algorithm.reinforce),
    }
    dual = algorithm.policy_loss in ("ppo_clip", "clip_cov") and algorithm.dual_clip is not None
    parts = [
        details.get(algorithm.policy_loss, ""),
        f"at most {algorithm.dual_clip:g} |A| where A < 0" if dual else "",
    ]
    return ", ".join([algorithm.policy_loss, *(part for part in parts if part)])


def _trust_region(config: DPPOConfig) -> str:
    cap = "" if config.cap is None else f", and is weighted by a ratio of at most {config.cap:g}"
    return f"a token may lose {config.delta_low:g} and gain {config.delta_high:g} of its probability{cap}"


def _reinforce(config: ReinforceConfig) -> str:
    floor = "" if config.floor is None else f", at least {config.floor:g}"
    cap = ", without a bound" if config.cap is None else f", at most {config.cap:g}"
    outside = ", 0 outside" if config.outside == "mask" else ""
    return f"weighted by the ratio {_WEIGHT_LEVELS[config.weight]}{floor}{cap}{outside}"


def _bound(algorithm: AlgorithmConfig) -> str:
    low, high = algorithm.clip_low, algorithm.clip_high
    return {
        "gspo": f" of a sequence clipped to [{1 - low:g}, {1 + high:g}]",
        "gmpo": f" clipped to [e^-{low:g}, e^{high:g}], in the geometric mean of a sequence",
        "cispo": f" bounded to [{1 - low:g}, {1 + high:g}] as a weight",
        "ppo_clip": f" clipped to [{1 - low:g}, {1 + high:g}]",
        "clip_cov": f" clipped to [{1 - low:g}, {1 + high:g}]",
    }.get(algorithm.policy_loss, "")


def _weight(config: Config) -> str:
    if config.policy_mode != "decoupled":
        return "none enters the loss"
    correction = config.algorithm.correction
    if correction.weight == "none":
        return "none: the age of tokens is not corrected"
    floor = "" if correction.floor is None else f"at least {correction.floor:g}, "
    outside = ", 0 outside" if correction.outside == "mask" else ""
    normal = ", mean 1 over the update" if correction.self_normalize else ""
    return (
        f"proximal / behavior {_WEIGHT_LEVELS[correction.weight]}, {floor}at most "
        f"{correction.cap:g}{outside}{normal}"
    )


def _rejected(correction: CorrectionConfig, *, is_bypass: bool) -> Iterator[str]:
    ours = "learner at the start of the step" if is_bypass else "proximal"
    if correction.max_lag is not None:
        yield f"max_lag: tokens older than {correction.max_lag} versions"
    for name, stage in correction.reject.items():
        yield (
            f"{name}: {_STATISTICS[stage.statistic]} {_LEVELS[stage.level]} {_outside(stage)}; rho' = {ours} "
            "/ behavior"
        )
    if correction.m2po_threshold is not None:
        yield f"m2po: the largest (log rho')^2 until their mean is at most {correction.m2po_threshold:g}"
    if correction.opsm_delta is not None:
        yield f"opsm: sequences with A < 0 and a mean log(behavior / policy) above {correction.opsm_delta:g}"


def _outside(stage: RejectionConfig) -> str:
    if stage.lower is None:
        return f"above {stage.upper:g}"
    return f"below {stage.lower:g}" + ("" if stage.upper is None else f" or above {stage.upper:g}")


def _constant_length(config: Config) -> str:
    if config.algorithm.aggregation != "constant":
        return ""
    return (
        f", by {config.algorithm.constant_length or config.agent.max_response_tokens:,} tokens per trajectory"
    )


def _kl(algorithm: AlgorithmConfig) -> str:
    if not algorithm.kl.coefficient:
        return "none; no reference is loaded"
    if algorithm.kl.place == "reward":
        adapted = (
            ""
            if algorithm.kl.target is None
            else f", adapted to a mean of {algorithm.kl.target:g} nats per token"
        )
        return (
            f"{algorithm.kl.coefficient:g} x {algorithm.kl.estimator} to the reference, subtracted from the "
            f"reward of each token{adapted}"
        )
    ratio = " x policy / proximal" if algorithm.kl.off_policy_ratio else ""
    return f"{algorithm.kl.coefficient:g} x {algorithm.kl.estimator}{ratio} to the reference"


def _teacher(config: Config) -> Iterator[tuple[str, str]]:
    own = config.algorithm.distillation
    if not own.is_used:
        return
    reach = "of the token" if own.gamma == 0 else f"of the token and, times {own.gamma:g} each, of later ones"
    added = "added to the advantage" if own.with_rewards else "in place of the advantage of the rewards"
    forwards = (
        "a forward of it" if config.policy_mode == "bypass" else "a forward of it and one of the policy"
    )
    yield "teacher", f"{own.teacher}: {forwards} before credit"
    yield "", f"-{own.coefficient:g} x log(policy / teacher) {reach}, {added}"
