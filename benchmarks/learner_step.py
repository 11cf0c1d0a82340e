"""Tokens per second of the learner's update: packed against padded, at several budgets, and beside TRL's GRPO step.

    python benchmarks/learner_step.py             # --repeats 3 --budgets 1024 2048 4096 8192

The batch is fixed and long-tailed: one sequence of 1,024 tokens and 31 whose lengths are exponential with a mean of 150. All ways see the
same tokens, model and optimizer, and only the batch's own tokens are counted, never padding. Padded means what trainers without packing
do: rows of the longest length with an attention mask, one forward and backward over all of them, the logits of every position.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.schema import AlgorithmConfig, LearnerConfig, ModelConfig, ModelFromScratchConfig
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import pack

LONGEST, NUM_SHORT, MEAN_SHORT, PROMPT = 1024, 31, 150.0, 16
PEERS_PYTHON = "AGENTRL_PEERS_PYTHON"


def model_sizes(hidden: int, layers: int, vocabulary: int) -> dict[str, int]:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 3 * hidden}
    return sizes | {"num_attention_heads": hidden // 32, "num_key_value_heads": max(1, hidden // 64), "max_position_embeddings": 2048}


def make_batch(vocabulary: int) -> list[Sample]:
    """Return the fixed batch; everything behind a prompt of 16 tokens was sampled."""
    rng = np.random.default_rng(0)
    lengths = [LONGEST, *np.clip(rng.exponential(MEAN_SHORT, NUM_SHORT).astype(int), PROMPT + 2, LONGEST)]
    return [_sample(index, int(length), vocabulary, rng) for index, length in enumerate(lengths)]


def _sample(index: int, length: int, vocabulary: int, rng: np.random.Generator) -> Sample:
    mask = np.arange(length) >= PROMPT
    behavior = np.full(length, -np.log(vocabulary), np.float32)
    advantages = np.full(length, rng.normal(), np.float32)
    return Sample(index, rng.integers(0, vocabulary, length).astype(np.int32), mask, mask, behavior, advantages)


def packed_update(batch: list[Sample], sizes: dict[str, int], budget: int) -> tuple[Callable[[], object], Callable[[], None]]:
    """Return one update of the learner at this budget, and what ends the learner."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    from_scratch = ModelFromScratchConfig(architecture="qwen2", sizes=sizes)
    spec = LearnerSpec(ModelConfig(), LearnerConfig(), AlgorithmConfig(), "on_policy", 0, 1.0, 100, None, from_scratch)
    learner = Learner(spec, rank=0, address="127.0.0.1", port=port)
    [microbatches] = pack(batch, max_tokens=budget, world_size=1, parity_tokens=learner.parity_tokens())
    scored = learner.score(microbatches)
    return lambda: learner.update(scored), learner.close


def padded_update(batch: list[Sample], sizes: dict[str, int]) -> Callable[[], None]:
    """Return one update of a plain trainer: rows padded to the longest, logits of every position."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids, attended, learned = (torch.zeros(len(batch), LONGEST, dtype=torch.int64) for _ in range(3))
    advantages = torch.zeros(len(batch), LONGEST)
    for row, sample in enumerate(batch):
        ids[row, : sample.num_tokens] = torch.tensor(sample.token_ids)
        attended[row, : sample.num_tokens] = 1
        learned[row, : sample.num_tokens] = torch.tensor(sample.loss_mask)
        advantages[row, : sample.num_tokens] = torch.tensor(sample.advantages)

    def update() -> None:
        logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        ratios = torch.exp(logprobs - logprobs.detach())
        loss = -(ratios * advantages[:, 1:] * learned[:, 1:]).sum() / learned[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def speed(update: Callable[[], object], num_tokens: int, repeats: int) -> float:
    """Return tokens per CPU second, the median of `repeats` updates behind one that is not counted.

    One thread computes, so on a quiet machine that is wall-clock; on a busy one the neighbours do not count.
    """
    update()
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        update()
        seconds.append(time.process_time() - started)
    return num_tokens / statistics.median(seconds)


def measure_trl(script: Path, repeats: int) -> dict[str, float] | None:
    """Return what TRL's script prints, None where TRL's environment is not installed.

    It stands in an environment of its own, named by its Python in $AGENTRL_PEERS_PYTHON, because TRL pins other versions.
    """
    python = os.environ.get(PEERS_PYTHON)
    if python is None or not Path(python).is_file() or not script.is_file():
        return None
    output = subprocess.run([python, str(script), "--steps", str(repeats + 1)], check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--trl", type=Path, default=Path("trl_grpo.py"), help="script that measures TRL's GRPO step")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = model_sizes(arguments.hidden, arguments.layers, arguments.vocabulary)
    batch = make_batch(arguments.vocabulary)
    num_tokens = sum(sample.num_tokens for sample in batch)
    print(f"{len(batch)} sequences, {num_tokens:,} tokens; padded {len(batch) * LONGEST:,}; 1 thread; {sizes}")
    padded = speed(padded_update(batch, sizes), num_tokens, arguments.repeats)
    print(f"padded               {padded:8,.0f} tokens/s")
    packed = {}
    for budget in arguments.budgets:
        update, close = packed_update(batch, sizes, budget)
        packed[budget] = speed(update, num_tokens, arguments.repeats)
        close()
        print(f"packed, {budget:6,} tokens {packed[budget]:8,.0f} tokens/s  {packed[budget] / padded:5.1f} x padded", flush=True)
    spread = max(packed.values()) / min(packed.values()) - 1
    print(f"slowest budget {min(packed.values()) / padded:.1f} x padded; fastest over slowest budget: +{spread:.0%}")
    trl = measure_trl(arguments.trl, arguments.repeats)
    print(f"TRL: {trl or f'not installed (${PEERS_PYTHON} names the Python of its environment)'}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        figures = {"num_tokens": num_tokens, "sizes": sizes, "padded": padded, "packed": packed, "spread": spread, "trl": trl}
        arguments.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
