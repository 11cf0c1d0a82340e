"""Tokens per second of the learner's update: packed at several budgets, padded, and TRL's GRPO step.

    python benchmarks/learner_step.py             # --repeats 3 --budgets 1024 2048 4096 8192

The batch is fixed and long-tailed: one sequence of 1,024 tokens, and 31 of exponential length with a mean of
150. All variants get the same tokens, model and optimizer. Only the batch's own tokens count, never padding.
The padded variant is a trainer without packing: sequences padded to the longest, with an attention mask, one
forward and backward over all of them, logits of every position.

Budgets alternate, one update each, so that other load on the machine slows all of them equally; the padded
variant follows. One thread computes; its CPU time counts, and wall-clock time is reported as well. TRL's step
is measured on its own batch (`trl_grpo.py`: 16 prompts in groups of 8, at most 64 tokens each, 4 layers of
128, a vocabulary of 400); ours uses the same model and a batch of the same shape.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write_result
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import pack

LONGEST, NUM_SHORT, MEAN_SHORT, PROMPT = 1024, 31, 150.0, 16
TRL_ATTEMPTS, TRL_PROMPT, TRL_RESPONSE, TRL_VOCABULARY = 128, 32, 64, 400
PEERS_PYTHON = "AGENTRL_PEERS_PYTHON"

Update = Callable[[], object]


def model_sizes(hidden: int, layers: int, vocabulary: int) -> dict[str, int]:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
    }
    return sizes | {
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "max_position_embeddings": 2048,
    }


def make_batch(vocabulary: int) -> list[Sample]:
    """Return the fixed batch: prompts of 16 tokens, all later tokens are sampled ones."""
    rng = np.random.default_rng(0)
    lengths = [LONGEST, *np.clip(rng.exponential(MEAN_SHORT, NUM_SHORT).astype(int), PROMPT + 2, LONGEST)]
    return [_sample(index, int(length), vocabulary, rng) for index, length in enumerate(lengths)]


def _sample(
    index: int, length: int, vocabulary: int, rng: np.random.Generator, *, prompt: int = PROMPT
) -> Sample:
    mask = np.arange(length) >= prompt
    behavior = np.full(length, -np.log(vocabulary), np.float32)
    advantages = np.full(length, rng.normal(), np.float32)
    return Sample(
        index, rng.integers(0, vocabulary, length).astype(np.int32), mask, mask, behavior, advantages
    )


def open_learner(sizes: dict[str, int]) -> Learner:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    from_scratch = ModelFromScratchConfig(architecture="qwen2", sizes=sizes)
    spec = LearnerSpec(
        ModelConfig(), LearnerConfig(), AlgorithmConfig(), "on_policy", 0, 1.0, 100, None, from_scratch
    )
    return Learner(spec, rank=0, address="127.0.0.1", port=port)


def packed_update(
    learner: Learner, batch: list[Sample], budget: int, *, shared_prefix: bool = False
) -> Update:
    """Return a function that makes one update of the learner with this token budget."""
    [microbatches] = pack(
        batch,
        max_tokens=budget,
        world_size=1,
        parity_tokens=learner.parity_tokens(),
        shared_prefix=shared_prefix,
    )
    scored = learner.score(microbatches)
    return lambda: learner.update(scored)


def padded_update(batch: list[Sample], sizes: dict[str, int]) -> Update:
    """Return a function that updates without packing: sequences padded to the longest, all logits."""
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


def take_turns(updates: Mapping[str, Update], repeats: int) -> dict[str, dict[str, float]]:
    """Return the median CPU and wall-clock seconds of each update, after one warm-up round."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in updates}
    for count in range(repeats + 1):
        for name, update in updates.items():
            cpu, wall = time.process_time(), time.perf_counter()
            update()
            if count > 0:
                rounds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    medians = {
        name: [statistics.median(column) for column in zip(*pairs, strict=True)]
        for name, pairs in rounds.items()
    }
    return {name: {"cpu_s": cpu, "wall_s": wall} for name, (cpu, wall) in medians.items()}


