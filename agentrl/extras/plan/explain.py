"""Explain a config in numbers: batch, bound on staleness, loss, and warnings about likely mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentrl.config.distillation import TEACHER_SERVERS
from agentrl.config.estimators import ESTIMATOR_KEYS
from agentrl.config.explain_inputs import context_warning
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import LoRAConfig
from agentrl.config.model_kind import find_obstacles
from agentrl.config.opponents import opponent_key
from agentrl.config.placement import PlacementConfig, Role
from agentrl.config.schema import Config
from agentrl.extras.plan.explain_cpu import cpu_lines, cpu_model, memory_warning
from agentrl.extras.plan.explain_images import image_lines, image_warnings
from agentrl.extras.plan.explain_loss import critic_lines, loss_lines, loss_warnings
from agentrl.extras.plan.explain_memory import memory_lines
from agentrl.extras.plan.explain_publish import publish_line
from agentrl.extras.plan.input_warnings import input_warnings
from agentrl.granted import granted

LABEL_WIDTH = 26


@dataclass(frozen=True)
class RunSize:
    """The numbers that follow from a config.

    Tokens and microbatches are upper bounds, reached if every trajectory is full.
    """

    groups: int
    trajectories: int
    longest_tokens: int
    tokens: int
    updates: int
    trajectories_per_rank_and_update: int
    microbatches_per_rank_and_update: int
    capacity: int
    admitted_groups: int

    @classmethod
    def of(cls, config: Config) -> RunSize:
        groups, size = config.buffer.groups_per_step, config.rollout.group_size
        longest = config.data.max_prompt_tokens + config.agent.max_response_tokens
        minibatch_groups = _ceil(groups, config.learner.minibatches_per_step)
        per_rank = _ceil(minibatch_groups * size, config.learner.dp_size)
        per_microbatch = max(1, config.learner.microbatch_tokens // longest)
        return cls(
            groups=groups,
            trajectories=groups * size,
            longest_tokens=longest,
            tokens=groups * size * longest,
            updates=config.learner.minibatches_per_step * config.learner.epochs_per_step,
            trajectories_per_rank_and_update=per_rank,
            microbatches_per_rank_and_update=_ceil(per_rank, per_microbatch),
            capacity=config.rollout.num_actors * config.rollout.max_concurrent_trajectories,
            admitted_groups=(config.buffer.max_staleness + 1) * groups,
        )


def explain(config: Config, *, num_train_rows: int | None = None, flops_per_s: float | None = None) -> str:
    """Return the arithmetic of a run as text.

    `num_train_rows` adds the figures that depend on the size of the data; `flops_per_s`, of a large matrix
    product on one thread, adds times of a model on CPUs.
    """
    numbers = RunSize.of(config)
    parts = [
        ("One step", _step_lines(config, numbers)),
        ("Asynchrony", _asynchrony_lines(config, numbers)),
        ("Loss", [("advantage", _advantage(config)), *critic_lines(config), *loss_lines(config)]),
        ("Run", _run_lines(config, num_train_rows)),
        ("Placement", list(placement_lines(config.placement, config.num_ranks))),
    ]
    if lines := memory_lines(config):
        parts.append(("Memory", lines))
    if (size := cpu_model(config)) is not None:
        parts.append(("On CPUs", cpu_lines(config, size, flops_per_s=flops_per_s)))
    text = "\n\n".join(
        f"{title}\n" + "\n".join(f"  {_padded(label)}{value}" for label, value in lines)
        for title, lines in parts
    )
    warnings = [
        *input_warnings(
            config.model.path, config.data.train_files, is_prepared=bool(config.trainer.prepared_by)
        ),
        *find_warnings(config, num_train_rows=num_train_rows),
    ]
    if (too_long := context_warning(config)) is not None:
        warnings.append(too_long)
    if (too_large := memory_warning(config, granted_bytes=granted().memory_bytes)) is not None:
        warnings.append(too_large)
    return text + (
        "\n\nWarnings\n" + "\n".join(f"  - {warning}" for warning in warnings)
        if warnings
        else "\n\nNo warnings"
    )


def _padded(label: str) -> str:
    return f"{label:<{LABEL_WIDTH}}" if len(label) < LABEL_WIDTH else f"{label}  "


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Lines = list[tuple[str, str]]


def _step_lines(config: Config, numbers: RunSize) -> Lines:
    learner = config.learner
    cut = f"{learner.minibatches_per_step:,} per epoch x {_count(learner.epochs_per_step, 'epoch')}"
    lines = [
        ("tasks (groups)", f"{numbers.groups:,}"),
        (
            "trajectories",
            f"{numbers.trajectories:,} = {numbers.groups:,} groups x {config.rollout.group_size:,}",
        ),
        (
            "tokens",
            f"at most {numbers.tokens:,} = {numbers.trajectories:,} x {numbers.longest_tokens:,} (prompt + "
            "response)",
        ),
        ("optimizer updates", f"{numbers.updates:,} = {cut}"),
        (
            "microbatches",
            f"at most {numbers.microbatches_per_rank_and_update:,} per update on each of "
            f"{_data_ranks(learner)} ({numbers.trajectories_per_rank_and_update:,} full trajectories in "
            f"packs of {learner.microbatch_tokens:,} tokens)",
        ),
        ("then", "publish one new version of the weights"),
    ]
    return (
        [*lines[:2], ("reward model", _reward_model(config)), *lines[2:]]
        if config.reward_model.is_used
        else lines
    )


def _reward_model(config: Config) -> str:
    own = config.reward_model
    bound = "as many as the model has positions" if own.max_tokens is None else f"at most {own.max_tokens:,}"
    cut = {"truncate": "longer ones are cut at the beginning", "skip": "longer ones get no score"}[
        own.overlong
    ]
    return (
        f"{own.model.path} on {_count(own.world_size, 'rank')} ({own.model.dtype}) scores every trajectory, "
        f"{bound} tokens; {cut}; asked by {', '.join(config.asks_reward_model)}"
    )


def _data_ranks(learner: LearnerConfig) -> str:
    if learner.num_replicas == 1:
        return _count(learner.world_size, "rank")
    parts = {"tokens": learner.sequence_parallel, "matrices": learner.tensor_parallel}
    what = " and ".join(f"the {name}" for name, size in parts.items() if size > 1)
    return f"{_count(learner.dp_size, 'set')} of {learner.num_replicas:,} ranks (a part of {what} each)"


def _asynchrony_lines(config: Config, numbers: RunSize) -> Lines:
    staleness = config.buffer.max_staleness
    admitted = numbers.admitted_groups * config.attempts_per_group
    overlap = (
        "rollouts wait while the learner works"
        if staleness == 0
        else "rollouts go on while the learner works"
    )
    return [
        ("bound on lag", f"{_count(staleness, 'version')}: no older token is trained on; {overlap}"),
        (
            "groups admitted",
            f"{numbers.admitted_groups:,} leased or ready = ({staleness} + 1) x {numbers.groups:,}, "
            f"{admitted:,} trajectories",
        ),
        (
            "trajectories in flight",
            f"at most {min(numbers.capacity, admitted):,} (room for {numbers.capacity:,} = "
            f"{_count(config.rollout.num_actors, 'actor')} x {config.rollout.max_concurrent_trajectories:,})",
        ),
        (
            "longest trajectory",
            f"{numbers.longest_tokens:,} tokens, {_count(config.agent.max_turns, 'turn')}, "
            f"{config.agent.trajectory_timeout_s:g} s",
        ),
        publish_line(
            config,
            num_in_flight=min(numbers.capacity, admitted),
            longest_tokens=numbers.longest_tokens,
        ),
    ]


def _advantage(config: Config) -> str:
    algorithm, size = config.algorithm, config.rollout.group_size
    if algorithm.distillation.replaces_rewards:
        return "the teacher's alone; rewards are only reported"
    whitened = ", whitened over the batch" if algorithm.whiten else ""
    estimator = algorithm.estimator
    if "critic" in estimator.reads:
        return (
            f"{algorithm.advantage} over {estimator.steps} with gamma {algorithm.gamma:g}, lambda "
            f"{algorithm.lam:g}{whitened}"
        )
    scope = (
        f"over groups of {size:,}"
        if estimator.compares == "group"
        else f"over {_count(size, 'attempt')} per task"
    )
    beside = " and a greedy one" if config.has_greedy else ""
    return f"{algorithm.advantage} {scope}{beside}{whitened}"


def _run_lines(config: Config, num_train_rows: int | None) -> Lines:
    trainer, groups = config.trainer, config.buffer.groups_per_step
    if config.data.max_train_rows is not None and num_train_rows is not None:
        num_train_rows = min(num_train_rows, config.data.max_train_rows)
    lines = [*_adapter_lines(config.model.lora), *image_lines(config)]
    if num_train_rows is not None:
        lines.append(
            ("one epoch", f"{num_train_rows / groups:,.1f} steps = {num_train_rows:,} rows / {groups:,}")
        )
    if trainer.steps is not None:
        lines.append(("steps", f"{trainer.steps:,} (trainer.steps), {trainer.steps * groups:,} tasks"))
    elif num_train_rows is not None:
        lines.append(
            (
                "steps",
                f"{num_train_rows * trainer.total_epochs // groups:,} = "
                f"{_count(trainer.total_epochs, 'epoch')} of {num_train_rows:,} rows",
            )
        )
    else:
        lines.append(
            ("steps", f"{_count(trainer.total_epochs, 'epoch')} of the training rows (trainer.total_epochs)")
        )
    lines.append(("tasks", config.data.curriculum.summary))
    lines.append(
        (
            "checkpoints",
            "never"
            if trainer.save_freq == -1
            else f"every {_count(trainer.save_freq, 'step')}, the last {trainer.keep_last} kept",
        )
    )
    lines.append(("validation", _validation(config)))
    return [*lines, *_frozen_lines(config)]


def _frozen_lines(config: Config) -> Lines:
    """Return a line for each frozen model: an opponent, or a teacher on servers."""
    intervals = {opponent_key(name): one.refresh_steps for name, one in config.agent.opponents.items()}
    lines = []
    for plan in config.frozen_plans:
        every = intervals.get(plan.key)
        follows = "" if every is None else f"; the policy takes its place every {_count(every, 'step')}"
        if every is not None and config.trainer.steps is not None and every >= config.trainer.steps:
            follows += f", not before this run of {_count(config.trainer.steps, 'step')} ends"
        where = f"on {_count(plan.rollout.num_started, 'server')} that the run starts"
        lines.append((plan.key, f"{plan.model.path} {where}{follows}"))
    attached = {opponent_key(name): one.urls for name, one in config.agent.opponents.items()}
    attached[TEACHER_SERVERS] = config.algorithm.distillation.servers.urls
    return lines + [(key, f"attached: {', '.join(urls)}") for key, urls in attached.items() if urls]


def _adapter_lines(lora: LoRAConfig) -> Lines:
    if lora.rank == 0:
        return []
    layers = ", ".join(lora.target_modules) or "all linear layers but the head"
    start = f"continued from {lora.path}" if lora.path else "new, adds nothing at first"
    own: Lines = [("adapter", f"{start}; rank {lora.rank}, alpha {lora.alpha:g}, on {layers}")]
    return own + [
        (f"adapter {name}", f"as large, new; speaks in the conversations {', '.join(conversations)}")
        for name, conversations in lora.roles.items()
    ]


def _validation(config: Config) -> str:
    sampling = "greedy" if config.eval.temperature == 0 else f"at temperature {config.eval.temperature:g}"
    if not config.data.val_files:
        return "none: no data.val_files"
    trainer = config.trainer
    when = ["before the first step"] if trainer.val_before_train else []
    if trainer.val_only:
        when = ["of the model as it is"]
    elif trainer.test_freq > 0:
        when += [f"every {_count(trainer.test_freq, 'step')}", "at the end"]
    if not when:
        return "none: trainer.test_freq=-1 and trainer.val_before_train=false"
    return f"{', '.join(when)}; {_count(config.eval.n, 'attempt')} per row, {sampling}"


def find_warnings(config: Config, *, num_train_rows: int | None = None) -> Iterator[str]:
    """Yield one sentence for each combination that works but is probably a mistake."""
    yield from _warnings_of_what_will_not_run(config)
    yield from _rollout_warnings(config)
    yield from _learner_warnings(config)
    yield from _advantage_warnings(config)
    yield from _validation_warnings(config)
    yield from _curriculum_warnings(config, num_train_rows)
    if num_train_rows is not None and num_train_rows < config.buffer.groups_per_step:
        yield (
            f"{num_train_rows} training rows are fewer than "
            f"buffer.groups_per_step={config.buffer.groups_per_step}: a batch holds several groups of the "
            "same row"
        )


def _warnings_of_what_will_not_run(config: Config) -> Iterator[str]:
    """Yield the obstacles that `agentrl config import` also reports for a config of verl."""
    for key, path in (("model.path", config.model.path), ("critic.model.path", config.critic.model.path)):
        yield from (
            f"{key}={path} will not run: it is {what}" for what in (find_obstacles(path) if path else ())
        )
    if config.rollout.backend != "sglang":
        return
    arguments = config.rollout.sglang.args
    if arguments.get("quantization"):
        yield (
            f"rollout.sglang.args.quantization={arguments['quantization']} will not run: "
            "published weights are unquantized (model.dtype), and a server cannot load them into "
            "quantized weights"
        )
    if _size(arguments, "ep_size", "ep") > 1:
        yield (
            "rollout.sglang.args.ep_size is not tested: nothing checks that servers with expert parallelism "
            "take every update; use tp_size instead"
        )
    spots = config.placement.layout(config.num_ranks).spots
    asked = [("rollout.sglang.args", "servers", arguments)]
    asked += [
        (f"{plan.key}.sglang_args", "frozen_servers", plan.rollout.sglang.args)
        for plan in config.frozen_plans
    ]
    for key, role, own in asked:
        needed = _size(own, "tp_size", "tp") * _size(own, "pp_size", "pp")
        given = [spot.num_gpus for name, places in spots.items() if name == role for spot in places]
        if given and 0 < given[0] < needed:
            yield (
                f"{key} asks for {needed} GPUs per server (tp_size x pp_size), but each has {given[0]:g}: it "
                "will not run; give the servers a pool of their own, or fewer servers"
            )


def _size(arguments: Mapping[str, object], *names: str) -> int:
    """Return an integer from SGLang's arguments, under any of its names; 1 if it is not set."""
    value = next((arguments[name] for name in names if name in arguments), 1)
    return value if isinstance(value, int) else 1


