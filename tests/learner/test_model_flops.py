"""Parameters and floating-point operations from a config alone, against transformers' modules and torch's
counter of operations.

torch counts the products of every module that runs. A causal mask leaves some of them out that a dense
attention computes, so segments are played token by token here: then no masked pair is ever multiplied.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agentrl.config.model import LoRAConfig
from agentrl.config.model_flops import ModelFlops, count_pairs
from agentrl.config.model_size import ModelSize
from parts.experts import CONFIGS as EXPERTS
from parts.learner import tiny_sizes

SIZES = tiny_sizes(61)
CONFIGS = {
    **EXPERTS,
    "llama": LlamaConfig(**SIZES),
    "llama_biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "qwen3_moe_some": Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, mlp_only_layers=[0]
    ),
}
SEGMENTS = [[1], [7], [3, 5, 2]]


def module_of(config):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if config.model_type in EXPERTS:
        module.set_experts_implementation("eager")  # an expert computes the tokens that chose it
    return module


def size_of(config):
    size = ModelSize.of(config.to_dict())
    assert size is not None
    return size


def counted(counter):
    """Return all operations without those of rotary embeddings, whose angles are a matrix product."""
    by_module = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - angles


@torch.no_grad()
def play(module, length, num_scored):
    """Compute a segment token by token, and the logits of its last `num_scored` tokens."""
    cache = DynamicCache(config=module.config)
    for place in range(length):
        token = torch.tensor([[place % module.config.vocab_size]])
        hidden = module.model(input_ids=token, past_key_values=cache, use_cache=True).last_hidden_state
        if place >= length - num_scored:
            module.lm_head(hidden)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_module(name, is_tied):
    config = type(CONFIGS[name])(**{**CONFIGS[name].to_dict(), "tie_word_embeddings": is_tied})
    module, size = module_of(config), size_of(config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in module.model.layers]
    assert size.num_parameters == sum(p.numel() for p in module.parameters())
    assert (size.num_layer_parameters, size.largest_layer_parameters) == (sum(layers), max(layers))


def test_a_published_config_has_the_key_of_its_architecture():
    own = CONFIGS["qwen3_moe"].to_dict()
    published = {**own, "num_experts": own["num_local_experts"]}
    del published["num_local_experts"]
    assert ModelSize.of(published) == ModelSize.of(own)


@pytest.mark.parametrize("broken", [{}, {"model_type": "gpt2"}, {"model_type": "llama", "hidden_size": "x"}])
def test_an_unknown_config_has_no_size(broken):
    assert ModelSize.of(broken) is None


@pytest.mark.parametrize("lengths", SEGMENTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_of_packed_segments_has_the_operations_that_torch_counts(name, lengths):
    module = module_of(CONFIGS[name])
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            play(module, length, num_scored=1)
    found = ModelFlops(size_of(CONFIGS[name])).forward(lengths, num_scored=len(lengths))
    assert found == counted(counter)


@settings(max_examples=12, deadline=None)
@given(
    hidden=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]),
    head_dim=st.sampled_from([2, 4, 10]),
    mlp=st.integers(1, 40),
    layers=st.integers(1, 3),
    vocabulary=st.integers(2, 50),
    experts=st.none() | st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 20)),
    length=st.integers(1, 6),
    num_scored=st.integers(0, 6),
)
def test_operations_are_torchs_whatever_the_sizes(
    hidden, heads, head_dim, mlp, layers, vocabulary, experts, length, num_scored
):
    sizes = {
        "hidden_size": 2 * hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "pad_token_id": None,
    }
    if experts is None:
        config = Qwen3Config(**sizes)
    else:
        num, chosen, width = experts
        config = Qwen3MoeConfig(
            **sizes, num_experts=num, num_experts_per_tok=min(num, chosen), moe_intermediate_size=width
        )
    module, num_scored = module_of(config), min(num_scored, length)
    with FlopCounterMode(display=False) as counter:
        play(module, length, num_scored)
    size = size_of(config)
    assert ModelFlops(size).forward([length], num_scored=num_scored) == counted(counter)
    assert size.num_parameters == sum(p.numel() for p in module.parameters())


# --------------------------------------------------------------------------------------------------- backward


def count_dense_update(module, length):
    """Count a forward with dense attention, and then its backward too."""
    tokens = torch.arange(length)[None] % module.config.vocab_size
    with FlopCounterMode(display=False) as forward:
        logits = module(input_ids=tokens, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return counted(forward), counted(backward)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_backward_has_twice_the_operations_of_the_forward(name):
    flops, length = ModelFlops(size_of(CONFIGS[name])), 6
    forward, backward = count_dense_update(module_of(CONFIGS[name]), length)
    assert backward == 2 * forward
    masked = forward - flops.forward([length], num_scored=length)
    assert flops.update([length], num_scored=length) == 3 * (forward - masked)
    # What a dense attention computes beyond the causal one: n (n - 1) / 2 pairs, twice per head and column.
    size = flops.size
    assert masked == 4 * size.num_layers * size.attention_width * length * (length - 1) // 2


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj"), ("v_proj", "lm_head")])
def test_frozen_weights_below_an_adapter_have_no_gradient(targets):
    config, length = Qwen3Config(**{**SIZES, "tie_word_embeddings": False}, head_dim=12), 6
    module, flops = module_of(config), ModelFlops(size_of(config), LoRAConfig(rank=3, target_modules=targets))
    inject_adapter_in_model(LoraConfig(r=3, target_modules=list(targets or ALL)), module, "default")
    for name, weight in module.named_parameters():
        # The embedding is a lookup; training it lets autograd go through the whole first layer too.
        weight.requires_grad_("lora_" in name or "embed_tokens" in name)
    forward, backward = count_dense_update(module, length)
    masked = 4 * flops.size.num_layers * flops.size.attention_width * length * (length - 1) // 2
    assert flops.forward([length], num_scored=length) == forward - masked
    assert flops.update([length], num_scored=length) == forward + backward - 3 * masked


def test_a_score_head_has_one_column():
    size = size_of(CONFIGS["qwen2"])
    own, of_policy = ModelFlops(size, head_width=1), ModelFlops(size)
    difference = of_policy.forward([4], num_scored=3) - own.forward([4], num_scored=3)
    assert difference == 2 * 3 * size.hidden_size * (size.vocab_size - 1)


# ------------------------------------------------------------------------------------------------------ pairs


@given(
    length=st.integers(0, 30),
    prefix=st.integers(0, 30),
    window=st.none() | st.integers(1, 40),
)
def test_pairs_are_those_of_the_mask(length, prefix, window):
    keys = torch.arange(prefix + length)
    distance = keys[prefix:, None] - keys[None]
    mask = (distance >= 0) & (distance < (window or 1000))
    assert count_pairs(length, prefix, window) == int(mask.sum())


@pytest.mark.parametrize(
    ("config", "window", "num_layers"),
    [
        (MistralConfig(**SIZES, sliding_window=4), 4, 2),
        (MistralConfig(**SIZES, sliding_window=None), None, 0),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1), 4, 1),
        (Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=4, max_window_layers=1), None, 0),
    ],
)
def test_layers_with_sliding_attention_are_those_of_transformers(config, window, num_layers):
    size, own = size_of(config), config.to_dict()
    assert (size.window, size.num_window_layers) == (window, num_layers)
    own.pop("layer_types", None)  # as older versions write it
    assert ModelSize.of(own) == size
