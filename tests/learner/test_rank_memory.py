"""The predicted memory of a rank: activations against what autograd keeps, shares against ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from agentrl.config.learner import FSDPConfig, LearnerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.model_size import ModelSize
from agentrl.config.rank_memory import activation_bytes_per_token, frozen_memory, trained_memory
from agentrl.learner.attention import Segments, register_attention
from agentrl.learner.learner import Learner
from parts.experts import CONFIGS as EXPERTS
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes

WIDE = tiny_sizes(61, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
CONFIGS = {
    "llama": LlamaConfig(**WIDE, head_dim=24),
    "qwen2": Qwen2Config(**WIDE),
    "qwen3": Qwen3Config(**WIDE, head_dim=24),
    "mixtral": EXPERTS["mixtral"],
    "qwen2_moe": EXPERTS["qwen2_moe"],
    "qwen3_moe": EXPERTS["qwen3_moe"],
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN32 = ModelSize.of(
    {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    }
)
assert QWEN32 is not None


def kept_bytes(module, length):
    """Count the bytes that autograd keeps of a forward without the head; each storage once."""
    own = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    kept, sizes = [], {}

    def keep(tensor):
        kept.append(tensor)  # or its memory would be used again
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(length)[None] % 61
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module.model(input_ids=tokens, segments=Segments([length - 9, 9]), use_cache=False)
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_what_autograd_keeps(name, dtype):
    register_attention()
    config, length = CONFIGS[name], 128
    module = AutoModelForCausalLM.from_config(
        config, attn_implementation="segment_sdpa", dtype=getattr(torch, dtype)
    )
    if name in EXPERTS:
        module.set_experts_implementation("eager")
    predicted = activation_bytes_per_token(
        ModelSize.of(config.to_dict()), ModelConfig(dtype=dtype), LearnerConfig(), is_gpu=False
    )
    assert kept_bytes(module, length) / length == pytest.approx(predicted, rel=0.08)


def test_frozen_weights_keep_less():
    register_attention()
    module = AutoModelForCausalLM.from_config(
        CONFIGS["llama"], attn_implementation="segment_sdpa", dtype=torch.float32
    )
    inject_adapter_in_model(LoraConfig(r=2, target_modules=TARGETS), module, "default")
    for name, weight in module.named_parameters():
        weight.requires_grad_("lora_" in name)
    predicted = activation_bytes_per_token(
        ModelSize.of(CONFIGS["llama"].to_dict()),
        ModelConfig(lora=LoRAConfig(rank=2)),
        LearnerConfig(),
        is_gpu=False,
    )
    assert kept_bytes(module, 128) / 128 == pytest.approx(predicted, rel=0.08)


def state(learner, model=None, **options):
    model = model or ModelConfig(dtype="bfloat16")
    return trained_memory(QWEN32, model, learner, tokens=8192, is_gpu=True, **options).state


def test_state_is_sixteen_bytes_per_weight_over_the_ranks():
    for world_size in (1, 8, 64):
        assert sum(state(LearnerConfig(world_size=world_size)).values()) == pytest.approx(
            16 * QWEN32.num_parameters / world_size
        )


def test_copies_of_hsdp_do_not_share_their_state():
    own = state(LearnerConfig(world_size=64, fsdp=FSDPConfig(shard_size=8)))
    assert own == state(LearnerConfig(world_size=8))


def test_tensor_parallelism_cuts_layers_and_fsdp_shards_what_is_left():
    own = state(LearnerConfig(world_size=64, tensor_parallel=8))
    layers, root = QWEN32.num_layer_parameters / 64, QWEN32.num_root_parameters / 8
    assert own["weights"] == 4 * (layers + root)


def test_tensor_parallelism_and_copies_share_the_ranks_of_a_copy():
    own = state(LearnerConfig(world_size=64, tensor_parallel=8, fsdp=FSDPConfig(shard_size=16)))
    assert own == state(LearnerConfig(world_size=16, tensor_parallel=8))


def test_of_an_adapter_tensor_parallelism_cuts_one_factor():
    """By hand: the rows of B for 1,024 keys, and the columns of A for 27,648 activations."""
    lora = ModelConfig(dtype="bfloat16", lora=LoRAConfig(rank=32, target_modules=("k_proj", "down_proj")))
    whole, cut = (
        state(LearnerConfig(world_size=8, tensor_parallel=number), lora)["weights"] for number in (1, 8)
    )
    assert whole == 4 * 64 * 32 * ((5120 + 1024) + (27648 + 5120)) / 8
    assert cut == 4 * 64 * 32 * ((5120 + 1024 / 8) + (27648 / 8 + 5120))


def test_divided_experts_are_gathered_by_their_owners_alone():
    """Of Qwen3-235B-A22B on 64 ranks: three layers less seven eighths of their experts, in bfloat16."""
    size = ModelSize.of(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        }
    )
    model = ModelConfig(dtype="bfloat16")
    whole, divided = (
        trained_memory(
            size, model, LearnerConfig(world_size=64, expert_parallel=number), tokens=16384, is_gpu=True
        )
        for number in (1, 8)
    )
    experts = 128 * 3 * 4096 * 1536
    assert whole.working["gathered weights"] - divided.working["gathered weights"] == pytest.approx(
        3 * 2 * experts * 7 / 8
    )
    assert divided.state == whole.state


def test_frozen_weights_below_an_adapter_are_sharded_too():
    lora = ModelConfig(dtype="bfloat16", lora=LoRAConfig(rank=32))
    for world_size in (1, 8):
        own = state(LearnerConfig(world_size=world_size), lora, has_reference=True)
        assert own["frozen weights"] == 2 * QWEN32.num_parameters / world_size, "the reference is the base"
        assert own["weights"] < 0.02 * own["frozen weights"] * 2
    [reference] = {state(LearnerConfig(world_size=8), has_reference=True)["frozen weights"]}
    assert reference == 2 * QWEN32.num_parameters / 8


def test_what_is_offloaded_is_in_the_hosts_memory():
    options = {"size": QWEN32, "model": ModelConfig(dtype="bfloat16"), "tokens": 8192, "is_gpu": True}
    plain, optimizer, parameters = (
        trained_memory(learner=LearnerConfig(world_size=8, offload=offload), **options)
        for offload in ("none", "optimizer", "parameters")
    )
    assert optimizer.state_bytes == plain.state_bytes / 2
    assert optimizer.host == {"optimizer state": plain.state["optimizer state"]}
    assert (parameters.state, parameters.host) == ({}, plain.state)
    on_cpu = trained_memory(
        QWEN32, options["model"], LearnerConfig(world_size=8, offload="parameters"), tokens=1, is_gpu=False
    )
    assert (on_cpu.host, on_cpu.state) == ({}, plain.state), "on a CPU there is nowhere else"


@given(
    tokens=st.integers(1, 200_000),
    ranks=st.sampled_from([1, 2, 4, 8]),
    checkpointing=st.booleans(),
    offload=st.sampled_from(["none", "optimizer", "parameters"]),
    rank=st.sampled_from([0, 16]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    is_gpu=st.booleans(),
)
def test_more_ranks_fewer_tokens_and_recomputation_never_need_more(
    tokens, ranks, checkpointing, offload, rank, dtype, is_gpu
):
    def peak(tokens=tokens, **learner):
        options = {"gradient_checkpointing": checkpointing, "offload": offload, "world_size": 8 * ranks}
        model = ModelConfig(dtype=dtype, lora=LoRAConfig(rank=rank))
        own = LearnerConfig(**(options | learner))
        return trained_memory(QWEN32, model, own, tokens=tokens, is_gpu=is_gpu).peak_bytes

    assert peak(world_size=16 * ranks) <= peak()
    assert peak(sequence_parallel=8) <= peak()
    assert peak(tokens=tokens + 1000) >= peak()
    assert peak(gradient_checkpointing=True) <= peak(gradient_checkpointing=False)
    recomputed = {"gradient_checkpointing": True}
    assert peak(**recomputed, activation_offload=True) <= peak(**recomputed)
    assert peak(offload="optimizer") <= peak(offload="none")
    assert peak(offload="parameters") <= peak(offload="optimizer")


def test_a_frozen_model_needs_its_weights_and_one_layers_activations():
    model, learner = ModelConfig(dtype="bfloat16"), LearnerConfig(world_size=8)
    own = frozen_memory(QWEN32, model, learner, tokens=8192, is_gpu=True)
    assert own.state == {"weights": 2 * QWEN32.num_parameters / 8}
    trained = trained_memory(QWEN32, model, learner, tokens=8192, is_gpu=True)
    assert own.working["activations"] < trained.working["activations"] / 60


def test_a_learner_says_what_it_expects_beside_what_it_measures():
    from agentrl.learner.packing import pack

    with lone_learner(learner_spec(sizes=tiny_sizes(61))) as learner:
        assert isinstance(learner, Learner)
        [small] = pack(random_samples(2, 61, length=6), max_tokens=99, world_size=1)
        [large] = pack(random_samples(9, 61, length=17), max_tokens=999, world_size=1)
        predicted = []
        for shard in (small, large):
            learner.update(learner.score(shard))
            predicted.append(learner.usage()["memory/update_predicted_bytes_max"])
        assert 0 < predicted[0] < predicted[1]
