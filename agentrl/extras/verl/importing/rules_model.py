"""Translation rules for the model, the servers, and their GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.extras.verl.importing.findings import Dropped, Finding, Setting
from agentrl.extras.verl.importing.gpus import (
    SIZES,
    STAGES,
    WIDTH,
    GPULayout,
    GPUs,
    find_layout,
    pool_of_servers,
)
from agentrl.extras.verl.importing.rules_data import ACTOR
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.extras.verl.importing.values import as_list

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
BACKENDS = {
    "sglang": "sglang",
    "sglang_async": "sglang",
    "vllm": "sglang",
    "trtllm": "sglang",
    "hf": "embedded",
}
SERVER_ARGUMENTS = {
    # verl's key of the rollout -> SGLang's argument
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_model_len": "context_length",
    "expert_parallel_size": "ep_size",
    "pipeline_model_parallel_size": "pp_size",
    "quantization": "quantization",
    "scheduling_policy": "schedule_policy",
}
SWITCHES = {
    "enforce_eager": (True, "disable_cuda_graph"),
    "enable_prefix_caching": (False, "disable_radix_cache"),
}
"""verl's key -> the value for which SGLang needs an argument, and this argument."""


def dtypes(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the dtype of computing and serving.

    Master weights are separate in both projects, and always float32 here.
    """
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32"}
    own = f"{ACTOR}.fsdp_config.dtype"
    key = own if source.has(own) else f"{ROLLOUT}.dtype"
    yield Setting(
        "model.dtype", names.get(source.get(key), source.get(key)), (key,), "for computing and serving"
    )


def adapters(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the LoRA adapter, whose other keys are dropped at rank 0."""
    sections = (
        (MODEL, "model.lora", ""),
        (f"{MODEL}.lora", "model.lora", "lora."),
        ("critic.model", "critic.model.lora", ""),
        ("critic.model.lora", "critic.model.lora", "lora."),
    )
    stored = f"{MODEL}.lora_adapter_path"
    if source.has(stored) and source.get(f"{MODEL}.lora_rank") > 0:
        yield Setting(
            "model.lora.path", source.get(stored), (stored,), "its rank and alpha must be those set"
        )
    elif source.has(stored):
        why = "set model.lora.path, with rank, alpha and target_modules of the adapter"
        yield Dropped(stored, why, is_decisive=True)
    for section, ours, nested in sections:
        prefix = "" if nested else "lora_"
        rank, alpha, targets = (
            f"{section}.{prefix}rank",
            f"{section}.{prefix}alpha",
            f"{section}.target_modules",
        )
        if not source.has(rank) or source.get(rank) <= 0:
            off = "without effect in verl: the rank of the adapter is 0"
            yield from (Setting(f"{ours}.rank", 0, (key,)) for key in (rank,) if source.has(key))
            yield from (Dropped(key, off) for key in (alpha, targets) if source.has(key))
            continue
        yield Setting(f"{ours}.rank", source.get(rank), (rank,))
        yield Setting(f"{ours}.alpha", source.get(alpha) or 16, (alpha,))
        if source.has(targets):
            names = source.get(targets)
            yield Setting(
                f"{ours}.target_modules", [] if names == "all-linear" else as_list(names), (targets,)
            )


def template_arguments(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the arguments of the chat template. Those of single rows are fields of the rows."""
    section, thinking = "data.apply_chat_template_kwargs", "data.enable_thinking_default"
    given = source.below(section)
    old = tuple(f"{section}.{name}" for name in given)
    if source.is_supervised and source.has(thinking):
        given, old = {"enable_thinking": source.get(thinking), **given}, (*old, thinking)
    if given:
        yield Setting("model.chat_template_kwargs", given, old)


def offload(source: WrittenConfig) -> Iterator[Finding]:
    """Translate offloading: two switches in verl, one choice here."""
    section = f"{ACTOR}.fsdp_config"
    parameters, optimizer = (
        (f"{section}.param_offload", f"{section}.offload_policy"),
        f"{section}.optimizer_offload",
    )
    written = tuple(key for key in (*parameters, optimizer) if source.has(key))
    choice = (
        "parameters" if any(map(source.get, parameters)) else "optimizer" if source.get(optimizer) else "none"
    )
    if written:
        yield Setting("learner.offload", choice, written)


def activation_offload(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the offloading of activations, which here moves the inputs of recomputed layers."""
    key = f"{MODEL}.enable_activation_offload"
    if not source.has(key):
        return
    if source.get(key) and not source.get(f"{MODEL}.enable_gradient_checkpointing"):
        yield Dropped(key, "only inputs of recomputed layers are offloaded; set gradient_checkpointing")
        return
    yield Setting("learner.activation_offload", bool(source.get(key)), (key,))


def servers(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the inference engine and its arguments to those of SGLang."""
    name = f"{ROLLOUT}.name"
    backend = BACKENDS.get(source.get(name) or "sglang")
    if backend is None:
        yield Dropped(
            name,
            f"{source.get(name)} is not supported; available: sglang, and embedded for machines without it",
        )
    else:
        yield Setting(
            "rollout.backend",
            backend,
            (name,),
            "" if source.get(name) == backend else f"{source.get(name) or 'default'} in verl",
        )
    layout = find_layout(source)
    if layout is not None and layout.share is not None and backend != "embedded":
        memory = f"{ROLLOUT}.gpu_memory_utilization"
        note = "a server has the whole model on one GPU here"
        yield Setting("rollout.sglang.args.mem_fraction_static", layout.share, (memory, WIDTH), note)
    for key, argument in SERVER_ARGUMENTS.items():
        old = f"{ROLLOUT}.{key}"
        if source.has(old) and backend == "embedded":
            yield Dropped(old, "an argument of SGLang; the embedded server has rollout.embedded")
        elif old == STAGES and pool_of_servers(source) is None:
            continue  # see _shared
        elif source.has(old) and not (key.endswith("parallel_size") and source.get(old) == 1):
            yield Setting(f"rollout.sglang.args.{argument}", source.get(old), (old,))
        elif source.has(old):
            yield Dropped(old, "1 is SGLang's own default")
    for key, (needed, argument) in SWITCHES.items():
        old = f"{ROLLOUT}.{key}"
        if source.has(old) and source.get(old) is needed and backend != "embedded":
            yield Setting(f"rollout.sglang.args.{argument}", True, (old,))
        elif source.has(old):
            yield Dropped(old, f"{str(source.get(old)).lower()} is the servers' default")
    for argument, value in source.below(f"{ROLLOUT}.engine_kwargs.sglang").items():
        if value is not None:
            yield Setting(
                f"rollout.sglang.args.{argument}", value, (f"{ROLLOUT}.engine_kwargs.sglang.{argument}",)
            )


def overridden(source: WrittenConfig) -> Iterator[Finding]:
    """Translate what verl changes in the model's config.json, which counts unchanged here."""
    for section in (MODEL, "critic.model"):
        for name, value in source.below(f"{section}.override_config").items():
            if value and not name.endswith("attn_implementation"):
                why = (
                    "the model's own config.json counts: set it there, in a copy of the model; "
                    "rollout.sglang.args.json_model_override_args changes it for the servers alone"
                )
                yield Dropped(f"{section}.override_config.{name}", why, is_decisive=True)


def shards(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the number of ranks that share one copy of the weights; verl takes a larger one as all."""
    key, layout = f"{ACTOR}.fsdp_config.fsdp_size", find_layout(source)
    num_ranks = (
        GPUs(*(int(source.get(size)) for size in SIZES)).num if layout is None else layout.learning.num
    )
    if source.has(key):
        value = source.get(key)
        yield Setting("learner.fsdp.shard_size", value if 0 < value < num_ranks else None, (key, *SIZES))


def places(source: WrittenConfig) -> Iterator[Finding]:
    """Translate GPUs to pools of nodes.

    verl's synchronous trainer places learner and servers on the same GPUs.
    """
    whole = GPUs(*(int(source.get(key)) for key in SIZES))
    layout = find_layout(source) or GPULayout(whole, None)
    yield Setting("learner.world_size", layout.learning.num, SIZES)
    if source.get("trainer.device") == "cpu":
        yield Setting("placement.pools", {}, ("trainer.device", *SIZES), "ranks compute on CPUs")
        return
    yield from _shared(source, layout) if layout.serving is None else _apart(source, layout, layout.serving)
    if max(whole.nodes, layout.serving.nodes if layout.serving else 1) > 1:
        yield Setting("cluster.address", "auto", SIZES[:1], "several nodes are a running Ray cluster")
    if source.has("trainer.device"):
        yield Dropped("trainer.device", "GPUs are those of placement.pools")


def _shared(source: WrittenConfig, layout: GPULayout) -> Iterator[Finding]:
    yield Setting("placement.pools", {"main": layout.learning.as_pool()}, SIZES)
    yield Setting("rollout.num_servers", layout.learning.num, SIZES, "one per GPU")
    note = "servers share the learner's GPUs, as in verl"
    yield Setting("rollout.colocated", True, ("actor_rollout_ref.hybrid_engine",), note)
    for key in (WIDTH, STAGES):
        if source.has(key):
            yield Dropped(key, layout.note or "servers on the learner's GPUs have one GPU each")


def _apart(source: WrittenConfig, layout: GPULayout, serving: GPUs) -> Iterator[Finding]:
    section = pool_of_servers(source)
    keys = (WIDTH,) if section is None else (f"{section}.nnodes", f"{section}.n_gpus_per_node")
    pools = {"learning": layout.learning.as_pool(), "serving": serving.as_pool()}
    yield Setting("placement.pools", pools, (*SIZES, *keys), layout.note)
    yield Setting("placement.roles", {"actor": "learning", "servers": "serving"}, keys)
    num_servers = max(1, serving.num // (layout.width * int(source.get(STAGES) or 1)))
    yield Setting("rollout.num_servers", num_servers, (*keys, WIDTH))
    if layout.width > 1:
        yield Setting("rollout.sglang.args.tp_size", layout.width, (WIDTH,))


RULES = (
    *(dtypes, adapters, template_arguments, offload, activation_offload),
    *(servers, overridden, shards, places),
)
