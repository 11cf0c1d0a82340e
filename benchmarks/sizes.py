"""What each rank holds and what a publish sends, for published models on 8 to 512 ranks.

    python benchmarks/sizes.py --out docs/results/sizes.json

Qwen2.5-7B, 32B and 72B, Qwen3-30B-A3B and 235B-A22B. The learner's own sharding runs in a fake process group,
on weights without memory. State is what a rank keeps of weights, gradients and AdamW's moments: 16 bytes for
each weight that is its own. The largest of all ranks is compared with an even share. `predicted_gb` is the
peak that `agentrl config explain` says of an average rank, with recomputed activations and microbatches of
16,384 tokens.

A publish sends all weights in bfloat16 in buckets of `rollout.weights.bucket_bytes`. Each rank is called once
(`Learner.send_buckets`).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from load_memory import LARGE
from machine import write_result
from torch import Tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.model_size import ModelSize
from agentrl.config.rank_memory import trained_memory
from agentrl.config.rollout import WeightsConfig
from agentrl.learner import sharding
from agentrl.learner.buckets import plan_buckets
from agentrl.servers.weight_names import find_pieces
from agentrl.types import TensorSpec

STATE_BYTES = 16
TOKENS = 16384
MODELS: dict[str, Any] = {
    "7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "32B": LARGE["32B (Qwen2.5)"],
    "72B": LARGE["72B (Qwen2.5)"],
    "30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
    "235B-A22B": LARGE["235B-A22B (Qwen3)"],
}


def elements_by_rank(weights: list[Tensor], world_size: int) -> list[int]:
    """Return how many elements of all weights each rank holds, by the arithmetic of DTensor."""
    alike = Counter(
        (tuple(weight.shape), weight.device_mesh, tuple(weight.placements))  # type: ignore[attr-defined]
        for weight in weights
    )
    totals = [0] * world_size
    for (shape, mesh, placements), count in alike.items():
        places = {int(rank): list(place) for place, rank in np.ndenumerate(mesh.mesh.numpy())}
        for rank in range(world_size):
            local, _ = _compute_local_shape_and_global_offset(shape, mesh.shape, places[rank], placements)
            totals[rank] += count * math.prod(local)
    return totals


def published(module: Any) -> list[TensorSpec]:
    """Return what is sent in a publish: the names, shapes and bytes of each piece, in bfloat16."""
    return [
        TensorSpec(name, "bfloat16", tuple(piece.shape), 2 * torch.Size(piece.shape).numel())
        for name, piece in find_pieces(module).items()
    ]


def one(name: str, world_size: int) -> dict[str, Any]:
    """Return the figures of a model on a number of ranks."""
    config = MODELS[name]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    specs = published(module)
    buckets = plan_buckets(specs, max_bytes=WeightsConfig().bucket_bytes)
    learner = LearnerConfig(world_size=world_size, gradient_checkpointing=True)
    mesh = sharding.open_mesh("cpu", world_size=world_size, shard_size=None)
    sharding.shard(module, mesh, learner, compute_dtype=torch.bfloat16, has_backward=True)
    weights = [*module.parameters()]
    own = sum(sharding.own_part(weight)[0].numel() for weight in weights)
    by_rank = elements_by_rank(weights, world_size)
    assert by_rank[0] == own, "shares of ranks that are computed differ from what the sharding gave rank 0"
    num_weights = sum(weight.numel() for weight in weights)
    assert sum(by_rank) == num_weights, "the ranks' parts are not the model"
    size = ModelSize.of(config.to_dict())
    assert size is not None, name
    assert size.num_parameters == num_weights, "explain counts other weights than the model has"
    model = ModelConfig(dtype="bfloat16")
    memory = trained_memory(size, model, learner, tokens=TOKENS, is_gpu=True)
    return {
        "model": name,
        "weights": num_weights,
        "ranks": world_size,
        "state_bytes_max": STATE_BYTES * max(by_rank),
        "state_bytes_min": STATE_BYTES * min(by_rank),
        "ideal_bytes": STATE_BYTES * num_weights / world_size,
        "ratio": max(by_rank) * world_size / num_weights,
        "predicted_gb": memory.peak_bytes / 1e9,
        "publish_bytes": sum(spec.num_bytes for spec in specs),
        "publish_tensors": len(specs),
        "publish_buckets": len(buckets),
        "publish_calls_of_ranks": world_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64, 256, 512])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rows = []
    for world_size in options.ranks:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        for name in options.models:
            rows.append(found := one(name, world_size))
            print(
                f"{name:20} {world_size:4} ranks  state {found['state_bytes_max'] / 1e9:8.2f} GB = "
                f"{found['ratio']:.3f} x an even share  peak {found['predicted_gb']:7.1f} GB  publish "
                f"{found['publish_bytes'] / 1e9:6.1f} GB in {found['publish_buckets']} buckets",
                flush=True,
            )
        dist.destroy_process_group()
    write_result(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
