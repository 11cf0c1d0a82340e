"""The learner's update of SmolLM2-135M beside TRL's GRPO update: tokens per CPU second and memory.

    python benchmarks/smollm_step.py --model runs/smollm/model

4 prompts with 8 attempts each, as a step of configs/smollm.yaml trains on: prompts of about 50 tokens, 16 to
112 tokens of an attempt. TRL runs in its own environment (`--peers`) with the same model and lengths, with
microbatches of 8 attempts, padded. Each side is a process of its own and computes on one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write_result

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import pack

HERE = Path(__file__).parent
NUM_PROMPTS, GROUP_SIZE, MICRO = 4, 8, 8
VOCABULARY = 260
PROMPTS = [
    f"What is {a} times {a + 7}? Think of the parts first, then give one number." for a in (23, 37, 58, 71)
]
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {"microbatch_tokens": 1024},
    "adapter": {"microbatch_tokens": 512},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/agentrl-peers"))
    parser.add_argument("--prompt-tokens", type=int, default=51, help="of ours, where TRL is not installed")
    parser.add_argument("--way", choices=list(WAYS), help="measure this one in this process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(own_update(options.way, options.model, options.prompt_tokens, options.steps)))
        return
    trl = trl_update(options.peers.expanduser() / "peers_venv" / "bin" / "python", options)
    print("trl", json.dumps(trl), flush=True)
    prompt_tokens = options.prompt_tokens
    if isinstance(trl, dict):
        prompt_tokens = trl["prompt_tokens"] // (NUM_PROMPTS * GROUP_SIZE)
        trl["tokens_per_cpu_s"] = (trl["prompt_tokens"] + trl["completion_tokens"]) / trl["cpu_s"]
    results: dict[str, Any] = {"trl": trl}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, "--prompt-tokens", str(prompt_tokens)]
        command += ["--model", str(options.model), "--steps", str(options.steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[way] = json.loads(done.stdout.splitlines()[-1])
        if isinstance(trl, dict):
            results[way]["times_trl"] = results[way]["tokens_per_cpu_s"] / trl["tokens_per_cpu_s"]
        print(way, json.dumps(results[way]), flush=True)
    write_result(options.out, {"steps": options.steps, "results": results})


def lengths() -> list[int]:
    generator = random.Random(0)
    return [generator.randint(16, 112) for _ in range(NUM_PROMPTS * GROUP_SIZE)]


def own_update(way: str, model: Path, prompt_tokens: int, steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    lora = LoRAConfig(rank=16 if way == "adapter" else 0)
    config = LearnerConfig(
        shared_prefix=True, optimizer=OptimizerConfig(lr=2e-5, weight_decay=0.0), **WAYS[way]
    )
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spec = LearnerSpec(
        ModelConfig(path=str(model), lora=lora), config, AlgorithmConfig(), "decoupled", 0, 1.0, 100
    )
    learner = Learner(spec, rank=0, address="127.0.0.1", port=port)
    batch = samples(prompt_tokens)
    [microbatches] = pack(
        batch,
        max_tokens=config.microbatch_tokens,
        world_size=1,
        parity_tokens=learner.parity_tokens(),
        shared_prefix=True,
    )
    spent = []
    for _ in range(steps):
        begun = time.process_time()
        learner.update(learner.score(microbatches))
        spent.append(time.process_time() - begun)
    learner.close()
    cpu_s = sum(spent[1:]) / (steps - 1)
    return {
        "cpu_s": cpu_s,
        "tokens_per_cpu_s": sum(sample.num_tokens for sample in batch) / cpu_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def samples(prompt_tokens: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(20, VOCABULARY, (NUM_PROMPTS, prompt_tokens))
    made = []
    for index, length in enumerate(lengths()):
        ids = np.concatenate([prompts[index // GROUP_SIZE], rng.integers(20, VOCABULARY, length)])
        mask = np.arange(len(ids)) >= prompt_tokens
        behavior = np.full(len(ids), -np.log(VOCABULARY), np.float32)
        advantages = np.full(len(ids), rng.normal(), np.float32)
        made.append(Sample(index, ids.astype(np.int32), mask, mask, behavior, advantages))
    return made


def trl_update(python: Path, options: argparse.Namespace) -> dict[str, Any] | str:
    """Run the peer; return what it printed, or why there is nothing."""
    if not python.exists():
        return f"not installed: {python}"
    given = {"model": str(options.model), "prompts": PROMPTS, "group_size": GROUP_SIZE, "lengths": lengths()}
    given |= {"micro": MICRO, "steps": options.steps}
    command = [python, HERE / "trl_step.py"]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"cpu_s"')]
    return dict(json.loads(lines[-1])) if lines else f"failed: {done.stderr.strip().splitlines()[-1:]}"


if __name__ == "__main__":
    main()
