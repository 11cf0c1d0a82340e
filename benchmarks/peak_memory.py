"""Predicted against measured peak memory of learner ranks on CPUs, with random models of real sizes.

    python benchmarks/peak_memory.py --out docs/results/peak_memory.json

Each way makes two updates of two microbatches in fresh processes, one per rank, on gloo. Measured is the
growth of a rank's resident set since before its model was built, at its peak. Predicted is what
`agentrl config explain` says of the rank, without the process itself (Python, torch).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from machine import write_result
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import FSDPConfig, LearnerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.model_size import ModelSize
from agentrl.config.rank_memory import trained_memory
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import pack
from agentrl.ports import ReservedPort

SIZES: dict[str, dict[str, Any]] = {
    "81M": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 15,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "135M": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "checkpointing": ({"gradient_checkpointing": True}, {}),
    "lora": ({}, {"lora": LoRAConfig(rank=16)}),
    "lora_checkpointing": ({"gradient_checkpointing": True}, {"lora": LoRAConfig(rank=16)}),
    "two_ranks": ({"world_size": 2}, {}),
    "two_ranks_checkpointing": ({"world_size": 2, "gradient_checkpointing": True}, {}),
    "two_copies": ({"world_size": 2, "fsdp": FSDPConfig(shard_size=1)}, {}),
    "two_ranks_lora_checkpointing": (
        {"world_size": 2, "gradient_checkpointing": True},
        {"lora": LoRAConfig(rank=16)},
    ),
    "two_ranks_bfloat16_lora": ({"world_size": 2}, {"lora": LoRAConfig(rank=16), "dtype": "bfloat16"}),
}
"""Keys of `learner` and of `model`."""
CASES = [
    *(f"81M:{way}" for way, (learner, _) in WAYS.items() if "world_size" in learner),
    *(f"135M:{way}" for way, (learner, _) in WAYS.items() if "world_size" not in learner),
    "0.5B:lora_checkpointing",
    "0.5B:lora",
]
"""Two ranks of 135M parameters, and all weights of 0.5B, need more than 4 GiB together."""


def configs(way: str, tokens: int) -> tuple[ModelConfig, LearnerConfig]:
    of_learner, of_model = WAYS[way]
    return ModelConfig(**of_model), LearnerConfig(
        **{**of_learner, "microbatch_tokens": tokens, "collective_timeout_s": 1000.0}
    )


def predict(name: str, way: str, tokens: int) -> dict[str, float]:
    """Return the parts of the prediction, in bytes."""
    size = ModelSize.of({**SIZES[name], "model_type": "qwen2"})
    assert size is not None, name
    model, learner = configs(way, tokens)
    return trained_memory(size, model, learner, tokens=tokens, is_gpu=False).parts


def samples(tokens: int, num: int, vocabulary: int) -> list[Sample]:
    """Return `num` sequences of `tokens` tokens, each a microbatch by itself."""
    rng, found = np.random.default_rng(0), []
    for index in range(num):
        mask = np.arange(tokens) > 0
        zeros = np.zeros(tokens, np.float32)
        ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
        found.append(Sample(index, ids, mask, mask, zeros - 3, rng.normal(size=tokens).astype(np.float32)))
    return found


def write_model(name: str, folder: Path) -> None:
    """Write a random model in bfloat16, in a process of its own."""
    module = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES[name]), dtype=torch.bfloat16)
    module.save_pretrained(folder)


def run_rank(rank: int, port: int, name: str, way: str, tokens: int, folder: Path) -> None:
    """Make the updates and print the growth of the resident set as JSON."""
    model, learner = configs(way, tokens)
    model = model.model_copy(update={"path": str(folder)})
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES["tiny"]))  # so that imports do not count
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    spec = LearnerSpec(
        model,
        learner,
        AlgorithmConfig(),
        mode="on_policy",
        seed=0,
        temperature=1.0,
        total_updates=4,
    )
    own = Learner(spec, rank=rank, address="127.0.0.1", port=port)
    world = learner.dp_size
    shard = pack(samples(tokens, 2 * world, SIZES[name]["vocab_size"]), max_tokens=tokens, world_size=world)[
        rank // learner.num_replicas
    ]
    for _ in range(2):
        own.update(own.score(shard))
    growth = peak_bytes() - before
    print(json.dumps({"bytes": growth, "process_bytes": before}))
    own.close()


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("VmHWM")


def measure(name: str, way: str, tokens: int, folder: Path) -> dict[str, Any]:
    _, learner = configs(way, tokens)
    with ReservedPort() as port:
        command = [sys.executable, __file__, "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(port.number), name, way, str(tokens), str(folder)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(learner.world_size)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank of {name} {way} failed")
    found = [json.loads(text.strip().splitlines()[-1]) for text in said]
    measured = max(own["bytes"] for own in found)
    parts = predict(name, way, tokens)
    predicted = sum(parts.values())
    print(
        f"{name:6} {way:28} {tokens:6} tokens  measured {measured / 2**20:8,.0f} MiB  predicted "
        f"{predicted / 2**20:8,.0f} MiB  {predicted / measured:5.2f}",
        flush=True,
    )
    return {
        "model": name,
        "way": way,
        "tokens": tokens,
        "measured_bytes": measured,
        "process_bytes": max(own["process_bytes"] for own in found),
        "predicted_bytes": predicted,
        "ratio": predicted / measured,
        "parts": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES, metavar="MODEL:WAY", help=" ".join(CASES))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, port, name, way, tokens, folder = options.rank
        run_rank(int(rank), int(port), name, way, int(tokens), Path(folder))
        return
    if options.write:
        write_model(options.write[0], Path(options.write[1]))
        return
    runs = []
    for name, cases in groupby((case.split(":") for case in options.cases), key=lambda case: case[0]):
        with TemporaryDirectory() as folder:
            subprocess.run([sys.executable, __file__, "--write", name, folder], check=True)
            for _, way in cases:
                runs.append(measure(name, way, options.tokens, Path(folder)))
                write_result(options.out, {"runs": runs})


if __name__ == "__main__":
    main()
