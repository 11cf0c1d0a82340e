"""Translation rules for data, batches and the length of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from agentrl.config.schema import Config
from agentrl.extras.verl.importing.findings import Dropped, Finding, Setting
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.extras.verl.importing.values import SCHEDULES
from agentrl.extras.verl.renamed import RENAMED

ACTOR = "actor_rollout_ref.actor"
MINI = f"{ACTOR}.ppo_mini_batch_size"
BUDGET = "learner.microbatch_tokens"
SCHEDULE_KEYS = ("lr_scheduler_type", "lr_scheduler", "warmup_style", "lr_decay_style")
"""Names of the schedule in the versions and engines of verl."""

PLACES_OF_STATE = ("optimizer_cpu_offload", "optimizer_offload", "overlap_", "use_precision_aware", "fp8_")
"""Beginnings of Megatron's options for where and how the optimizer's state is kept; those for low precision
are refused elsewhere.
"""


def is_asynchronous(source: WrittenConfig) -> bool:
    """Return whether the source is a config of verl's fully asynchronous trainer."""
    return bool(source.below("async_training"))


def minibatches_per_step(source: WrittenConfig) -> int:
    """Return the number of optimizer updates per pass over a batch. verl counts both sizes in prompts."""
    if is_asynchronous(source):
        return int(
            source.get("async_training.require_batches")
            * source.get("async_training.trigger_parameter_sync_step")
        )
    return max(1, source.get("data.train_batch_size") // source.get(MINI))


def groups_per_step(source: WrittenConfig) -> int:
    """Return the number of prompts per batch."""
    if is_asynchronous(source):
        return int(source.get(MINI)) * minibatches_per_step(source)
    return int(source.get("data.train_batch_size"))


def batches(source: WrittenConfig) -> Iterator[Finding]:
    """Translate batches, which both projects count in prompts.

    A minibatch is a size in verl, and a number of them here.
    """
    if is_asynchronous(source):
        sizes = ("async_training.require_batches", "async_training.trigger_parameter_sync_step")
        note = "weights are published after each step: all minibatches between two synchronizations"
        yield Setting("buffer.groups_per_step", groups_per_step(source), (MINI, *sizes), note)
        yield Setting("learner.minibatches_per_step", minibatches_per_step(source), (*sizes, MINI))
        threshold = source.get("async_training.staleness_threshold")
        note = f"{threshold:g} batches in verl; in agentrl a whole number of versions, and a hard bound"
        yield Setting(
            "buffer.max_staleness", math.ceil(threshold), ("async_training.staleness_threshold",), note
        )
        if source.has("data.train_batch_size"):
            yield Dropped("data.train_batch_size", "the asynchronous trainer counts in ppo_mini_batch_size")
        if source.has("rollout.total_rollout_steps"):
            steps = max(1, source.get("rollout.total_rollout_steps") // groups_per_step(source))
            yield Setting(
                "trainer.steps",
                steps,
                ("rollout.total_rollout_steps",),
                "prompts in verl, batches in agentrl",
            )
        return
    yield Setting("buffer.groups_per_step", groups_per_step(source), ("data.train_batch_size",), "prompts")
    rest = source.get("data.train_batch_size") % source.get(MINI)
    note = "train_batch_size / ppo_mini_batch_size" + (", rounded down" if rest else "")
    yield Setting(
        "learner.minibatches_per_step", minibatches_per_step(source), (MINI, "data.train_batch_size"), note
    )
    if not source.has("trainer.v1.sampler.max_off_policy_threshold"):
        yield Setting(
            "buffer.max_staleness",
            0,
            (),
            "verl's trainer is synchronous; with 1, rollouts and learning overlap",
        )


def in_flight(source: WrittenConfig) -> Iterator[Finding]:
    """Translate concurrency: verl starts all attempts of a batch at once."""
    num_actors = source.get("actor_rollout_ref.rollout.agent.num_workers") or 1
    attempts = math.ceil(groups_per_step(source) * source.get("actor_rollout_ref.rollout.n") / num_actors)
    key = "rollout.max_concurrent_trajectories"
    if attempts > Config.model_fields["rollout"].default.max_concurrent_trajectories:
        yield Setting(
            key,
            attempts,
            ("data.train_batch_size", "actor_rollout_ref.rollout.n"),
            "per rollout actor: a batch at once, as in verl",
        )


def microbatches(source: WrittenConfig) -> Iterator[Finding]:
    """Translate microbatches: a budget of tokens here, a number of sequences in verl.

    A sequence has at most the tokens of a prompt and a response.
    """
    ranks = source.get(f"{ACTOR}.ulysses_sequence_parallel_size")
    sizes = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size")
    written = next((key for key in sizes if source.has(key)), None)
    if written is None or source.get(f"{ACTOR}.use_dynamic_bsz"):
        used = f"{ACTOR}.ppo_max_token_len_per_gpu"
        yield Setting(
            BUDGET,
            source.get(used) * ranks,
            (used,),
            "of all ranks that share a microbatch" if ranks > 1 else "",
        )
    else:
        used = written
        longest = source.get("data.max_prompt_length") + source.get("data.max_response_length")
        world = (
            source.get("trainer.nnodes") * source.get("trainer.n_gpus_per_node") if written == sizes[1] else 1
        )
        count = max(1, source.get(written) // world)
        note = f"{count} sequences of at most {longest} tokens"
        yield Setting(
            BUDGET,
            count * longest * ranks,
            (written, "data.max_prompt_length", "data.max_response_length"),
            note,
        )
    for key, ours in RENAMED.items():
        if key != used and ours.partition("; ")[0] == BUDGET and source.has(key):
            yield Dropped(key, f"all passes of the learner share {BUDGET}, and {used} sets its size")


def warmups(source: WrittenConfig) -> Iterator[Finding]:
    """Translate warm-up, which is counted in trainer steps in verl and in optimizer updates here.

    verl's asynchronous trainer makes several of its steps between two publishes.
    """
    is_async = is_asynchronous(source)
    minibatches = source.get("async_training.require_batches") if is_async else minibatches_per_step(source)
    updates = minibatches * source.get(f"{ACTOR}.ppo_epochs")
    for optimizer, ours in ((f"{ACTOR}.optim", "learner.optimizer"), ("critic.optim", "critic.optimizer")):
        steps, ratio = f"{optimizer}.lr_warmup_steps", f"{optimizer}.lr_warmup_steps_ratio"
        note = f"{updates} updates per step" if updates > 1 else ""
        total = source.get("trainer.total_training_steps")
        if source.has(steps) and source.get(steps) > 0:
            yield Setting(f"{ours}.warmup_updates", source.get(steps) * updates, (steps,), note)
        elif source.has(ratio) and source.get(ratio) > 0 and total:
            yield Setting(
                f"{ours}.warmup_updates",
                round(source.get(ratio) * total) * updates,
                (ratio, "trainer.total_training_steps"),
                note,
            )
        elif source.has(ratio) and source.get(ratio) > 0:
            yield Dropped(
                ratio,
                "a share of the number of steps, which is unknown before the data is read; give "
                f"trainer.total_training_steps too, or set {ours}.warmup_updates",
                is_decisive=True,
            )
        else:
            yield from (
                Setting(f"{ours}.warmup_updates", 0, (key,)) for key in (steps, ratio) if source.has(key)
            )


def schedule_key(source: WrittenConfig, section: str) -> str:
    """Return the key of an optimizer's schedule: as set, else with a default of verl."""
    keys = [f"{section}.{name}" for name in SCHEDULE_KEYS]
    return next(
        (key for key in keys if source.has(key)), next((key for key in keys if source.get(key)), keys[0])
    )


def decays(source: WrittenConfig) -> Iterator[Finding]:
    """Refuse another end of the schedule, which here decays to 0 over the whole run."""
    for section in (f"{ACTOR}.optim", "critic.optim", "optim"):
        schedule = source.get(schedule_key(source, section))
        for name, plain in {"min_lr_ratio": 0, "min_lr": 0, "num_cycles": 0.5, "lr_decay_steps": 0}.items():
            key = f"{section}.{name}"
            if not source.has(key) or source.get(key) == plain:
                continue
            if schedule in SCHEDULES and schedule != "constant":
                why = "the learning rate decays to 0 over the run; set learner.optimizer.schedule otherwise"
                yield Dropped(key, why, is_decisive=True)
            else:
                yield Dropped(key, "without effect in verl: the learning rate is constant")


def optimizers(source: WrittenConfig) -> Iterator[Finding]:
    """Refuse another optimizer than AdamW. Where Megatron keeps its state is no other optimizer."""
    for section in (f"{ACTOR}.optim", "critic.optim", "optim"):
        name, module = f"{section}.optimizer", f"{section}.optimizer_impl"
        if source.has(name) and str(source.get(name)).lower() not in ("adam", "adamw"):
            yield Dropped(name, "the optimizer is AdamW", is_decisive=True)
        if source.has(module) and source.get(module) != "torch.optim":
            yield Dropped(module, "the optimizer is torch's AdamW", is_decisive=True)
        for option, value in source.below(f"{section}.override_optimizer_config").items():
            if value and not option.startswith(PLACES_OF_STATE):
                key = f"{section}.override_optimizer_config.{option}"
                yield Dropped(key, "the optimizer has no such option", is_decisive=True)


def classes(source: WrittenConfig) -> Iterator[Finding]:
    """Refuse a class of the user's that chooses rows."""
    for name in ("class_path", "class_name"):
        if source.get(f"data.sampler.{name}"):
            why = "your own sampler; order comes from data.shuffle, trainer.seed and data.curriculum"
            yield Dropped(f"data.sampler.{name}", why, is_decisive=True)


def overlong_prompts(source: WrittenConfig) -> Iterator[Finding]:
    """Translate filtering and truncation of prompts, which are one key here."""
    keys = ("data.filter_overlong_prompts", "data.truncation")
    cuts = {"error": "error", "left": "truncate_left", "right": "truncate_right", "middle": "truncate_middle"}
    choice: Any = "filter" if source.get(keys[0]) else cuts.get(source.get(keys[1]))
    if choice is not None:
        yield Setting("data.overlong_prompts", choice, keys)
    else:
        yield Dropped(keys[1], f"{source.get(keys[1])} is unknown; available: {', '.join(cuts)}")


def resume(source: WrittenConfig) -> Iterator[Finding]:
    """Translate resuming; the path to resume from is the value of the mode itself here."""
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if source.get(mode) == "resume_path" and source.has(path):
        yield Setting("trainer.resume_mode", source.get(path), (mode, path))
    elif source.has(path):
        yield Dropped(path, f"without effect in verl: resume_mode is {source.get(mode)}")


RULES = (batches, in_flight, microbatches, warmups, decays, optimizers, classes, overlong_prompts, resume)
