"""Tokens per second of the learner's update: packed against padded, at several budgets, and beside TRL's GRPO step.

    python benchmarks/learner_step.py             # --repeats 3 --budgets 1024 2048 4096 8192

The batch is fixed and long-tailed: one sequence of 1,024 tokens and 31 whose lengths are exponential with a mean of 150. All ways see the
same tokens, model and optimizer, and only the batch's own tokens are counted, never padding. Padded means what trainers without packing
do: rows of the longest length with an attention mask, one forward and backward over all of them, the logits of every position.

Budgets take turns, one update each, so that whatever else the machine does slows all of them alike; the padded way follows. One thread
computes; its CPU time counts, and wall-clock stands beside it. TRL's step is measured on its own batch (`trl_grpo.py`: 16 prompts in
groups of 8, at most 64 tokens each, 4 layers of 128, a vocabulary of 400) and ours, of the same model, on one of the same shape.
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
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 3 * hidden}
    return sizes | {"num_attention_heads": hidden // 32, "num_key_value_heads": max(1, hidden // 64), "max_position_embeddings": 2048}


def make_batch(vocabulary: int) -> list[Sample]:
    """Return the fixed batch; everything behind a prompt of 16 tokens was sampled."""
    rng = np.random.default_rng(0)
    lengths = [LONGEST, *np.clip(rng.exponential(MEAN_SHORT, NUM_SHORT).astype(int), PROMPT + 2, LONGEST)]
    return [_sample(index, int(length), vocabulary, rng) for index, length in enumerate(lengths)]


def _sample(index: int, length: int, vocabulary: int, rng: np.random.Generator, *, prompt: int = PROMPT) -> Sample:
    mask = np.arange(length) >= prompt
    behavior = np.full(length, -np.log(vocabulary), np.float32)
    advantages = np.full(length, rng.normal(), np.float32)
    return Sample(index, rng.integers(0, vocabulary, length).astype(np.int32), mask, mask, behavior, advantages)


def open_learner(sizes: dict[str, int]) -> Learner:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    from_scratch = ModelFromScratchConfig(architecture="qwen2", sizes=sizes)
    spec = LearnerSpec(ModelConfig(), LearnerConfig(), AlgorithmConfig(), "on_policy", 0, 1.0, 100, None, from_scratch)
    return Learner(spec, rank=0, address="127.0.0.1", port=port)


def packed_update(learner: Learner, batch: list[Sample], budget: int, *, shared_prefix: bool = False) -> Update:
    """Return one update of the learner at this budget."""
    [microbatches] = pack(batch, max_tokens=budget, world_size=1, parity_tokens=learner.parity_tokens(), shared_prefix=shared_prefix)
    scored = learner.score(microbatches)
    return lambda: learner.update(scored)


def padded_update(batch: list[Sample], sizes: dict[str, int]) -> Update:
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


def take_turns(updates: Mapping[str, Update], repeats: int) -> dict[str, dict[str, float]]:
    """Return the median CPU and wall seconds of each update, behind one round that is not counted."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in updates}
    for count in range(repeats + 1):
        for name, update in updates.items():
            cpu, wall = time.process_time(), time.perf_counter()
            update()
            if count > 0:
                rounds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    medians = {name: [statistics.median(column) for column in zip(*pairs, strict=True)] for name, pairs in rounds.items()}
    return {name: {"cpu_s": cpu, "wall_s": wall} for name, (cpu, wall) in medians.items()}