def measure_trl(script: Path, repeats: int) -> dict[str, float] | None:
    """Return the figures that TRL's script prints; None if TRL's environment is not installed.

    TRL pins other versions, so it has its own environment; $AGENTRL_PEERS_PYTHON is its Python.
    """
    python = os.environ.get(PEERS_PYTHON)
    if python is None or not Path(python).is_file() or not script.is_file():
        return None
    output = subprocess.run(
        [python, str(script), "--steps", str(repeats + 1)], check=True, capture_output=True, text=True
    ).stdout
    figures: dict[str, float] = json.loads(output.strip().splitlines()[-1])["figures"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[50, 250, 1000], help="lengths of a shared prompt"
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    shared = Path(os.environ.get("AGENTRL_SHARED", Path(__file__).parents[2] / "shared"))
    parser.add_argument(
        "--trl",
        type=Path,
        default=shared / "bench" / "trl_grpo.py",
        help="script that measures TRL's GRPO step",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = compare(arguments)
    result["shared_prefix"] = compare_prefixes(arguments)
    result["trl"] = compare_trl(arguments.trl, arguments.repeats)
    write_result(arguments.out, result)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure packed updates at all budgets, and the padded one, on the long-tailed batch."""
    sizes = model_sizes(arguments.hidden, arguments.layers, arguments.vocabulary)
    batch = make_batch(arguments.vocabulary)
    num_tokens = sum(sample.num_tokens for sample in batch)
    print(
        f"{len(batch)} sequences, {num_tokens:,} tokens; padded {len(batch) * LONGEST:,}; 1 thread; {sizes}"
    )
    learner = open_learner(sizes)
    updates = {f"packed {budget}": packed_update(learner, batch, budget) for budget in arguments.budgets}
    seconds = take_turns(updates, arguments.repeats)
    # Last: the padded update leaves a fragmented heap, which slows later updates by up to a third.
    seconds |= take_turns({"padded": padded_update(batch, sizes)}, arguments.repeats)
    learner.close()
    for name, own in seconds.items():
        ratio, speed = seconds["padded"]["cpu_s"] / own["cpu_s"], num_tokens / own["cpu_s"]
        print(
            f"{name:12} {own['cpu_s']:7.3f} s CPU {own['wall_s']:7.3f} s wall  {speed:8,.0f} tokens/s  "
            f"{ratio:5.1f} x padded"
        )
    packed = [own["cpu_s"] for name, own in seconds.items() if name != "padded"]
    spread, least = max(packed) / min(packed) - 1, seconds["padded"]["cpu_s"] / max(packed)
    print(
        f"slowest budget {least:.1f} x padded (wanted: at least 5); fastest over slowest budget: "
        f"+{spread:.0%} (wanted: at most 15 %)"
    )
    return {
        "num_tokens": num_tokens,
        "sizes": sizes,
        "seconds": seconds,
        "times_padded": least,
        "spread": spread,
    }


def compare_prefixes(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Measure the gain from computing the shared prompt of a group of 8 once, by prompt length."""
    sizes = model_sizes(arguments.hidden, arguments.layers, arguments.vocabulary)
    learner, found = open_learner(sizes), []
    for prompt in arguments.prompts:
        batch = make_groups(prompt, arguments.vocabulary)
        updates = {
            name: packed_update(learner, batch, 4096, shared_prefix=name == "once")
            for name in ("each", "once")
        }
        seconds = take_turns(updates, arguments.repeats)
        each, once = seconds["each"]["cpu_s"], seconds["once"]["cpu_s"]
        share = prompt * len(batch) / sum(sample.num_tokens for sample in batch)
        found.append({"prompt": prompt, "prompt_share": share, "each_s": each, "once_s": once})
        print(
            f"prompt of {prompt:5,}, {share:4.0%} of the tokens: {each:.2f} s, shared {once:.2f} s CPU, "
            f"{each / once:.2f} times as fast"
        )
    learner.close()
    return found


def make_groups(prompt: int, vocabulary: int) -> list[Sample]:
    """Return two groups of 8 attempts with one prompt each; responses are exponential with a mean of 250."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.exponential(250.0, 16).astype(int), 8, 1000)
    batch = [
        _sample(index, prompt + int(n), vocabulary, rng, prompt=prompt) for index, n in enumerate(lengths)
    ]
    heads = rng.integers(0, vocabulary, (2, prompt)).astype(np.int32)
    return [
        replace(one, token_ids=np.concatenate([heads[one.index // 8], one.token_ids[prompt:]]))
        for one in batch
    ]


def compare_trl(script: Path, repeats: int) -> dict[str, Any] | None:
    """Measure our update on a batch of TRL's shape, and TRL's step if it is installed."""
    rng = np.random.default_rng(0)
    batch = [
        _sample(index, TRL_PROMPT + TRL_RESPONSE, TRL_VOCABULARY, rng, prompt=TRL_PROMPT)
        for index in range(TRL_ATTEMPTS)
    ]
    learner = open_learner(
        model_sizes(128, 4, TRL_VOCABULARY) | {"intermediate_size": 256, "tie_word_embeddings": True}
    )
    own = take_turns({"packed": packed_update(learner, batch, 8192)}, repeats)["packed"]
    learner.close()
    tokens_per_s = sum(sample.num_tokens for sample in batch) / own["cpu_s"]
    trl = measure_trl(script, repeats)
    print(f"batch of TRL's shape: {tokens_per_s:,.0f} tokens per CPU second")
    if trl is None:
        print(f"TRL: not measured (${PEERS_PYTHON} names the Python of its environment, --trl the script)")
        return {"tokens_per_cpu_s": tokens_per_s, "trl": None}
    ratio = tokens_per_s / trl["train_tok_per_cpu_s"]
    print(
        f"TRL: {trl['train_tok_per_cpu_s']:,.0f} tokens per CPU second; {ratio:.1f} times as fast as TRL "
        "(wanted: at least 1.5)"
    )
    return {"tokens_per_cpu_s": tokens_per_s, "trl": trl, "times_trl": ratio}


if __name__ == "__main__":
    main()
