"""Defaults of verl's supervised training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_COLUMNS: Mapping[str, Any] = {
    # verl 0.3 to 0.6: `fsdp_sft_trainer`, whose model is `model.partial_pretrain`
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.multiturn.enable": False,
    "data.multiturn.messages_key": "messages",
    "data.multiturn.tools_key": "tools",
    "data.max_length": 1024,
    "data.truncation": "error",
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.clip_grad": 1.0,
    "optim.warmup_steps_ratio": 0.1,
    "optim.lr_scheduler": "cosine",
    "ulysses_sequence_parallel_size": 1,
    "trainer.total_epochs": 4,
    "trainer.seed": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.resume_mode": "auto",
}
OF_MESSAGES: Mapping[str, Any] = {
    # verl 0.6 and later: `sft_trainer`, whose rows are conversations and whose model is `model.path`
    **OF_COLUMNS,
    "data.multiturn.enable": True,
    "data.messages_key": "messages",
    "data.tools_key": "tools",
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.warmup_steps_ratio": None,
    "optim.lr_scheduler_type": "constant",
    "optim.lr_scheduler": None,
    "engine.ulysses_sequence_parallel_size": 1,
    "trainer.n_gpus_per_node": 1,
}


def supervised_defaults(written: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the defaults of the trainer to which a config, flat or nested, belongs."""
    if module.endswith("fsdp_sft_trainer"):
        return OF_COLUMNS
    if module:
        return OF_MESSAGES
    model, data = written.get("model"), written.get("data")
    is_old = (
        "partial_pretrain" in (model if isinstance(model, Mapping) else ())
        or "model.partial_pretrain" in written
    )
    is_old |= "prompt_key" in (data if isinstance(data, Mapping) else ()) or "data.prompt_key" in written
    return OF_COLUMNS if is_old else OF_MESSAGES
