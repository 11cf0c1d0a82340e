"""Obstacles: settings with which an imported training would not run here, or would not do the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentrl.config.model_kind import find_obstacles
from agentrl.extras.verl.importing.gpus import STAGES, WIDTH, find_layout
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.extras.verl.importing.tool_files import find_unloadable

ROLLOUT = "actor_rollout_ref.rollout"
SHARDED = "the learner shards with FSDP2 over all its ranks"
PARALLEL: Mapping[str, tuple[str, str]] = {
    # suffix of a key of the learner's engine -> its name, and the alternative here
    "tensor_model_parallel_size": (
        "tensor parallelism of Megatron",
        f"{SHARDED}; learner.tensor_parallel splits Llama and Qwen",
    ),
    "pipeline_model_parallel_size": ("pipeline parallelism", SHARDED),
    "virtual_pipeline_model_parallel_size": ("pipeline parallelism", SHARDED),
    "context_parallel_size": (
        "context parallelism",
        f"{SHARDED}; learner.sequence_parallel splits long sequences",
    ),
    "expert_model_parallel_size": (
        "expert parallelism of Megatron",
        f"{SHARDED}; learner.expert_parallel divides experts over ranks",
    ),
    "expert_tensor_parallel_size": ("expert parallelism", SHARDED),
    "expert_parallel_size": ("expert parallelism", SHARDED),
}
ENGINES = re.compile(r"(actor_rollout_ref\.(actor|model)|critic|engine|model_engine)(\.|$)")
SWITCHES: Mapping[str, str] = {
    # switch -> the missing feature
    "algorithm.use_pf_ppo": "trajectories are not reweighted by their reward",
    "distillation.enabled": "set the teacher by hand: algorithm.distillation (docs/algorithms.md)",
    "actor_rollout_ref.model.mtp.enable": "multi-token prediction heads are neither trained nor used",
    "actor_rollout_ref.actor.qat.enable": "weights are not trained for quantized serving",
    "actor_rollout_ref.actor.fsdp_config.qat.enable": "weights are not trained for quantized serving",
    f"{ROLLOUT}.skip_rollout": "rollouts are not replaced by stored ones",
    f"{ROLLOUT}.over_sample_rate": "no attempt is ended because others were faster",
    "model.mtp.enable": "multi-token prediction heads are neither trained nor used",
}
MEDIA = {"data.image_key": "images", "data.video_key": "videos", "data.audio_key": "audios"}
"""Keys for columns other than text, with verl's defaults."""
MODELS = ("actor_rollout_ref.model.path", "critic.model.path", "model.path", "model.partial_pretrain")
LOW_PRECISION = re.compile(r"(fp8|int8|int4|w8a8|awq|gptq|nvfp4|mxfp4)", re.IGNORECASE)
OWN_CLASSES: Mapping[str, str] = {
    # the path of a class of the user's -> what to do
    "data.custom_cls.path": "rows are read by your Dataset class; write another file of rows, or "
    "data.reader, `file.py:function` from a row to a Task",
    "data.datagen.path": "rows are made by your class during the run; write them to a file",
    **dict.fromkeys(
        (
            *("reward_model.reward_loop_class_name", "reward_model.reward_loop_module_path"),
            *("reward.reward_manager.module.path", "reward_manager.module.path"),
        ),
        "attempts are scored by your class; write a reward (`agentrl new reward NAME`, docs/rewards.md)",
    ),
    **dict.fromkeys(
        (f"{ROLLOUT}.agent.agent_loop_manager_class", f"{ROLLOUT}.agent.custom_async_server.path"),
        "attempts are started by your class; an agent is a plugin (`agentrl new agent NAME`, docs/agents.md)",
    ),
    "actor_rollout_ref.ref.model.path": "the reference is the policy at the start of the run",
}
TOOL_FILES = (f"{ROLLOUT}.multi_turn.tool_config_path", "data.tool_config_path")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A key of verl, or another obstacle, and the reason."""

    what: str
    reason: str


def find_all(source: WrittenConfig) -> Iterator[Obstacle]:
    """Yield everything that would not run here unchanged, or would train something else."""
    yield from (Obstacle("the config", text) for text in source.missing)
    yield from _models(source)
    yield from (Obstacle(_shown(source, key), why) for key, why in OWN_CLASSES.items() if source.get(key))
    for key in TOOL_FILES:
        if source.has(key):
            reasons = find_unloadable(str(source.get(key)))
            yield from (Obstacle(_shown(source, key), why) for why in reasons)
    yield from _media(source)
    yield from _parallel(source)
    yield from _servers(source)
    yield from _low_precision(source)
    yield from (Obstacle(_shown(source, key), why) for key, why in SWITCHES.items() if source.get(key))
    if source.get("actor_rollout_ref.actor.use_kl_loss") and source.get("algorithm.use_kl_in_reward"):
        yield Obstacle("use_kl_loss and use_kl_in_reward", "agentrl has one KL, in the loss or in the reward")


def _shown(source: WrittenConfig, key: str) -> str:
    return f"{key} = {source.get(key)}"


def _models(source: WrittenConfig) -> Iterator[Obstacle]:
    for key in MODELS:
        if source.has(key):
            for what in find_obstacles(str(source.get(key))):
                yield Obstacle(_shown(source, key), f"this is {what}")


def _media(source: WrittenConfig) -> Iterator[Obstacle]:
    written = [key for key in MEDIA if source.has(key)]
    if len(written) > 1 and all(source.get(key) == MEDIA[key] for key in written):
        return  # a complete config of verl, which always names the media columns that rows may have
    yield from (
        Obstacle(_shown(source, key), "rows with video or sound are not supported")
        for key in written
        if key != "data.image_key"
    )


def _parallel(source: WrittenConfig) -> Iterator[Obstacle]:
    for key in source.written:
        name = key.rpartition(".")[2]
        if name in PARALLEL and ENGINES.match(key) and _above_one(source.get(key)):
            what, instead = PARALLEL[name]
            yield Obstacle(_shown(source, key), f"no {what}: {instead}")


def _servers(source: WrittenConfig) -> Iterator[Obstacle]:
    experts = f"{ROLLOUT}.expert_parallel_size"
    if not source.is_supervised and find_layout(source) is None:
        for key in (WIDTH, STAGES):
            if _above_one(source.get(key)):
                why = (
                    "servers on the learner's GPUs have one GPU each, and half of the GPUs cannot be theirs; "
                    "give them a pool of their own (placement.roles.servers)"
                )
                yield Obstacle(_shown(source, key), why)
    if _above_one(source.get(experts)):
        yield Obstacle(
            _shown(source, experts),
            "no expert parallelism: servers with ep_size above 1 are not tested; use tp_size",
        )


def _low_precision(source: WrittenConfig) -> Iterator[Obstacle]:
    """Yield settings for low-precision weights: switches with such names, and values of dtypes."""
    for key, value in source.written.items():
        name = key.rpartition(".")[2]
        is_switch = bool(LOW_PRECISION.search(name)) and value not in (
            None,
            False,
            0,
            "null",
            "none",
            "false",
        )
        is_value = (
            ("dtype" in name or name == "quantization")
            and isinstance(value, str)
            and bool(LOW_PRECISION.search(value))
        )
        if (is_switch or is_value) and not key.startswith(("trainer.", "data.")):
            yield Obstacle(
                _shown(source, key),
                "weights are trained, published and served in bfloat16 or float32, and never quantized",
            )


def _above_one(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 1
