"""A learner of one rank in this process, on the CPU: the policy that servers are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.controller.roles import open_local_learner
from agentrl.granted import granted_cpus
from agentrl.learner.learner import Learner, LearnerSpec

_LAYER: Any = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_LAYER_PARAMETERS = 3_000_000
_VOCABULARY = 1024


@contextmanager
def open_policy(model: ModelConfig, *, temperature: float) -> Iterator[LocalWorker[Learner]]:
    """Yield the learner of `model`, a local folder, without its adapter: a new adapter changes nothing.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    spec = LearnerSpec(
        model.model_copy(update={"lora": LoRAConfig()}),
        LearnerConfig(threads=granted_cpus()),
        AlgorithmConfig(),
        "on_policy",
        seed=0,
        temperature=temperature,
        total_updates=1,
        device="cpu",
        scores_ahead=False,
    )
    learner = open_local_learner(spec)
    try:
        yield learner
    finally:
        learner.stop()


def write_random_model(folder: Path, *, num_bytes: int, dtype: str) -> None:
    """Write a model of about `num_bytes`, at least one layer, with random weights and no tokenizer."""
    torch.manual_seed(0)
    own = getattr(torch, dtype)
    num_layers = max(1, num_bytes // (own.itemsize * _LAYER_PARAMETERS))
    config = Qwen2Config(
        **_LAYER,
        vocab_size=_VOCABULARY,
        num_hidden_layers=num_layers,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=own).save_pretrained(folder)
