"""Translation rules for verl's supervised training, for `agentrl sft`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentrl.extras.verl.importing.findings import Dropped, Finding, Setting
from agentrl.extras.verl.importing.rules_data import decays, optimizers, resume, schedule_key
from agentrl.extras.verl.importing.rules_model import template_arguments
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.extras.verl.importing.values import SCHEDULES, TRACKERS, as_list, loggers

ENGINE = "engine"
WARMUP_STEPS = ("optim.lr_warmup_steps",)
WARMUP_RATIOS = ("optim.warmup_steps_ratio", "optim.lr_warmup_steps_ratio")
PARALLEL = ("ulysses_sequence_parallel_size", f"{ENGINE}.ulysses_sequence_parallel_size")
NAMES = ("trainer.project_name", "trainer.experiment_name")


def columns(source: WrittenConfig) -> Iterator[Finding]:
    """Translate columns: a conversation in one column, or a prompt and a response in two.

    The latter may be fields of a struct.
    """
    messages = next(
        (key for key in ("data.messages_key", "data.multiturn.messages_key") if source.has(key)), None
    )
    enable = "data.multiturn.enable"
    if source.get(enable) or messages is not None:
        key = messages or (
            "data.messages_key" if source.get("data.messages_key") else "data.multiturn.messages_key"
        )
        yield Setting("data.messages_key", source.get(key), (key, enable))
        tools = "data.multiturn.tools_key" if source.has("data.multiturn.tools_key") else "data.tools_key"
        if source.has(tools):
            yield Setting("data.tools_key", source.get(tools), (tools,))
        for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys"):
            if source.has(f"data.{name}"):
                yield Dropped(f"data.{name}", "without effect in verl: rows are conversations")
        return
    for name in ("prompt", "response"):
        key, inner = f"data.{name}_key", f"data.{name}_dict_keys"
        path = ".".join(
            [str(source.get(key)), *map(str, as_list(source.get(inner)) if source.has(inner) else [])]
        )
        yield Setting(f"data.{name}_key", path, (key, inner))
    if source.has(enable):
        yield Dropped(enable, "false: a prompt and a response in two columns")


def batches(source: WrittenConfig) -> Iterator[Finding]:
    """Translate batches, which both projects count in conversations.

    A microbatch is a budget of tokens here.
    """
    yield Setting(
        "trainer.batch_size",
        source.get("data.train_batch_size"),
        ("data.train_batch_size",),
        "conversations per update",
    )
    yield Setting("data.max_tokens", source.get("data.max_length"), ("data.max_length",))
    budget, size = "data.max_token_len_per_gpu", "data.micro_batch_size_per_gpu"
    old_size = "data.micro_batch_size"
    ranks = next((int(source.get(key)) for key in PARALLEL if source.has(key)), 1)
    if source.get("data.use_dynamic_bsz"):
        yield Setting(
            "learner.microbatch_tokens", source.get(budget) * ranks, (budget, "data.use_dynamic_bsz")
        )
        used = budget
    else:
        used = old_size if source.has(old_size) and not source.has(size) else size
        count = max(1, int(source.get(used) or 1))
        note = f"{count} conversations of at most {source.get('data.max_length')} tokens"
        yield Setting(
            "learner.microbatch_tokens",
            count * source.get("data.max_length") * ranks,
            (used, "data.max_length"),
            note,
        )
    unused = (
        key for key in (budget, size, old_size, "data.use_dynamic_bsz") if key != used and source.has(key)
    )
    yield from (
        Dropped(key, f"{used} sets the size of a microbatch")
        for key in unused
        if key != "data.use_dynamic_bsz" or used != budget
    )


def overlong(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the treatment of overlong conversations: verl raises an error, or truncates them."""
    key = "data.truncation"
    choices = {"error": ("drop", "left out and counted; verl would stop"), "right": ("truncate", "")}
    if source.get(key) in choices:
        choice, note = choices[source.get(key)]
        yield Setting("data.overlong", choice, (key,), note)
    else:
        yield Dropped(
            key,
            f"{source.get(key)} would cut the beginning; conversations that are too long are left out "
            "(data.overlong)",
            is_decisive=True,
        )


def optimizer(source: WrittenConfig) -> Iterator[Finding]:
    for key, ours in {
        "optim.lr": "lr",
        "optim.betas": "betas",
        "optim.weight_decay": "weight_decay",
        "optim.clip_grad": "grad_clip",
    }.items():
        yield Setting(f"learner.optimizer.{ours}", source.get(key), (key,))
    schedule = schedule_key(source, "optim")
    if source.get(schedule) in SCHEDULES:
        yield Setting(
            "learner.optimizer.schedule", SCHEDULES[source.get(schedule)], (schedule,), "decays to 0"
        )
    else:
        why = f"unknown schedule {source.get(schedule)}; available: {', '.join(SCHEDULES)}"
        yield Dropped(schedule, why, is_decisive=True)
    yield from _warmup(source)