def _rollout_warnings(config: Config) -> Iterator[str]:
    rollout, agent, numbers = config.rollout, config.agent, RunSize.of(config)
    yield from image_warnings(config)
    if config.attempts_per_group > rollout.max_concurrent_trajectories:
        yield (
            f"a group of {config.attempts_per_group} attempts exceeds "
            f"rollout.max_concurrent_trajectories={rollout.max_concurrent_trajectories}: an actor "
            "cannot play a whole group at the same time, so its members wait for each other"
        )
    elif numbers.capacity < numbers.trajectories:
        yield (
            f"room for {numbers.capacity} trajectories in flight is less than one batch of "
            f"{numbers.trajectories}: raise rollout.max_concurrent_trajectories or rollout.num_actors if the "
            "servers have capacity left"
        )
    if rollout.backend == "embedded" and rollout.num_started:
        room = rollout.embedded.num_blocks * rollout.embedded.page_size
        if room < numbers.longest_tokens:
            yield (
                f"the embedded server's cache of {room:,} tokens is smaller than the longest trajectory of "
                f"{numbers.longest_tokens:,}"
            )
    waves = _ceil(config.attempts_per_group, rollout.max_concurrent_trajectories)
    if config.buffer.lease_timeout_s < waves * agent.trajectory_timeout_s:
        yield (
            f"buffer.lease_timeout_s={config.buffer.lease_timeout_s:g} is less than a group may take "
            f"({waves} x agent.trajectory_timeout_s={agent.trajectory_timeout_s:g}): attempts that are slow "
            "but not stuck are ended and played again; raise it, with room for retries"
        )
    if agent.max_turn_tokens is not None and agent.max_turn_tokens > agent.max_response_tokens:
        yield (
            f"agent.max_turn_tokens={agent.max_turn_tokens} has no effect above "
            f"agent.max_response_tokens={agent.max_response_tokens}"
        )
    for name, limit in (
        ("tool_timeout_s", agent.tool_timeout_s),
        ("interaction_timeout_s", agent.interaction_timeout_s),
    ):
        if limit >= agent.trajectory_timeout_s:
            yield (
                f"agent.{name}={limit:g} is not below "
                f"agent.trajectory_timeout_s={agent.trajectory_timeout_s:g}: one call may use up the whole "
                "trajectory"
            )


