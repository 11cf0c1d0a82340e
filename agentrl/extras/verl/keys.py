"""The keys of verl: their names here, or why they have no counterpart."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from agentrl.extras.verl.renamed import RENAMED, RENAMED_IN_SFT

_OF_THE_LEARNER = (
    # Keys of verl's critic. They are listed one by one, so that a misspelled key of our own critic section
    # still gets a suggestion.
    "critic.strategy",
    "critic.optim",
    "critic.fsdp",
    "critic.loss_scale_factor",
    "critic.model.tokenizer_path",
    "critic.model.custom_chat_template",
    "critic.model.hf_config_path",
    "critic.model.exclude_modules",
    "critic.model.lora_adapter_path",
    "critic.model.use_liger",
    "critic.model.use_fused_kernels",
    "critic.model.fused_kernel_options",
    "critic.model.mtp",
    *(
        f"critic.model.lora.{name}"
        for name in (
            *(
                "type",
                "merge",
                "dtype",
                "exclude_modules",
                "adapter_path",
                "dropout_position",
                "a2a_experimental",
            ),
            *(
                "lora_A_init_method",
                "lora_B_init_method",
                "freeze_vision_model",
                "freeze_vision_projection",
                "freeze_language_model",
            ),
        )
    ),
    "critic.model.override_config",
    "critic.model.external_lib",
    "critic.model.trust_remote_code",
    "critic.model.enable_gradient_checkpointing",
    "critic.model.enable_activation_offload",
    "critic.model.use_remove_padding",
    "critic.model.use_shm",
    "critic.model.fsdp_config",
    "critic.model.tiled_mlp",
    "critic.megatron",
    "critic.veomni",
    "critic.engine",
    "critic.rollout_n",
    "critic.use_dynamic_bsz",
    "critic.shuffle",
    "critic.data_loader_seed",
    "critic.ulysses_sequence_parallel_size",
    "critic.forward_micro_batch_size",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "critic.ppo_infer_micro_batch_size_per_gpu",
    "critic.ppo_infer_max_token_len_per_gpu",
    "critic.checkpoint",
    "critic.profiler",
    "critic.nccl_timeout",
    "critic.load_weight",
)

KEPT = (
    # Keys of verl's trainer with the same name and meaning here.
    *("data.train_files", "data.val_files", "data.prompt_key", "data.shuffle"),
    *("critic.model.path", "critic.cliprange_value"),
    *(f"critic.model.lora.{name}" for name in ("rank", "alpha", "dropout", "target_modules")),
    *("reward_model.model.path", "reward_model.model.external_lib", "reward_model.model.trust_remote_code"),
    *("algorithm.gamma", "algorithm.lam"),
    *(
        "trainer.total_epochs",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.val_before_train",
        "trainer.val_only",
    ),
    *(
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
        "trainer.resume_mode",
        "trainer.profile_steps",
    ),
    *("trainer.rollout_data_dir", "trainer.validation_data_dir"),
)

MEANINGLESS: Mapping[str, str] = {
    # Key of verl, or prefix of keys -> why there is no counterpart. The longest prefix counts.
    "actor_rollout_ref.hybrid_engine": "learner and servers are separate processes; rollout.colocated puts "
    "them on the same GPUs",
    "actor_rollout_ref.actor.strategy": "the learner is always FSDP2",
    "actor_rollout_ref.actor.megatron": "the learner is always FSDP2",
    "actor_rollout_ref.actor.veomni": "the learner is always FSDP2",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "master weights are always float32; model.dtype is "
    "what is computed and served in, and what frozen weights are kept in",
    "actor_rollout_ref.actor.fsdp_config": "FSDP2 shards every layer; see the section learner.fsdp, and "
    "learner.offload",
    "actor_rollout_ref.actor.use_dynamic_bsz": "microbatches are always packed by tokens "
    "(learner.microbatch_tokens)",
    "actor_rollout_ref.actor.use_remove_padding": "sequences are always packed without padding",
    "actor_rollout_ref.actor.pad_to_length": "sequences are always packed without padding",
    "actor_rollout_ref.actor.shuffle": "a batch is cut into minibatches by whole groups, in the order they "
    "were leased",
    "actor_rollout_ref.actor.checkpoint": "a checkpoint always contains everything that a resume needs",
    "actor_rollout_ref.actor.profiler": "torch's profiler records every learner rank in the steps of "
    "trainer.profile_steps",
    "actor_rollout_ref.actor.router_replay": "R3, the servers' routing: rollout.replay_experts; R2, the "
    "learner's own from the start of the step, is not there",
    "actor_rollout_ref.actor": "the learner has no such setting; see the sections learner and algorithm",
    "actor_rollout_ref.ref.fsdp_config": "the reference policy is sharded like the learner",
    "actor_rollout_ref.ref": "the reference policy follows the learner's settings; "
    "algorithm.kl.coefficient=0 leaves it out",
    "actor_rollout_ref.rollout.mode": "rollouts are always asynchronous; buffer.max_staleness=0 makes "
    "training synchronous",
    "actor_rollout_ref.rollout.do_sample": "training always samples (rollout.temperature)",
    "actor_rollout_ref.rollout.ignore_eos": "a turn always ends at the model's end-of-sequence token",
    "actor_rollout_ref.rollout.calculate_log_probs": "the servers' log-probabilities are always recorded",
    "actor_rollout_ref.rollout.free_cache_engine": "servers on the learner's GPUs (rollout.colocated) "
    "release their memory for each step",
    "actor_rollout_ref.rollout.load_format": "a server starts from model.path and receives weights "
    "by rollout.weights",
    "actor_rollout_ref.rollout.multi_turn.enable": "each row's agent decides by its agent_name",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "text is never encoded twice; the "
    "template is checked",
    "actor_rollout_ref.rollout.multi_turn": "see the section agent",
    "actor_rollout_ref.rollout.trace": "every trajectory is written to trajectories/ of the run directory",
    "actor_rollout_ref.rollout.engine_kwargs": "servers are SGLang (rollout.sglang.args) or the embedded one "
    "(rollout.embedded)",
    "actor_rollout_ref.rollout": "see the sections rollout, agent and eval; further arguments of SGLang go "
    "to rollout.sglang.args",
    "actor_rollout_ref.model.lora": "see the section model.lora",
    "actor_rollout_ref.model.lora_adapter_path": "set model.lora.path, with rank, alpha and target_modules "
    "of the adapter",
    "actor_rollout_ref.model.exclude_modules": "only the layers named by "
    "model.lora.target_modules get adapters",
    "actor_rollout_ref.model.use_remove_padding": "sequences are always packed without padding",
    "actor_rollout_ref.model.use_liger": "the model is the one of transformers, unchanged",
    "actor_rollout_ref.model.use_fused_kernels": "logits never exist as a whole "
    "(learner.logprob_chunk_tokens)",
    "actor_rollout_ref.model.fused_kernel_options": "logits never exist as a whole "
    "(learner.logprob_chunk_tokens)",
    "use_remove_padding": "sequences are always packed without padding",
    "actor_rollout_ref.model.override_config": "the model's own config.json counts; dropout is always 0",
    "actor_rollout_ref.model.use_shm": "models are read from model.path directly",
    "actor_rollout_ref.model": "see the section model",
    "actor_rollout_ref": "see the sections model, agent, rollout, learner and algorithm",
    "data.val_batch_size": "validation always runs as a whole, rollout.max_concurrent_trajectories at a time",
    "data.validation_shuffle": "validation is always in order",
    "data.return_raw_chat": "tasks always keep their messages",
    "data.return_raw_input_ids": "tasks keep messages; the session encodes them once",
    "data.return_full_prompt": "trajectories always keep the whole conversation",
    "data.dataloader_num_workers": "rows are read by Arrow, without worker processes",
    "data.filter_overlong_prompts_workers": "prompts are measured when they are drawn",
    "data.video_key": "rows with video are refused",
    "data.audio_key": "rows with audio are refused",
    "data.return_multi_modal_inputs": "pixels are read by the ranks, from references",
    "data.mm_processor_kwargs": "the model's preprocessor_config.json has the settings for images",
    "data.image_patch_size": "the model's preprocessor_config.json has the settings for images",
    "data.use_shm": "files are read directly",
    "data.sampler": "order comes from data.shuffle, trainer.seed and data.curriculum",
    "data.datagen": "rows come from files or data.reader",
    **dict.fromkeys(
        _OF_THE_LEARNER,
        "the critic follows the learner's settings; its own are critic.model and critic.optimizer",
    ),
    "reward_model.enable": "each reward term with `reward: reward_model` uses it (reward.terms)",
    "reward_model.strategy": "the reward model is always sharded by FSDP2",
    "reward_model.use_dynamic_bsz": "microbatches are always packed by tokens "
    "(reward_model.microbatch_tokens)",
    "reward_model.enable_resource_pool": "its ranks are separate processes (reward_model.world_size)",
    "reward_model.launch_reward_fn_async": "rewards are always computed while other attempts run, "
    "those of the reward model once per batch",
    "reward_model.ulysses_sequence_parallel_size": "each conversation is scored by one rank",
    "reward_model.model.fsdp_config": "its weights are always sharded; see reward_model.fsdp and "
    "reward_model.offload",
    "reward_model.model.use_remove_padding": "sequences are always packed without padding",
    "reward_model.model.use_fused_kernels": "the model is the one of transformers, unchanged",
    "reward_model.model.use_shm": "models are read from reward_model.model.path directly",
    "reward_model.profiler": "torch's profiler records every learner rank in the steps of "
    "trainer.profile_steps",
    "reward_model.rollout": "a reward model has its own ranks (reward_model.world_size); a generative one "
    "is a server that `reward: llm_judge` calls",
    "reward_model.reward_loop_source": "each reward has a scope, and terms are added to it (reward.sources, "
    "reward.terms)",
    "reward_model.reward_loop_module_path": "each reward has a scope, and terms are added to it "
    "(reward.sources, reward.terms)",
    "reward_model.reward_loop_class_name": "each reward has a scope, and terms are added to it "
    "(reward.sources, reward.terms)",
    "reward_model.use_reward_loop": "rewards are always computed while other attempts run",
    "reward_model.load_weight": "a reward model always has its weights",
    "reward_manager": "each reward has a scope, and terms are added to it (reward.sources, reward.terms)",
    "reward_model.reward_kwargs": "the DAPO length penalty is a term: reward.terms.length_penalty with "
    "config.buffer_tokens",
    "reward_model.sandbox_fusion": "code is not run by a remote service",
    "reward_model.model.input_tokenizer": "the reward model reads conversations with its own tokenizer and "
    "template (reward_model.model)",
    "reward.reward_model": "see the section reward_model; each reward term with `reward: "
    "reward_model` uses it (reward.terms)",
    "reward.reward_manager": "each reward has a scope, and terms are added to it (reward.sources, "
    "reward.terms, reward.custom_function.scope); docs/rewards.md describes verl's managers",
    "reward.reward_kwargs": "the DAPO length penalty is a term: reward.terms.length_penalty with "
    "config.buffer_tokens",
    "reward_model.reward_manager": "each reward has a scope, and terms are added to it (reward.sources, "
    "reward.terms)",
    "reward_model.overlong_buffer": "the DAPO length penalty is a term: reward.terms.length_penalty with "
    "config.buffer_tokens",
    "reward.sandbox_fusion": "code is not run by a remote service",
    "sandbox_fusion": "code is not run by a remote service",
    "algorithm.norm_adv_by_std_in_grpo": "grpo always divides by the standard deviation of a group; "
    "algorithm.advantage=dr_grpo does not",
    "algorithm.use_kl_in_reward": "one KL, in the loss or in the reward (algorithm.kl.place)",
    "algorithm.kl_ctrl": "the coefficient adapts if algorithm.kl.target is set",
    "algorithm.filter_groups": "groups are filtered by their whole reward (buffer.drop_constant_groups)",
    "algorithm.rollout_correction": "see the section algorithm.correction",
    "algorithm.rollout_is_level": "see algorithm.correction.weight",
    "algorithm.rollout_is_mode": "see algorithm.correction.outside",
    "algorithm.rollout_is_threshold_lower": "see algorithm.correction.floor",
    "algorithm.rollout_is_veto_threshold": "see algorithm.correction.reject",
    "algorithm.use_pf_ppo": "trajectories are not reweighted by their reward",
    "algorithm.pf_ppo": "trajectories are not reweighted by their reward",
    "trainer.balance_batch": "batches are always balanced over the ranks by tokens",
    "trainer.log_val_generations": "every trajectory of validation is written to validation/ of the run "
    "directory; trackers show tracking.attempts_per_validation of them",
    "trainer.default_hdfs_dir": "checkpoints are written to trainer.run_dir; trainer.upload_to copies "
    "them to a URL",
    "trainer.del_local_ckpt_after_load": "trainer.keep_last decides which checkpoints are kept",
    "trainer.esi_redundant_time": "trainer.save_freq decides when checkpoints are written",
    "trainer.ray_wait_register_center_timeout": "actors register only with Ray",
    "trainer.checkpoint_callback_class": "trainer.save_freq decides when checkpoints are written",
    "trainer.controller_nsight_options": "see the section profiler.nsight",
    "trainer.worker_nsight_options": "see the section profiler.nsight",
    "trainer.npu_profile": "torch's profiler records every learner rank in the steps of "
    "trainer.profile_steps",
    "trainer.use_legacy_worker_impl": "there is one learner",
    "trainer.use_v1": "there is one trainer, and it is asynchronous (buffer.max_staleness)",
    "trainer.v1": "there is one trainer, and it is asynchronous (buffer.max_staleness)",
    "skip": "rollouts are not replaced by stored ones",
    "async_training": "training is always asynchronous; see buffer.max_staleness",
    "global_profiler": "torch's profiler records every learner rank in the steps of trainer.profile_steps",
    "distillation": "see the section algorithm.distillation (docs/algorithms.md)",
    "transfer_queue": "trajectories travel through the replay buffer",
    "ray_kwargs": "see the section cluster",
    "ray_init": "see the section cluster",
}

OPEN = (
    *("actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"),
    *("reward_model.reward_kwargs", "reward.reward_kwargs", "async_training", "critic.optim"),
)
"""Sections that programs beside verl's own trainers extend: what is not listed here is a key of theirs."""
OF_VERL = {
    # Section of OPEN -> verl's own keys there, or their beginnings, that train nothing else.
    "actor_rollout_ref": ("profiler", "nccl_timeout"),
    "actor_rollout_ref.actor": (
        *("calculate_entropy", "calculate_sum_pi_squared", "sum_pi_squared_checkpointing"),
        *("entropy_", "freeze_vision_tower", "use_fused_kernels", "use_prefix_grouper"),
        *("rollout_n", "load_weight", "use_rollout_log_probs", "use_torch_compile", "nccl_timeout", "qat"),
        *("optim.zero_indexed_step", "optim.optimizer", "optim.min_lr_ratio", "optim.num_cycles"),
        *("optim.lr_wsd_decay_style", "optim.weight_decay_incr_style", "optim.override_optimizer_config"),
        "optim.use_checkpoint_opt_param_scheduler",
    ),
    "actor_rollout_ref.rollout": (
        *("agent.custom_async_server", "agent.agent_loop_manager_class", "checkpoint_engine", "profiler"),
        *("cudagraph_capture_sizes", "disable_log_stats", "enable_chunked_prefill", "layered_summon", "mtp"),
        *("log_prob_use_dynamic_bsz", "logprobs_mode", "multi_stage_wake_up", "prometheus", "qat"),
        *("quantization_config_file", "skip_", "layer_name_map", "server", "sglang_", "over_sample_rate"),
        *("prompt_length", "response_length", "standalone_gpu_memory_utilization", "disaggregation"),
        *("n_gpus_per_node", "nnodes"),
    ),
    "actor_rollout_ref.model": ("hf_config_path", "mtp", "tiled_mlp", "torch_dtype"),
    "reward_model.reward_kwargs": ("max_resp_len", "overlong_buffer_cfg"),
    "reward.reward_kwargs": ("max_resp_len", "overlong_buffer_cfg"),
    "async_training": (
        *("use_trainer_do_validate", "use_dynamic_resource_scheduling", "dynamic_schedule", "partial"),
        *("checkpoint_engine", "concurrent_samples_per_replica", "use_rollout_log_probs", "compute_prox"),
    ),
    "critic.optim": (
        *("zero_indexed_step", "optimizer", "min_lr_ratio", "num_cycles", "lr_wsd_decay_style"),
        *("weight_decay_incr_style", "override_optimizer_config", "use_checkpoint_opt_param_scheduler"),
    ),
}


def is_foreign(key: str, value: object) -> bool:
    """Return whether a key without a counterpart is none of verl's, and switches something on."""
    section = next((each for each in beginnings(key) if each in MEANINGLESS), None)
    if not value or section not in OPEN or key.endswith("_target_"):
        return False
    rest = key[len(section) + 1 :]
    return not rest.startswith(OF_VERL[section])


def answer(key: str, known: Container[str]) -> str | None:
    """Return what verl's `key` is here, given the schema's keys; None if verl has no such key."""
    renamed = next(
        (table[key] for table in (RENAMED, RENAMED_IN_SFT) if key in table and targets(table[key], known)),
        None,
    )
    if renamed is not None:
        ours, _, note = renamed.partition("; ")
        return f"here it is {ours}" + (f" ({note})" if note else "")
    reason = reason_without(key)
    return None if reason is None else f"has no meaning here: {reason}"


def reason_without(key: str) -> str | None:
    """Return why verl's `key` has no counterpart here.

    Returns None if it is not a key of verl, or has a counterpart.
    """
    return reason_in(key, MEANINGLESS)


def reason_in(key: str, reasons: Mapping[str, str]) -> str | None:
    """Return the reason for the longest prefix of `key` that has one."""
    return next((reasons[beginning] for beginning in beginnings(key) if beginning in reasons), None)


def beginnings(key: str) -> Iterator[str]:
    """Yield a key and the sections that it is in, the innermost first."""
    parts = key.split(".")
    yield from (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def targets(renamed: str, known: Container[str]) -> list[str]:
    """Return our keys of one entry of RENAMED; [] if the schema lacks one of them."""
    keys = renamed.partition("; ")[0].split(" and ")
    return keys if all(key in known for key in keys) else []