def _warmup(source: WrittenConfig) -> Iterator[Finding]:
    steps, total = WARMUP_STEPS[0], source.get("trainer.total_training_steps")
    ratio = next((key for key in WARMUP_RATIOS if source.has(key)), None) or next(
        (k for k in WARMUP_RATIOS if source.get(k)), ""
    )
    if source.has(steps) and source.get(steps) > 0:
        yield Setting("learner.optimizer.warmup_updates", source.get(steps), (steps,))
    elif ratio and source.get(ratio) and total:
        yield Setting(
            "learner.optimizer.warmup_updates",
            round(source.get(ratio) * total),
            (ratio, "trainer.total_training_steps"),
        )
    elif ratio and source.get(ratio):
        why = (
            f"{source.get(ratio):g} of the steps, whose number is not known before the data is read; set "
            "learner.optimizer.warmup_updates"
        )
        yield Dropped(ratio, why, is_decisive=True)
    else:
        yield from (
            Setting("learner.optimizer.warmup_updates", 0, (key,))
            for key in (steps, *WARMUP_RATIOS)
            if source.has(key)
        )


def rows(source: WrittenConfig) -> Iterator[Finding]:
    """Refuse to train on a part of the rows."""
    key = "data.train_max_samples"
    if source.has(key) and source.get(key) > 0:
        yield Dropped(key, "all rows are read; cut the file instead", is_decisive=True)