def _learner_warnings(config: Config) -> Iterator[str]:
    learner, numbers = config.learner, RunSize.of(config)
    if learner.microbatch_tokens < numbers.longest_tokens:
        yield (
            f"learner.microbatch_tokens={learner.microbatch_tokens} is smaller than the longest "
            f"trajectory of {numbers.longest_tokens} tokens: such a trajectory forms a microbatch "
            "by itself and must fit into memory"
        )
    if config.buffer.groups_per_step % learner.minibatches_per_step:
        yield (
            f"buffer.groups_per_step={config.buffer.groups_per_step} is not a multiple of "
            f"learner.minibatches_per_step={learner.minibatches_per_step}: the updates of a step have "
            "unequal batches"
        )
    if learner.dp_size > _ceil(numbers.groups, learner.minibatches_per_step) * config.rollout.group_size:
        yield (
            f"learner.world_size={learner.world_size} exceeds the trajectories of one update: some ranks "
            "have nothing to learn from"
        )
    if learner.activation_offload and config.placement.device_of("actor") != "cuda":
        yield (
            "learner.activation_offload=true copies activations on CPU ranks and saves nothing: they are in "
            "the host's memory already"
        )
    yield from loss_warnings(config)


def _advantage_warnings(config: Config) -> Iterator[str]:
    algorithm, estimator = config.algorithm, config.algorithm.estimator
    if "columns" in estimator.reads:
        return  # a user's own estimator may read any key
    if config.rollout.greedy_baseline == "always" and "greedy" not in estimator.reads:
        yield (
            f"rollout.greedy_baseline=always has no effect with algorithm.advantage={algorithm.advantage}, "
            "which does not use the greedy reward"
        )
    for key in ESTIMATOR_KEYS:
        value = getattr(algorithm, key)
        if value != type(algorithm).model_fields[key].default and key not in estimator.keys:
            yield f"algorithm.{key}={value} has no effect with algorithm.advantage={algorithm.advantage}"


