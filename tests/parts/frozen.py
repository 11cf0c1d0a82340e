"""A frozen model for tests with opponents and teachers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.chat.tiny import write_tiny_tokenizer


def write_frozen(policy: Path, folder: Path, *, seed: int = 11) -> Path:
    """Write a random model with the policy's tokenizer, with half of its layers."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(policy)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder
