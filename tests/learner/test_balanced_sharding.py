"""Each of many ranks holds its share of a model's weights, also where a weight stacks fewer experts than
there are ranks.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from agentrl.config.learner import FSDPConfig, LearnerConfig
from agentrl.errors import ConfigError
from agentrl.learner import sharding
from agentrl.learner.experts import divide_experts, find_experts
from agentrl.learner.sharding import balanced_dimension, open_expert_mesh, open_mesh, own_part

SIZES_235B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_hidden_layers=2,  # of 94, which are alike
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    tie_word_embeddings=False,
)


@contextmanager
def sharded(world_size, *, rank=0, expert_parallel=1, shard_size=None):
    """Yield the model as one of many ranks holds it: shapes only."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(SIZES_235B)
        sizes = {"world_size": world_size, "shard_size": shard_size}
        experts = None
        if expert_parallel > 1:
            experts = open_expert_mesh("cpu", **sizes, expert_parallel=expert_parallel)
            divide_experts(module, experts["expert"])
        config = LearnerConfig(
            world_size=world_size, fsdp=FSDPConfig(shard_size=shard_size), expert_parallel=expert_parallel
        )
        mesh = open_mesh("cpu", **sizes)
        sharding.shard(
            module, mesh, config, compute_dtype=torch.bfloat16, has_backward=True, expert_mesh=experts
        )
        yield module
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("expert_parallel", [1, 8])
@pytest.mark.parametrize("world_size", [64, 256, 512])
def test_no_rank_holds_a_tenth_more_than_its_share(world_size, expert_parallel):
    # FSDP gives the first ranks the larger parts.
    with sharded(world_size, expert_parallel=expert_parallel) as module:
        weights = dict(module.named_parameters())
        assert all(isinstance(weight, DTensor) for weight in weights.values())
        own = sum(own_part(weight)[0].numel() for weight in weights.values())
        share = sum(weight.numel() for weight in weights.values()) / world_size
        assert 0.9 < own / share < 1.1
        for experts in find_experts(module):
            for weight in experts.parameters():
                assert own_part(weight)[0].numel() == weight.numel() / world_size


# Each mesh once in this file: torch caches where a rank's part begins by the mesh, without the rank.
@pytest.mark.parametrize(
    ("world_size", "rank", "expert_parallel"), [(32, 13, 8), (192, 149, 8), (64, 63, 64)]
)
def test_a_rank_owns_its_part_of_whole_experts(world_size, rank, expert_parallel):
    num_own = 128 // expert_parallel
    group, owner = rank % expert_parallel, rank // expert_parallel
    with sharded(world_size, rank=rank, expert_parallel=expert_parallel) as module:
        weight = next(find_experts(module)).gate_up_proj
        own, start = own_part(weight)
    num_owners = world_size // expert_parallel
    if num_own % num_owners == 0:
        each = num_own // num_owners
        assert own.shape == (each, 3072, 4096)
        assert start == (group * num_own + owner * each, 0, 0)
    else:
        each = 3072 // num_owners
        assert own.shape == (num_own, each, 4096)
        assert start == (group * num_own, owner * each, 0)


def test_copies_divide_experts_within_a_copy():
    with sharded(16, rank=9, expert_parallel=4, shard_size=8) as module:
        weight = next(find_experts(module)).down_proj
        assert weight.device_mesh.mesh_dim_names == ("copy", "shard", "expert")
        own, start = own_part(weight)
        assert (own.shape, start) == ((16, 4096, 1536), (32, 0, 0))
        assert next(module.parameters()).placements[1] == Shard(0)


def test_owners_that_divide_nothing_of_their_experts_are_refused():
    with (
        pytest.raises(ConfigError, match=r"^the 11 ranks that own .* none of the sizes \[32, 3072, 4096\]"),
        sharded(44, expert_parallel=4),
    ):
        pass


@pytest.mark.parametrize(
    ("shape", "num_ranks", "expected"),
    [
        ((128, 3072, 4096), 64, 0),
        ((128, 3072, 4096), 256, 1),
        ((128, 3000, 4096), 256, 2),
        ((5, 7, 11), 2, 0),  # nothing is even: FSDP pads the first
        ((10, 64), 64, 0),  # no stack: a router or a small matrix
        ((10,), 64, 0),
    ],
)
def test_stacked_weights_are_sharded_by_a_dimension_that_the_ranks_divide(shape, num_ranks, expected):
    assert balanced_dimension(shape, num_ranks) == expected