def _curriculum_warnings(config: Config, num_train_rows: int | None) -> Iterator[str]:
    curriculum, trainer = config.data.curriculum, config.trainer
    if not curriculum.by_pass_rate:
        for key in ("target_pass_rate", "pass_rate_decay", "floor"):
            if (value := getattr(curriculum, key)) != type(curriculum).model_fields[key].default:
                yield f"data.curriculum.{key}={value:g} has no effect without data.curriculum.by_pass_rate"
        return
    num_drawn = None if trainer.steps is None else trainer.steps * config.buffer.groups_per_step
    if (
        trainer.total_epochs == 1
        if num_drawn is None
        else num_train_rows is not None and num_drawn <= num_train_rows
    ):
        yield (
            "data.curriculum.by_pass_rate has no effect in the first epoch, which draws every task once, and "
            "this run has only one"
        )


def _validation_warnings(config: Config) -> Iterator[str]:
    sampling, trainer = config.eval, config.trainer
    if sampling.temperature == 0 and sampling.n > 1:
        yield (
            f"eval.n={sampling.n} greedy attempts (eval.temperature=0) are identical: set a temperature, or "
            "n=1"
        )
    if sampling.temperature == 0 and (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, -1, 0.0):
        yield "eval.top_p, top_k and min_p have no effect on greedy validation (eval.temperature=0)"
    if trainer.test_freq > 0 and not config.data.val_files:
        yield f"trainer.test_freq={trainer.test_freq} without data.val_files: there is nothing to validate on"
    if trainer.val_only and not config.data.val_files:
        yield "trainer.val_only without data.val_files: there is nothing to validate on"
    if config.data.val_files and not (trainer.val_only or trainer.val_before_train or trainer.test_freq > 0):
        yield (
            "data.val_files are never used: set trainer.test_freq, which also validates at the end, or "
            "trainer.val_before_train"
        )
    if trainer.save_freq == -1 and trainer.steps is not None and trainer.steps >= 100:
        yield f"trainer.save_freq=-1: a crash in {trainer.steps} steps loses everything"


def placement_lines(placement: PlacementConfig, num_ranks: Mapping[Role, int]) -> Iterator[tuple[str, str]]:
    """Yield a line per pool: its nodes, and the number of
    ranks of each role with the GPU share of one rank.
    """
    layout = placement.layout(num_ranks)
    for name, pool in placement.pools_in_use.items():
        nodes = f"{pool.nodes} node{'s' * (pool.nodes > 1)}, " if name in layout.reservations else ""
        size = (
            f"{nodes}{pool.gpus_per_node} GPU{'s' * (pool.gpus_per_node > 1)} each"
            if pool.gpus_per_node
            else f"{nodes}no GPU"
        )
        members = [
            f"{len(spots)} x {role}" + (f" at {spots[0].num_gpus:g} GPU" if spots[0].num_gpus else "")
            for role, spots in layout.spots.items()
            if spots[0].pool == name
        ]
        yield f"pool {name}", f"{size}: {', '.join(members)}"