def measure_trl(script: Path, repeats: int) -> dict[str, float] | None:
    """Return what TRL's script prints, None where TRL's environment is not installed.

    It stands in an environment of its own, named by its Python in $AGENTRL_PEERS_PYTHON, because TRL pins other versions.
    """
    python = os.environ.get(PEERS_PYTHON)
    if python is None or not Path(python).is_file() or not script.is_file():
        return None
    output = subprocess.run([python, str(script), "--steps", str(repeats + 1)], check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output.strip().splitlines()[-1])["figures"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[50, 250, 1000], help="lengths of a shared prompt")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    shared = Path(os.environ.get("AGENTRL_SHARED", Path(__file__).parents[2] / "shared"))
    parser.add_argument("--trl", type=Path, default=shared / "bench" / "trl_grpo.py", help="script that measures TRL's GRPO step")
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
    print(f"{len(batch)} sequences, {num_tokens:,} tokens; padded {len(batch) * LONGEST:,}; 1 thread; {sizes}")
    learner = open_learner(sizes)
    updates = {f"packed {budget}": packed_update(learner, batch, budget) for budget in arguments.budgets}
    seconds = take_turns(updates, arguments.repeats)
    # Behind them: whatever runs after the padded update pays for the heap that it leaves torn, up to a third of a packed update.
    seconds |= take_turns({"padded": padded_update(batch, sizes)}, arguments.repeats)
    learner.close()
    for name, own in seconds.items():
        ratio, speed = seconds["padded"]["cpu_s"] / own["cpu_s"], num_tokens / own["cpu_s"]
        print(f"{name:12} {own['cpu_s']:7.3f} s CPU {own['wall_s']:7.3f} s wall  {speed:8,.0f} tokens/s  {ratio:5.1f} x padded")
    packed = [own["cpu_s"] for name, own in seconds.items() if name != "padded"]
    spread, least = max(packed) / min(packed) - 1, seconds["padded"]["cpu_s"] / max(packed)
    print(f"slowest budget {least:.1f} x padded (wanted: at least 5); fastest over slowest budget: +{spread:.0%} (wanted: at most 15 %)")
    return {"num_tokens": num_tokens, "sizes": sizes, "seconds": seconds, "times_padded": least, "spread": spread}


def compare_prefixes(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Measure what it saves to compute the prompt of a group of 8 once, by the length of the prompt."""
    sizes = model_sizes(arguments.hidden, arguments.layers, arguments.vocabulary)
    learner, found = open_learner(sizes), []
    for prompt in arguments.prompts:
        batch = make_groups(prompt, arguments.vocabulary)
        updates = {name: packed_update(learner, batch, 4096, shared_prefix=name == "once") for name in ("each", "once")}
        seconds = take_turns(updates, arguments.repeats)
        each, once = seconds["each"]["cpu_s"], seconds["once"]["cpu_s"]
        share = prompt * len(batch) / sum(sample.num_tokens for sample in batch)
        found.append({"prompt": prompt, "prompt_share": share, "each_s": each, "once_s": once})
        print(f"prompt of {prompt:5,}, {share:4.0%} of the tokens: {each:.2f} s, shared {once:.2f} s CPU, {each / once:.2f} times as fast")
    learner.close()
    return found


def make_groups(prompt: int, vocabulary: int) -> list[Sample]:
    """Return two groups of 8 attempts behind one prompt each; responses are exponential with a mean of 250."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.exponential(250.0, 16).astype(int), 8, 1000)
    batch = [_sample(index, prompt + int(n), vocabulary, rng, prompt=prompt) for index, n in enumerate(lengths)]
    heads = rng.integers(0, vocabulary, (2, prompt)).astype(np.int32)
    return [replace(one, token_ids=np.concatenate([heads[one.index // 8], one.token_ids[prompt:]])) for one in batch]


def compare_trl(script: Path, repeats: int) -> dict[str, Any] | None:
    """Measure our update on a batch of the shape of TRL's, and TRL's step where it is installed."""
    rng = np.random.default_rng(0)
    batch = [_sample(index, TRL_PROMPT + TRL_RESPONSE, TRL_VOCABULARY, rng, prompt=TRL_PROMPT) for index in range(TRL_ATTEMPTS)]
    learner = open_learner(model_sizes(128, 4, TRL_VOCABULARY) | {"intermediate_size": 256, "tie_word_embeddings": True})
    own = take_turns({"packed": packed_update(learner, batch, 8192)}, repeats)["packed"]
    learner.close()
    tokens_per_s = sum(sample.num_tokens for sample in batch) / own["cpu_s"]
    trl = measure_trl(script, repeats)
    print(f"batch of TRL's shape: {tokens_per_s:,.0f} tokens per CPU second")
    if trl is None:
        print(f"TRL: not measured (${PEERS_PYTHON} names the Python of its environment, --trl the script)")
        return {"tokens_per_cpu_s": tokens_per_s, "trl": None}
    ratio = tokens_per_s / trl["train_tok_per_cpu_s"]
    print(f"TRL: {trl['train_tok_per_cpu_s']:,.0f} tokens per CPU second; {ratio:.1f} times as fast as TRL (wanted: at least 1.5)")
    return {"tokens_per_cpu_s": tokens_per_s, "trl": trl, "times_trl": ratio}


if __name__ == "__main__":
    main()
