"""Peak memory and CPU time of one update with the config keys that trade memory for time (docs/tuning.md).

    python benchmarks/learner_memory.py           # --tokens 2048 --hidden 384 --layers 6

Every variant makes the same update of the same model, on sequences of 256 tokens, in its own process. Memory
is the growth of the peak resident set since before the learner was built: weights, gradients, optimizer
state, activations, buffers of libraries. Time is CPU seconds of one thread, so other processes on a busy
machine matter little.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
from machine import write_result

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import LoRAConfig, ModelConfig, ModelFromScratchConfig
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import pack

SEQUENCE, PROMPT = 256, 16
LORA_RANK = 8
WAYS = (
    "plain",
    "quarter_microbatches",
    "checkpointing",
    "lora",
    "lora_bfloat16",
    "lora_checkpointing",
    "profiled",
    "saving",
)


def make_learner(way: str, sizes: dict[str, int], tokens: int) -> tuple[Learner, int]:
    """Return the learner of a variant, and the tokens of its microbatches."""
    budget = tokens // 4 if way == "quarter_microbatches" else tokens
    lora = LoRAConfig(rank=LORA_RANK if way.startswith("lora") else 0)
    model = ModelConfig(lora=lora, dtype="bfloat16" if way == "lora_bfloat16" else "float32")
    learner = LearnerConfig(gradient_checkpointing=way.endswith("checkpointing"), microbatch_tokens=budget)
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spec = LearnerSpec(
        model,
        learner,
        AlgorithmConfig(),
        mode="on_policy",
        seed=0,
        temperature=1.0,
        total_updates=10,
        from_scratch=ModelFromScratchConfig(architecture="qwen2", sizes=sizes),
    )
    return Learner(spec, rank=0, address="127.0.0.1", port=port), budget


def make_batch(tokens: int, vocabulary: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    mask = np.arange(SEQUENCE) >= PROMPT
    behavior = np.full(SEQUENCE, -np.log(vocabulary), np.float32)
    return [
        Sample(
            index,
            rng.integers(0, vocabulary, SEQUENCE).astype(np.int32),
            mask,
            mask,
            behavior,
            np.full(SEQUENCE, rng.normal(), np.float32),
        )
        for index in range(tokens // SEQUENCE)
    ]


def run_way(way: str, sizes: dict[str, int], tokens: int) -> dict[str, float]:
    """Make two updates; return the peak of both and the time of the second.

    The first also allocates optimizer state. `saving` writes a checkpoint beside the second.
    """
    torch.set_num_threads(1)
    before = psutil.Process().memory_info().rss
    learner, budget = make_learner(way, sizes, tokens)
    [microbatches] = pack(
        make_batch(tokens, sizes["vocab_size"]),
        max_tokens=budget,
        world_size=1,
        parity_tokens=learner.parity_tokens(),
    )
    scored = learner.score(microbatches)
    learner.update(scored)
    with TemporaryDirectory() as folder:
        started = time.process_time()
        if way == "profiled":
            learner.start_trace()
        if way == "saving":
            learner.start_save(folder)
        learner.update(scored)
        if way == "profiled":
            learner.write_trace(folder)
        if way == "saving":
            learner.finish_save()
        seconds = time.process_time() - started
        written_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    learner.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"peak_bytes": peak, "seconds": seconds, "written_bytes": written_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--way", choices=WAYS, help="measure this one in this process")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = {
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
    }
    heads = arguments.hidden // 64
    shared = next(count for count in range(max(1, heads // 2), 0, -1) if heads % count == 0)
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": shared}
    sizes |= {"vocab_size": arguments.vocabulary, "max_position_embeddings": 2048}
    if arguments.way:
        print(json.dumps(run_way(arguments.way, sizes, arguments.tokens)))
        return
    print(
        f"{arguments.tokens:,} tokens in sequences of {SEQUENCE}, float32 master weights, 1 thread; {sizes}"
    )
    results = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, *sys.argv[1:]]
        results[way] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
        print(
            f"{way:22} {results[way]['peak_bytes'] / 2**20:8,.0f} MiB  {results[way]['seconds']:6.1f} s",
            flush=True,
        )
    write_result(arguments.out, {"tokens": arguments.tokens, "sizes": sizes, "ways": results})


if __name__ == "__main__":
    main()
