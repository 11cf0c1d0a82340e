"""Tiny mixtures of experts, of every architecture that is tested."""

import dataclasses
import importlib

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from parts.learner import tiny_sizes

VOCABULARY = 61
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 5, 2
SIZES = tiny_sizes(VOCABULARY, intermediate_size=48, max_position_embeddings=512, eos_token_id=60)
ROUTED = {"num_experts_per_tok": TOP_K, "num_experts": NUM_EXPERTS}
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_experts_per_tok=TOP_K, num_local_experts=NUM_EXPERTS),
    "olmoe": OlmoeConfig(**SIZES, **ROUTED),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, **ROUTED, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **ROUTED, moe_intermediate_size=24, head_dim=8),
}
"""Five experts: no number of ranks divides them. Widths are multiples of 16 bytes, as grouped products need
them.
"""


class _Float64:
    """torch, for a module that names float32."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def compute_in_float64():
    """Let norms and routers of this process, which are in float32 whatever the weights are, be in float64.

    Otherwise a float64's last bit decides a float32's, and no two orders of a sum agree to more than 1e-7.
    """
    modules = [f"transformers.models.{name}.modeling_{name}" for name in CONFIGS]
    for name in (*modules, "agentrl.learner.routing"):
        importlib.import_module(name).torch = _Float64()


def sized(name, num_experts, **changes):
    """Return the config of an architecture with another number of experts."""
    sizes = CONFIGS[name].to_dict() | changes
    key = "num_local_experts" if "num_local_experts" in sizes else "num_experts"
    return type(CONFIGS[name])(**{**sizes, key: num_experts})


def write_experts(folder, name="qwen3_moe", *, dtype=torch.float32, is_tied=True, num_experts=NUM_EXPERTS):
    """Write a random model in several files; the same whenever it is written.

    Norms and biases are random, too, and the router prefers some experts.
    """
    torch.manual_seed(0)
    config = sized(name, num_experts, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for values in model.state_dict().values():
            values.add_(torch.randn_like(values) * 0.1)
            values.view(-1)[::7] = -0.0  # differs from 0.0 in a checksum
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB")


def random_experts(num_tokens, *, seed, num_experts=NUM_EXPERTS):
    """Return experts that nobody's router would choose, i16[T, W]; those of the last token are unknown."""
    rng = np.random.default_rng(seed)
    table = [rng.permutation(num_experts)[:TOP_K] for _ in range(num_tokens * NUM_LAYERS)]
    experts = np.array(table, np.int16).reshape(num_tokens, NUM_LAYERS * TOP_K)
    experts[-1] = -1
    return experts


def with_experts(samples, *, num_experts=NUM_EXPERTS):
    """Return the samples, every second one with random experts."""
    return [
        dataclasses.replace(
            sample, experts=random_experts(sample.num_tokens, seed=index, num_experts=num_experts)
        )
        if index % 2
        else sample
        for index, sample in enumerate(samples)
    ]
