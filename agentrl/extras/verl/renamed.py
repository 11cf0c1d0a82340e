"""Keys of verl that have another name here.

Keys with the same name (`data.train_files`, `trainer.total_epochs`, ...) are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    # key of verl -> our keys (joined by " and "), then "; " and the difference in meaning
    # data
    "data.tokenizer": "model.tokenizer_path",
    "data.train_batch_size": "buffer.groups_per_step; tasks per step, as in verl",
    "data.gen_batch_size": "buffer.groups_per_step; tasks are drawn one by one, there is no batch of "
    "generation",
    "data.train_max_samples": "data.max_train_rows; null for all rows",
    "data.val_max_samples": "data.max_val_rows; null for all rows",
    "data.reward_fn_key": "data.data_source_key",
    "data.image_key": "data.images.key",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "agent.max_response_tokens; for the whole trajectory, tool output included, "
    "as in verl",
    "data.filter_overlong_prompts": "data.overlong_prompts; filter",
    "data.truncation": "data.overlong_prompts; error, truncate_left, truncate_right or truncate_middle",
    "data.seed": "trainer.seed",
    "data.tool_config_path": "agent.verl_tool_config; the same file, unchanged",
    "data.function_tool_path": "agent.verl_function_tools; the same file, unchanged",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.apply_chat_template_kwargs": "model.chat_template_kwargs; rows may have their own",
    "data.custom_cls.path": "data.reader; `file.py:function` that turns a row into a Task",
    "data.custom_cls.name": "data.reader; `file.py:function` that turns a row into a Task",
    # actor_rollout_ref.model
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.tokenizer_path": "model.tokenizer_path",
    "actor_rollout_ref.model.custom_chat_template": "model.chat_template; a Jinja file",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "learner.gradient_checkpointing",
    "actor_rollout_ref.model.enable_activation_offload": "learner.activation_offload; with gradient "
    "checkpointing only",
    "actor_rollout_ref.model.override_config.attn_implementation": "model.attention",
    "actor_rollout_ref.model.external_lib": "model.external_lib; a module, or a `file.py`",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank; 0 trains all weights",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.target_modules; empty for all linear layers but "
    "the head",
    "actor_rollout_ref.model.lora.rank": "model.lora.rank; 0 trains all weights",
    "actor_rollout_ref.model.lora.alpha": "model.lora.alpha",
    "actor_rollout_ref.model.lora.dropout": "model.lora.dropout",
    "actor_rollout_ref.model.lora.target_modules": "model.lora.target_modules; empty for all linear layers "
    "but the head",
    # actor_rollout_ref.actor
    "actor_rollout_ref.actor.optim.lr": "learner.optimizer.lr",
    "actor_rollout_ref.actor.optim.betas": "learner.optimizer.betas",
    "actor_rollout_ref.actor.optim.weight_decay": "learner.optimizer.weight_decay",
    "actor_rollout_ref.actor.optim.clip_grad": "learner.optimizer.grad_clip",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "learner.optimizer.warmup_updates; in optimizer updates",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "learner.optimizer.warmup_updates; a number of "
    "updates, not a share",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "learner.optimizer.schedule",
    "actor_rollout_ref.actor.optim.warmup_style": "learner.optimizer.schedule",
    "actor_rollout_ref.actor.optim.lr_decay_style": "learner.optimizer.schedule; of Megatron",
    "actor_rollout_ref.actor.optim.total_training_steps": "trainer.steps",
    "actor_rollout_ref.actor.grad_clip": "learner.optimizer.grad_clip",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "learner.minibatches_per_step; their number: "
    "train_batch_size / ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "learner.microbatch_tokens",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "learner.microbatch_tokens; microbatches are packed by "
    "tokens",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "learner.microbatch_tokens; microbatches are "
    "packed by tokens",
    "actor_rollout_ref.actor.ppo_epochs": "learner.epochs_per_step",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_low and algorithm.clip_high; verl uses it "
    "only if clip_ratio_low or clip_ratio_high is null",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low; of dppo_tv: algorithm.dppo_tv.delta_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high; of dppo_tv: "
    "algorithm.dppo_tv.delta_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.dual_clip; null for off; of dppo_tv: "
    "algorithm.dppo_tv.cap",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation; token_mean, sequence_mean_token_sum, "
    "..., or constant",
    "actor_rollout_ref.actor.loss_scale_factor": "algorithm.constant_length",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coefficient",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl.coefficient; 0 for no KL loss",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl.estimator; low_var_kl is k3, `+` is k3_k2grad",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm.policy_loss; vanilla is ppo_clip, geo_mean "
    "is gmpo",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": "algorithm.clip_cov.share",
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb": "algorithm.clip_cov.lower",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ub": "algorithm.clip_cov.upper",
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": "algorithm.kl_cov.share",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": "algorithm.kl_cov.coefficient",
    "actor_rollout_ref.actor.tau_pos": "algorithm.sapo.tau_positive",
    "actor_rollout_ref.actor.tau_neg": "algorithm.sapo.tau_negative",
    "actor_rollout_ref.actor.data_loader_seed": "trainer.seed",
    "actor_rollout_ref.actor.fsdp_config.dtype": "model.dtype",
    "actor_rollout_ref.actor.fsdp_config.seed": "trainer.seed",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "learner.fsdp.shard_size; ranks that share one copy of "
    "the weights, null for all",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "learner.offload; parameters",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "learner.offload; optimizer",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "learner.offload; parameters",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "learner.fsdp.reshard_after_forward",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "learner.fsdp.forward_prefetch; a number of "
    "layers",
    "actor_rollout_ref.actor.use_torch_compile": "learner.compile; whole layers",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": "learner.compile; whole layers",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "learner.sequence_parallel; of "
    "learner.world_size ranks",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": "learner.sequence_parallel; of "
    "learner.world_size ranks",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": "learner.logprob_chunk_tokens; always in "
    "chunks, entropies too",
    # actor_rollout_ref.rollout
    "actor_rollout_ref.rollout.name": "rollout.backend; sglang or embedded",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": "rollout.replay_experts",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "actor_rollout_ref.rollout.dtype": "model.dtype",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_tokens",
    "actor_rollout_ref.rollout.response_length": "agent.max_response_tokens",
    "actor_rollout_ref.rollout.nnodes": "rollout.num_servers and placement.pools; the pool of "
    "placement.roles.servers",
    "actor_rollout_ref.rollout.n_gpus_per_node": "rollout.num_servers and placement.pools; the pool of "
    "placement.roles.servers",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.sglang.args and placement.pools; "
    "`{tp_size: 2}`, 2 GPUs each",
    "actor_rollout_ref.rollout.data_parallel_size": "rollout.num_servers; one server per replica",
    "actor_rollout_ref.rollout.expert_parallel_size": "rollout.sglang.args; `{ep_size: 2}`",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": "rollout.sglang.args; `{pp_size: 2}`",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.sglang.args; `{mem_fraction_static: 0.8}`",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.sglang.args; `{max_running_requests: 256}`; or "
    "rollout.embedded",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "rollout.sglang.args; `{chunked_prefill_size: "
    "8192}`; or rollout.embedded",
    "actor_rollout_ref.rollout.max_model_len": "rollout.sglang.args; `{context_length: 8192}`",
    "actor_rollout_ref.rollout.enable_prefix_caching": "rollout.sglang.args; `{disable_radix_cache: true}` "
    "turns it off",
    "actor_rollout_ref.rollout.enforce_eager": "rollout.sglang.args; `{disable_cuda_graph: true}`",
    "actor_rollout_ref.rollout.quantization": "rollout.sglang.args; `{quantization: fp8}`",
    "actor_rollout_ref.rollout.scheduling_policy": "rollout.sglang.args; `{schedule_policy: fcfs}`",
    "actor_rollout_ref.rollout.engine_kwargs.sglang": "rollout.sglang.args",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "learner.microbatch_tokens",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "learner.microbatch_tokens; microbatches are "
    "packed by tokens",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "learner.microbatch_tokens; microbatches "
    "are packed by tokens",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.n",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "eval.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "eval.top_k",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "eval.temperature; 0 is greedy",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "agent.max_turns",
    "actor_rollout_ref.rollout.multi_turn.max_turns": "agent.max_turns",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "agent.max_user_turns; null for any number",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": "agent.max_tool_calls_per_turn",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "agent.max_tool_output_tokens; in "
    "tokens",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "agent.verl_tool_config; the same file, "
    "unchanged",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": "agent.verl_function_tools; the same file, "
    "unchanged",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "agent.tool_limits; per tool, "
    "`{keep: head | tail | ends}`",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "agent.verl_interaction_config; the same "
    "file, unchanged",
    "actor_rollout_ref.rollout.multi_turn.format": "model.tool_format",
    "actor_rollout_ref.rollout.agent.num_workers": "rollout.num_actors",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "agent.default",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "agent.plugins; each agent of your file is "
    "registered by its name",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "rollout.weights.transport; disk or distributed",
    **dict.fromkeys(
        (
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        ),
        "rollout.weights.bucket_bytes; in bytes",
    ),
    "actor_rollout_ref.nccl_timeout": "learner.collective_timeout_s",
    # actor_rollout_ref.ref
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "learner.microbatch_tokens",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "learner.microbatch_tokens; microbatches are packed "
    "by tokens",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "learner.microbatch_tokens; microbatches are "
    "packed by tokens",
    # critic
    "critic.enable": "critic.enabled; set automatically if algorithm.advantage needs a critic",
    "critic.model.lora_rank": "critic.model.lora.rank",
    "critic.model.lora_alpha": "critic.model.lora.alpha",
    "critic.model.target_modules": "critic.model.lora.target_modules; empty for all linear layers but the "
    "head",
    "critic.optim.lr": "critic.optimizer.lr",
    "critic.optim.betas": "critic.optimizer.betas",
    "critic.optim.clip_grad": "critic.optimizer.grad_clip",
    "critic.optim.lr_scheduler_type": "critic.optimizer.schedule",
    "critic.optim.warmup_style": "critic.optimizer.schedule",
    "critic.optim.lr_decay_style": "critic.optimizer.schedule; of Megatron",
    "critic.optim.lr_warmup_steps_ratio": "critic.optimizer.warmup_updates; a number of updates, not a share",
    "critic.optim.total_training_steps": "trainer.steps",
    "critic.optim.weight_decay": "critic.optimizer.weight_decay",
    "critic.optim.lr_warmup_steps": "critic.optimizer.warmup_updates; in updates",
    "critic.ppo_epochs": "critic.epochs_per_step",
    "critic.ppo_mini_batch_size": "learner.minibatches_per_step; the critic takes the policy's minibatches",
    "critic.ppo_micro_batch_size": "learner.microbatch_tokens; microbatches are packed by tokens",
    "critic.ppo_micro_batch_size_per_gpu": "learner.microbatch_tokens; microbatches are packed by tokens",
    "critic.ppo_max_token_len_per_gpu": "learner.microbatch_tokens",
    "critic.loss_agg_mode": "algorithm.aggregation; the critic takes the policy's",
    "critic.grad_clip": "critic.optimizer.grad_clip",
    "trainer.critic_warmup": "critic.warmup_steps",
    "algorithm.kl_penalty": "algorithm.kl.estimator; kl is k1, mse is k2, low_var_kl is k3",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coefficient; with algorithm.kl.place=reward",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target; nats per action token",
    "algorithm.kl_ctrl.horizon": "algorithm.kl.horizon",
    # reward model
    "reward_model.max_length": "reward_model.max_tokens",
    "reward_model.forward_max_token_len_per_gpu": "reward_model.microbatch_tokens",
    "reward_model.micro_batch_size": "reward_model.microbatch_tokens; microbatches are packed by tokens",
    "reward_model.micro_batch_size_per_gpu": "reward_model.microbatch_tokens; microbatches are packed by "
    "tokens",
    "reward_model.n_gpus_per_node": "reward_model.world_size; its ranks in all",
    "reward_model.nnodes": "reward_model.world_size; its ranks in all",
    "reward_model.model.fsdp_config.param_offload": "reward_model.offload; parameters",
    "reward_model.model.fsdp_config.fsdp_size": "reward_model.fsdp.shard_size",
    "reward.reward_model.model_path": "reward_model.model.path",
    # reward
    "custom_reward_function.path": "reward.custom_function.path",
    "custom_reward_function.name": "reward.custom_function.name",
    "custom_reward_function.reward_kwargs": "reward.custom_function.kwargs",
    "reward_model.num_workers": "reward.num_processes; per rollout actor, for rewards that need a process",
    "reward.num_workers": "reward.num_processes; per rollout actor, for rewards that need a process",
    "reward.custom_reward_function.path": "reward.custom_function.path",
    "reward.custom_reward_function.name": "reward.custom_function.name",
    "reward.custom_reward_function.reward_kwargs": "reward.custom_function.kwargs",
    # algorithm
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction.weight; token, sequence or none; with "
    "bypass_mode and reinforce: algorithm.reinforce.weight",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction.cap; with bypass_mode and "
    "reinforce: algorithm.reinforce.cap",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "algorithm.correction.self_normalize",
    "algorithm.rollout_correction.rollout_rs": "algorithm.correction.reject; named stages, all of which must "
    "be passed",
    "algorithm.rollout_correction.rollout_rs_threshold": "algorithm.correction.reject; lower and upper of a "
    "stage, on proximal / behavior (verl's are on its inverse)",
    "algorithm.rollout_correction.bypass_mode": "algorithm.mode; bypass",
    "algorithm.rollout_correction.loss_type": "algorithm.policy_loss; reinforce without rollout_is is gpg",
    "algorithm.rollout_is": "algorithm.correction.weight; token, sequence, geometric or none",
    "algorithm.rollout_is_threshold": "algorithm.correction.cap",
    "actor_rollout_ref.actor.tis_imp_ratio_cap": "algorithm.correction.cap",
    "algorithm.filter_groups.enable": "buffer.drop_constant_groups",
    "algorithm.filter_groups.max_num_gen_batches": "buffer.max_constant_batches",
    # trainer
    "trainer.total_training_steps": "trainer.steps",
    "trainer.n_gpus_per_node": "placement.pools and learner.world_size; GPUs of the actor's pool, and ranks "
    "of the whole cluster",
    "trainer.nnodes": "placement.pools and cluster.address; nodes of the actor's pool, and the address of a "
    "running Ray",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.resume_from_path": "trainer.resume_mode; the path itself",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_last",
    "trainer.max_critic_ckpt_to_keep": "trainer.keep_last",
    "trainer.device": "placement.pools; device of a pool",
    "trainer.v1.sampler.max_off_policy_threshold": "buffer.max_staleness; in versions, a hard bound on the "
    "age of every token",
    "ray_kwargs.ray_init.num_cpus": "cluster.num_cpus",
    "ray_kwargs.ray_init.address": "cluster.address",
    "ray_init.num_cpus": "cluster.num_cpus",
    # fully asynchronous training
    "async_training.staleness_threshold": "buffer.max_staleness; in versions, a hard bound on the age of "
    "every token",
    "async_training.require_batches": "buffer.groups_per_step; one batch per step",
    "async_training.partial_rollout": "rollout.weights.pause_mode; an interrupted turn is always continued",
    "async_training.trigger_parameter_sync_step": "learner.minibatches_per_step; weights are published after "
    "every step",
    "async_training.use_rollout_log_probs": "algorithm.mode; bypass",
    "rollout.n": "rollout.group_size",
    "rollout.nnodes": "rollout.num_servers and placement.pools; the pool of placement.roles.servers",
    "rollout.n_gpus_per_node": "rollout.num_servers and placement.pools; the pool of placement.roles.servers",
    "rollout.test_freq": "trainer.test_freq",
    "rollout.total_rollout_steps": "trainer.steps",
    "rollout.total_epochs": "trainer.total_epochs",
    # profiling
    "global_profiler.steps": "trainer.profile_steps; counted from 1",
    # supervised training
    "model.partial_pretrain": "model.path",
    "model.lora_rank": "model.lora.rank; 0 trains all weights",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.target_modules; empty for all linear layers but the head",
    "model.fsdp_config.cpu_offload": "learner.offload; parameters",
    "model.fsdp_config.offload_params": "learner.offload; parameters",
    "ulysses_sequence_parallel_size": "learner.sequence_parallel; of learner.world_size ranks",
    "model.enable_gradient_checkpointing": "learner.gradient_checkpointing",
    "data.max_length": "data.max_tokens",
    "data.messages_dataset.messages_key": "data.messages_key",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "data.micro_batch_size_per_gpu": "learner.microbatch_tokens; microbatches are packed by tokens",
    "data.max_token_len_per_gpu": "learner.microbatch_tokens",
    "optim.lr": "learner.optimizer.lr",
    "optim.betas": "learner.optimizer.betas",
    "optim.weight_decay": "learner.optimizer.weight_decay",
    "optim.clip_grad": "learner.optimizer.grad_clip",
    "optim.lr_scheduler": "learner.optimizer.schedule",
}

RENAMED_IN_SFT: Mapping[str, str] = {
    "data.train_batch_size": "trainer.batch_size; conversations per update",
    "trainer.default_local_dir": "trainer.output",
}
