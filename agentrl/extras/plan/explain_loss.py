"""Explain the algorithm of a config in words: ratio, correction with its stages, and aggregation."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.algorithms.losses import WEIGHT_LEVELS
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.critic import CriticConfig
from agentrl.config.losses import GROUP, loss_named
from agentrl.config.proximal import score_reasons
from agentrl.config.schema import Config
from agentrl.registered import names_of_ours

Lines = list[tuple[str, str]]

DEFAULTS = AlgorithmConfig()
LOSS_KEYS = [keys for name in names_of_ours(GROUP) if (keys := loss_named(name).keys) is not None]

MODES = {
    "decoupled": "ratio policy / proximal{bound}; proximal is the policy at the start of the step",
    "bypass": "ratio policy / behavior{bound}; proximal is the behavior policy itself",
    "on_policy": "ratio is exactly 1; proximal is the policy itself, held constant",
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
        ("policy mode", f"{resolved}: {MODES[mode].format(bound=algorithm.loss.bound(algorithm))}"),
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
    updates = config.learner.minibatches_per_step * config.learner.epochs_per_step
    yield from algorithm.loss.warnings(algorithm, updates)
    for name in LOSS_KEYS:
        if algorithm.loss.keys != name and getattr(algorithm, name) != getattr(DEFAULTS, name):
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
    words = algorithm.loss.words(algorithm)
    return f"{algorithm.policy_loss}, {words}" if words else algorithm.policy_loss


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
        f"proximal / behavior {WEIGHT_LEVELS[correction.weight]}, {floor}at most "
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
