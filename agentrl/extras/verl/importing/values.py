"""Conversion of values of single keys of verl to our words and units. All other keys keep their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.config.tracking import TRACKERS as TRACKER_GROUP
from agentrl.extras.verl.importing.findings import NotTaken
from agentrl.registered import names_of_ours

CHARACTERS_PER_TOKEN = 4
"""Approximate value for English text and most tokenizers."""

SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
ATTENTIONS = {"flash_attention_2": "flash_attention_2", "sdpa": "sdpa", "flex_attention": "flex_attention"}
TRACKERS = ("console", *names_of_ours(TRACKER_GROUP))
TOOL_FORMATS = {
    "hermes": "hermes",
    "gpt-oss": "gpt_oss",
    "qwen3_coder": "qwen3_coder",
    "deepseek_v3": "deepseek_v3",
}
TRANSPORTS = {"nccl": "distributed", "hccl": "distributed"}


def one_of(table: Mapping[str, str], *, is_decisive: bool = False) -> Callable[[Any], str]:
    """Return a function that looks up a value in `table`; it raises NotTaken for an unknown value."""

    def look_up(value: Any) -> str:
        if value not in table:
            available = ", ".join(sorted(set(table.values())))
            raise NotTaken(f"{value} has no counterpart; available: {available}", is_decisive=is_decisive)
        return table[value]

    return look_up


def as_list(value: Any) -> list[Any]:
    """Return a list; a single value becomes a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def above_zero(value: Any) -> Any:
    """Return None for 0 and -1, verl's values for "all" and "off"."""
    return value if value > 0 else None


def loggers(value: Any) -> list[str]:
    """Return those trackers that exist here.

    Raises:
        NotTaken: none of them exists.
    """
    known = [name for name in as_list(value) if name in TRACKERS]
    if not known:
        raise NotTaken(
            f"none of {', '.join(as_list(value))} is a tracker of agentrl; available: {', '.join(TRACKERS)}"
        )
    return known


def positive(value: Any) -> Any:
    """Return a number above 0.

    Raises:
        NotTaken: verl uses the value for "none".
    """
    if value is None or value <= 0:
        raise NotTaken(f"{value} means none in verl; in agentrl it is a number above 0")
    return value


def whole(off: float) -> Callable[[Any], Any]:
    """Return a function that accepts only `off`, the value with which sampling truncates nothing."""

    def check(value: Any) -> Any:
        if value != off:
            raise NotTaken(
                f"{value} would truncate the distribution; training must sample from the full distribution",
                is_decisive=True,
            )
        return off

    return check


VALUES: Mapping[str, Callable[[Any], Any]] = {
    "data.train_files": as_list,
    "data.val_files": as_list,
    "data.train_max_samples": above_zero,
    "data.val_max_samples": above_zero,
    "actor_rollout_ref.model.override_config.attn_implementation": one_of(ATTENTIONS),
    **dict.fromkeys(
        (
            f"{optimizer}.{name}"
            for optimizer in ("actor_rollout_ref.actor.optim", "critic.optim")
            for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")
        ),
        one_of(SCHEDULES, is_decisive=True),
    ),
    "actor_rollout_ref.actor.optim.total_training_steps": positive,
    "critic.optim.total_training_steps": positive,
    "reward_model.model.fsdp_config.param_offload": lambda value: "parameters" if value else "none",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": int,
    "actor_rollout_ref.rollout.top_p": whole(1.0),
    # 0 is verl's other value for "off"
    "actor_rollout_ref.rollout.top_k": lambda value: whole(-1)(value or -1),
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": lambda value: max(
        1, math.ceil(value / CHARACTERS_PER_TOKEN)
    ),
    "actor_rollout_ref.rollout.multi_turn.format": one_of(TOOL_FORMATS),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": one_of(TRANSPORTS),
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": lambda value: (
        value * 2**20
    ),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": lambda value: value * 2**20,
    "actor_rollout_ref.actor.tis_imp_ratio_cap": positive,
    "algorithm.filter_groups.max_num_gen_batches": positive,
    "trainer.logger": loggers,
    "trainer.max_actor_ckpt_to_keep": positive,
    "trainer.max_critic_ckpt_to_keep": positive,
    "async_training.use_rollout_log_probs": lambda value: "bypass" if value else "auto",
    "global_profiler.steps": as_list,
    "trainer.profile_steps": as_list,
}

NOT_TAKEN: Mapping[str, str] = {
    # key with a counterpart, but with values of another meaning in verl -> what to do
    "data.custom_cls.path": "a Dataset class in verl; in agentrl, data.reader is `file.py:function`, from a "
    "row to a Task",
    "data.custom_cls.name": "a Dataset class in verl; in agentrl, data.reader is `file.py:function`, from a "
    "row to a Task",
    "data.gen_batch_size": "tasks are drawn one by one, without a generation batch",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": "logits are always computed in chunks "
    "(learner.logprob_chunk_tokens)",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "classes that handle tokens in verl; "
    "write the loop as a plugin (`agentrl new agent NAME`) and name its file in agent.plugins",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "it is set per tool: "
    "agent.tool_limits.<tool>.keep is head, tail or ends",
    "async_training.partial_rollout": "an interrupted turn is always continued",
    "rollout.total_epochs": "trainer.total_epochs counts",
    "reward_model.n_gpus_per_node": "set reward_model.world_size to its total number of ranks",
    "reward_model.model.fsdp_config.fsdp_size": "set reward_model.fsdp.shard_size beside "
    "reward_model.world_size, which it divides",
    "reward_model.micro_batch_size": "sequences in verl; reward_model.microbatch_tokens is a budget of "
    "tokens",
    "reward_model.micro_batch_size_per_gpu": "sequences in verl; reward_model.microbatch_tokens is a budget "
    "of tokens",
    "reward_model.nnodes": "set reward_model.world_size to its total number of ranks",
}