def model(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the model, its adapter, its dtype and offloading."""
    path = "model.partial_pretrain" if source.has("model.partial_pretrain") else "model.path"
    if source.has(path):
        yield Setting("model.path", source.get(path), (path,))
    rank = "model.lora_rank"
    if source.get(rank) and source.get(rank) > 0:
        yield Setting("model.lora.rank", source.get(rank), (rank,))
        yield Setting("model.lora.alpha", source.get("model.lora_alpha"), ("model.lora_alpha",))
        names = source.get("model.target_modules")
        if names is not None:
            chosen = [] if names == "all-linear" else as_list(names)
            yield Setting("model.lora.target_modules", chosen, ("model.target_modules",))
    else:
        off = "without effect in verl: the rank of the adapter is 0"
        yield from (
            Dropped(key, off) for key in (rank, "model.lora_alpha", "model.target_modules") if source.has(key)
        )
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    dtype = f"{ENGINE}.dtype"
    yield Setting(
        "model.dtype", names.get(source.get(dtype) or "bf16", source.get(dtype)), (dtype,), "of computing"
    )
    parameters = (
        "model.fsdp_config.cpu_offload",
        "model.fsdp_config.offload_params",
        f"{ENGINE}.param_offload",
        f"{ENGINE}.offload_policy",
    )
    state = f"{ENGINE}.optimizer_offload"
    written = tuple(key for key in (*parameters, state) if source.has(key))
    choice = (
        "parameters" if any(map(source.get, parameters)) else "optimizer" if source.get(state) else "none"
    )
    if written:
        yield Setting("learner.offload", choice, written)
    checkpointing = "model.enable_gradient_checkpointing"
    yield Setting("learner.gradient_checkpointing", source.get(checkpointing), (checkpointing,))


def places(source: WrittenConfig) -> Iterator[Finding]:
    """Translate GPUs to a pool of nodes; torchrun's options give their number."""
    sizes = ("trainer.nnodes", "trainer.n_gpus_per_node")
    nodes, gpus = (int(source.get(key)) for key in sizes)
    yield Setting("learner.world_size", nodes * gpus, sizes)
    shared = next((key for key in PARALLEL if source.has(key)), None)
    if shared is not None:
        yield Setting("learner.sequence_parallel", source.get(shared), (shared,))
    if source.get("trainer.device") == "cpu":
        yield Setting("placement.pools", {}, ("trainer.device", *sizes), "ranks compute on CPUs")
        return
    yield Setting("placement.pools", {"main": {"nodes": nodes, "gpus_per_node": gpus}}, sizes)
    if nodes > 1:
        yield Setting("cluster.address", "auto", sizes[:1], "several nodes are a running Ray cluster")
    if source.has("trainer.device"):
        yield Dropped("trainer.device", "GPUs are those of placement.pools")


def run(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the duration of the run and its output paths."""
    yield Setting("trainer.total_epochs", source.get("trainer.total_epochs"), ("trainer.total_epochs",))
    yield Setting("trainer.seed", source.get("trainer.seed"), ("trainer.seed",))
    if source.has("trainer.total_training_steps"):
        yield Setting(
            "trainer.steps", source.get("trainer.total_training_steps"), ("trainer.total_training_steps",)
        )
    folder = "trainer.default_local_dir"
    if source.has(folder):
        yield Setting(
            "trainer.output",
            source.get(folder),
            (folder,),
            "the trained model; checkpoints are in the folder with the suffix _run",
        )
        yield from (
            Dropped(key, "a run is named by its folder (trainer.run_dir)") for key in NAMES if source.has(key)
        )
    else:
        project, experiment = (source.get(key) for key in NAMES)
        yield Setting("trainer.output", f"checkpoints/{project}/{experiment}", NAMES)
    if source.has("trainer.logger"):
        known = [name for name in as_list(source.get("trainer.logger")) if name in TRACKERS]
        yield Setting("trainer.logger", loggers(known or ["console"]), ("trainer.logger",))
    if source.has("trainer.max_ckpt_to_keep"):
        yield Setting(
            "trainer.keep_last", source.get("trainer.max_ckpt_to_keep"), ("trainer.max_ckpt_to_keep",)
        )
    for key in ("trainer.test_freq", "trainer.save_freq"):
        if isinstance(source.get(key), str):
            yield Dropped(
                key,
                f"{source.get(key)} is not a number of updates, which is not known before the data is read",
            )


RULES = (
    columns,
    rows,
    batches,
    overlong,
    optimizer,
    decays,
    optimizers,
    model,
    template_arguments,
    places,
    run,
    resume,
)

MEANINGLESS: Mapping[str, str] = {
    # Key of verl's supervised training, or prefix of keys -> why there is no counterpart.
    "data.micro_batch_size": "null; data.micro_batch_size_per_gpu counts",
    "data.prompt_dict_keys": "null; the column itself is the prompt",
    "data.response_dict_keys": "null; the column itself is the response",
    "data.val_files": "null; nothing is held out",
    "trainer.max_ckpt_to_keep": "null; the default of trainer.keep_last applies",
    "trainer.total_training_steps": "null; trainer.total_epochs counts",
    "data.balance_dp_token": "batches are always balanced over the ranks by tokens",
    "data.chat_template": "put it into a file, and set model.chat_template to the file",
    "data.custom_cls": "rows are read by columns; write another form as a column of messages",
    "data.pad_mode": "sequences are always packed without padding",
    "data.ignore_input_ids_mismatch": "a conversation is encoded once, as it will be sampled",
    "data.enable_thinking_key": "rows have a column of all arguments of the template "
    "(data.chat_template_kwargs_key)",
    "data.enable_thinking_default": "null; the template's own default",
    "data.multiturn.enable_thinking_key": "rows have a column of all arguments of the template "
    "(data.chat_template_kwargs_key)",
    "data.num_workers": "rows are read by Arrow, without worker processes",
    "data.max_prompt_length": "one bound for the whole conversation (data.max_tokens)",
    "data.max_response_length": "one bound for the whole conversation (data.max_tokens)",
    "data.train_max_samples": "all rows are read; cut the file instead",
    "data.val_max_samples": "all rows are read; cut the file instead",
    "data.val_batch_size": "validation has the microbatches of training",
    "model.use_liger": "the model is the one of transformers, unchanged",
    "model.strategy": "the learner is always FSDP2",
    "model.use_remove_padding": "sequences are always packed without padding",
    "model.use_shm": "models are read from model.path directly",
    "model.use_fused_kernels": "logits never exist as a whole (learner.logprob_chunk_tokens)",
    "model.fsdp_config": "FSDP2 shards every layer; see the section learner.fsdp, and learner.offload",
    "model.override_config": "the model's own config.json counts",
    "model.tokenizer_path": "set model.tokenizer_path",
    "model.mtp": "multi-token prediction heads are not trained",
    "model.freeze_vision_tower": "only text conversations are supported",
    "model.speculator": "there is no draft model",
    "model": "see the section model",
    "speculator": "there is no draft model",
    "optim": "see the section learner.optimizer",
    "engine": "the learner is always FSDP2",
    "profiler": "torch's profiler records every learner rank in the steps of trainer.profile_steps",
    "checkpoint": "a checkpoint always contains everything that a resume needs",
    "trainer.checkpoint": "a checkpoint always contains everything that a resume needs",
    "trainer.balance_batch": "batches are always balanced over the ranks by tokens",
    "trainer.profile_interval": "torch's profiler records every learner rank in the steps of "
    "trainer.profile_steps",
    "use_remove_padding": "sequences are always packed without padding",
    "ulysses_sequence_parallel_size": "see learner.sequence_parallel",
}
