"""Synchronous against asynchronous training on a long-tailed workload: wall-clock per step, idle shares, in one run.

    make bench          # or: python benchmarks/sync_vs_async.py --steps 8

The learner, buffer and rollout actors are the real ones with a tiny random model; the servers are paced (see paced_server.py),
because what asynchrony wins is waiting time, and a real server on the same two cores would hide it behind contention.
Both modes run alternately, each `--repeats` times; the last lines are the medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.compose import load_config
from agentrl.controller.train import train
from agentrl.data.arithmetic import write_arithmetic

CONFIG = """
data:
  train_files: [{folder}/data/train.parquet]
model:
  path: {folder}/model
agent:
  default: single_turn_agent
  max_turns: 1
  max_response_tokens: 640
rollout:
  urls: ["{url}"]
  group_size: 4
  max_concurrent_trajectories: 128
buffer:
  groups_per_step: 8
learner:
  microbatch_tokens: 2048
trainer:
  steps: {steps}
  val_before_train: false
  keep_trajectories: false
  logger: []
tracking:
  report: false
"""


@dataclass(frozen=True)
class Figures:
    """One mode of one repeat; shares are of the wall-clock between the first and the last step."""

    max_staleness: int
    seconds_per_step: float
    learner_idle: float
    servers_idle: float
    slots_unused: float
    lag_max: float


@contextmanager
def paced_server(args: argparse.Namespace, chat: Chat) -> Iterator[str]:
    """Run a paced server in its own process; yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("paced_server.py")), "--port", str(port)]
    command += ["--seconds-per-token", str(args.seconds_per_token), "--median-tokens", str(args.median_tokens), "--sigma", str(args.sigma)]
    command += ["--slots", str(args.slots), "--vocab-size", str(chat.vocab_size), "--stop-id", str(chat.eos_token_ids[0])]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def measure(folder: Path, url: str, *, max_staleness: int, steps: int) -> Figures:
    """Train for `steps` and read the figures from metrics.jsonl and the server's own account."""
    config = folder / "bench.yaml"
    config.write_text(CONFIG.format(folder=folder, url=url, steps=steps))
    run_dir = folder / f"run_{max_staleness}_{time.monotonic_ns()}"
    before = _load(url)
    started = time.monotonic()
    train(load_config(str(config), [f"buffer.max_staleness={max_staleness}", f"trainer.run_dir={run_dir}"]))
    after, wall = _load(url), time.monotonic() - started
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps_s = [r["time/step_s"] for r in records if r["kind"] == "train"][1:]  # the first holds the warm-up
    idle = [r["time/take_s"] for r in records if r["kind"] == "train"][1:]
    return Figures(
        max_staleness,
        statistics.mean(steps_s),
        sum(idle) / sum(steps_s),
        (after["idle_s"] - before["idle_s"]) / wall,
        1 - (after["busy_slot_s"] - before["busy_slot_s"]) / (wall * after["slots"]),
        max(r["rollout/lag/max"] for r in records if r["kind"] == "train"),
    )


def _load(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/benchmark/load", timeout=10) as reply:
        return json.loads(reply.read())


def prepare(folder: Path) -> Chat:
    """Write a tiny tokenizer, a random model and the arithmetic rows into `folder`."""
    model = folder / "model"
    write_tiny_tokenizer(model)
    chat = Chat.load(str(model))
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=chat.vocab_size, max_position_embeddings=2048, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    write_arithmetic(folder / "data", seed=0, num_train=600, num_val=12, num_sft=12)
    return chat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--seconds-per-token", type=float, default=0.02)
    parser.add_argument("--median-tokens", type=float, default=60)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    results: list[Figures] = []
    with tempfile.TemporaryDirectory() as name:
        chat = prepare(Path(name))
        for repeat in range(args.repeats):
            for staleness in (0, args.max_staleness):
                with paced_server(args, chat) as url:
                    figures = measure(Path(name), url, max_staleness=staleness, steps=args.steps)
                results.append(figures)
                print(f"repeat {repeat}: {_line(figures)}", flush=True)
    sync, asynchronous = ([f for f in results if f.max_staleness == s] for s in (0, args.max_staleness))
    print(f"\nsynchronous:  {_line(_median(sync))}\nasynchronous: {_line(_median(asynchronous))}")
    ratio = _median(sync).seconds_per_step / _median(asynchronous).seconds_per_step
    print(f"asynchronous steps take 1/{ratio:.2f} of the synchronous time")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"results": [asdict(f) for f in results], "ratio": ratio}, indent=1))


def _median(figures: list[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*(asdict(f).values() for f in figures), strict=True)))


def _line(f: Figures) -> str:
    return (
        f"max_staleness={f.max_staleness:g}  {f.seconds_per_step:6.2f} s/step  learner idle {f.learner_idle:4.0%}  "
        f"servers idle {f.servers_idle:4.0%}  slots unused {f.slots_unused:4.0%}  lag max {f.lag_max:g}"
    )


if __name__ == "__main__":
    main()
