"""Speedup of asynchronous over synchronous training, on a fixed multi-turn workload with long tails.

    python benchmarks/sync_vs_async.py --out runs/bench/sync_vs_async.json

A step has 16 groups of 8. A trajectory has 3 turns of log-normal length (sigma 1.0) and 2 tool calls of
exponential latency (mean: 0.3 mean turns). The server has 64 slots. The learner needs tokens / (slots x rate)
seconds per batch, as long as the server needs with all slots busy. Buffer, controller and rollout actors are
real and use HTTP. Server and learner only sleep (paced_server.py): asynchrony saves waiting time, which real
ones on the same cores would hide behind contention. Four kinds of run:

    asynchronous        `buffer.max_staleness=6`; servers and learner work in parallel; nothing is dropped
    tighter             `buffer.max_staleness=4`: the learner stops for attempts that take longer than 4 steps
    synchronous         `buffer.max_staleness=0`; the same server and learner, in turn
    equal_resources     synchronous, with the resources of both per phase: 2x the slots, 2x the learner's
    speed

Each kind is also simulated (paced_prediction.py) with the same lengths and latencies, which takes seconds.
`--kinds none` only simulates.

Increase `--seconds-per-token` until the ratios stop changing: overhead of a busy machine is a share of a
step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from machine import write_result
from paced_prediction import predict
from paced_server import Words, Workload, paced_servers, read_load
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.controller.run import Run
from agentrl.controller.start import open_run
from agentrl.types import Group

GROUPS_PER_STEP = 16
GROUP_SIZE = 8
MAX_STALENESS = 6
MIN_SPEEDUPS = {"synchronous": 3.3, "equal_resources": 2.6}
"""Limits of other step times / asynchronous step time."""
MAX_OVERHEAD = 1.12
"""Limit of asynchronous step time / max(server time, learner time)."""
MAX_CONTEXT_TOKENS = 65_536

CONFIG = """
data:
  train_files: [{folder}/train.jsonl]
model:
  path: {folder}/model
agent:
  default: tool_agent
  plugins: ["{tool}"]
  tools: [wait]
  max_turns: 3
  max_response_tokens: 32768
  trajectory_timeout_s: 86400
  tool_timeout_s: 86400
rollout:
  backend: sglang
  urls: ["{url}"]
  group_size: {group_size}
  max_concurrent_trajectories: 128
  weights: {{pause_mode: retract}}
buffer:
  groups_per_step: {groups_per_step}
  max_staleness: {max_staleness}
  stall_timeout_s: 86400
trainer:
  steps: {steps}
  run_dir: {run_dir}
  val_before_train: false
  keep_trajectories: false
  logger: []
tracking:
  report: false
"""


@dataclass(frozen=True)
class Kind:
    """A kind of run. resources: factor on the server's slots and on the learner's speed."""

    name: str
    max_staleness: int
    resources: int = 1


KINDS = (
    Kind("asynchronous", MAX_STALENESS),
    Kind("tighter", 4),
    Kind("synchronous", 0),
    Kind("equal_resources", 0, resources=2),
)


@dataclass(frozen=True)
class Figures:
    """The figures of one run, without the warm-up steps before the pipeline was full. Seconds are per step.

    work_s: tokens / (slots x rate) of the workload, which is both the server time and the learner time.
    slots_busy: mean share of busy slots.
    take_s, learn_s, rest_s: the controller's wait for the batch, the learner's sleep, and all other time.
    """

    kind: str
    steps: int
    step_s: float
    work_s: float
    take_s: float
    learn_s: float
    rest_s: float
    slots_busy: float
    tokens_per_trajectory: float
    lag_mean: float
    lag_max: int
    num_dropped: int

    @property
    def overhead(self) -> float:
        """Step time / max(server time, learner time)."""
        return self.step_s / self.work_s


@dataclass(frozen=True)
class Step:
    num_tokens: int
    lags: tuple[int, ...]
    take_s: float
    learn_s: float
    ended: float


def measure(kind: Kind, workload: Workload, folder: Path, *, warmup: int, steps: int) -> Figures:
    """Make `warmup + steps` steps with a paced learner, and return the figures of the last `steps`."""
    served = replace(workload, slots=workload.slots * kind.resources)
    with paced_servers(served, folder / "model") as (url,):
        # So that no step lacks groups to play next.
        config = config_of(kind, folder, url, steps=warmup + steps + MAX_STALENESS + 1)
        with open_run(config) as run:
            run.publish()
            run.start_rollouts()
            done: list[Step] = []
            busy_s = [0.0, 0.0]
            for index in range(warmup + steps):
                if index == warmup:
                    busy_s[0] = read_load(url)["busy_slot_s"]
                done.append(paced_step(run, workload, learner_speed=kind.resources))
                print(
                    f"{kind.name}: step {index + 1}, {done[-1].take_s:.1f} s for the batch",
                    file=sys.stderr,
                    flush=True,
                )
            busy_s[1] = read_load(url)["busy_slot_s"]
            counts = run.counts()
    assert counts.is_balanced, counts
    before, kept = done[warmup - 1], done[warmup:]
    wall_s = kept[-1].ended - before.ended
    lags = [lag for step in kept for lag in step.lags]
    return Figures(
        kind.name,
        steps,
        step_s=wall_s / steps,
        work_s=statistics.mean(workload.seconds_of(step.num_tokens) for step in kept),
        take_s=statistics.mean(step.take_s for step in kept),
        learn_s=statistics.mean(step.learn_s for step in kept),
        rest_s=wall_s / steps - statistics.mean(step.take_s + step.learn_s for step in kept),
        slots_busy=(busy_s[1] - busy_s[0]) / (wall_s * served.slots),
        tokens_per_trajectory=statistics.mean(step.num_tokens for step in kept)
        / (GROUPS_PER_STEP * GROUP_SIZE),
        lag_mean=statistics.mean(lags),
        lag_max=max(lags),
        num_dropped=sum(counts.dropped.values()),
    )


def paced_step(run: Run, workload: Workload, *, learner_speed: float) -> Step:
    """Make a step like `train_step`, with a learner that only sleeps."""
    started = time.monotonic()
    groups = run.take()
    taken, learned_by = time.monotonic(), run.lineage
    num_tokens = count_tokens(groups)
    time.sleep(workload.seconds_of(num_tokens) / learner_speed)
    learned = time.monotonic()
    run.step += 1
    run.publish()
    run.record(groups, [], learned_by=learned_by)
    # exact, as no run is rolled back here
    lags = tuple(learned_by.version - group.min_version for group in groups)
    return Step(num_tokens, lags, taken - started, learned - taken, time.monotonic())


def count_tokens(groups: Sequence[Group]) -> int:
    return sum(trajectory.num_action_tokens for group in groups for trajectory in group.trajectories)


def config_of(kind: Kind, folder: Path, url: str, *, steps: int) -> Config:
    path = folder / f"{kind.name}.yaml"
    path.write_text(
        CONFIG.format(
            folder=folder,
            url=url,
            tool=Path(__file__).with_name("paced_tool.py"),
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=kind.max_staleness,
            steps=steps,
            run_dir=folder / f"run_{kind.name}_{time.monotonic_ns()}",
        )
    )
    return load_config(str(path), [])


def prepare(folder: Path, *, num_tasks: int) -> None:
    """Write a tiny tokenizer, a random model of a few kilobytes and the tasks into `folder`."""
    model = folder / "model"
    write_tiny_tokenizer(model)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    vocab_size = Chat.load(str(model)).vocab_size
    config = Qwen2Config(
        vocab_size=vocab_size, max_position_embeddings=MAX_CONTEXT_TOKENS, tie_word_embeddings=True, **sizes
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(row_of(index)) + "\n" for index in range(num_tasks))
    )


def row_of(index: int) -> dict[str, object]:
    """Return a task; its prompt does not matter, because the server only waits."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"What is {index}+{index}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * index)},
        "agent_name": "tool_agent",
    }


def line_of(figures: Figures) -> str:
    return (
        f"{figures.kind:<16} {figures.step_s:7.2f} s/step = {figures.overhead:4.2f} x the work of "
        f"{figures.work_s:.2f} s  (batch {figures.take_s:.1f}, learner {figures.learn_s:.1f}, rest "
        f"{figures.rest_s:.2f})  slots busy {figures.slots_busy:4.0%}  lag mean {figures.lag_mean:.1f} max "
        f"{figures.lag_max}  dropped {figures.num_dropped}"
    )


def ratios_of(overheads: Mapping[str, float]) -> dict[str, float]:
    """Return the overhead of asynchronous steps, and the times of other steps relative to them."""
    if (own := overheads.get("asynchronous")) is None:
        return {}
    others = {name: overhead / own for name, overhead in overheads.items() if name != "asynchronous"}
    return {"asynchronous_over_work": own, **others}


def predicted_overhead(kind: Kind, workload: Workload, folder: Path, *, warmup: int, steps: int) -> float:
    """Return the simulator's step time / work of this kind."""
    config = config_of(kind, folder, "http://127.0.0.1:1", steps=warmup + steps)
    words = Words(Chat.load(str(folder / "model")))
    found = predict(config, workload, words, resources=kind.resources, warmup=warmup, steps=steps)
    overhead = found.step_s / workload.seconds_of(found.sampled_per_step)
    print(f"{kind.name:<16} predicted: {found.step_s:7.2f} s/step = {overhead:4.2f} x the work", flush=True)
    return overhead


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each kind")
    parser.add_argument(
        "--warmup", type=int, default=MAX_STALENESS + 2, help="steps before, until the pipeline is full"
    )
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS))
    parser.add_argument("--seconds-per-token", type=float, default=0.02)
    parser.add_argument("--mean-tokens", type=float, default=200.0, help="of a turn")
    parser.add_argument("--max-tokens", type=int, default=8000, help="of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    workload = Workload(
        args.seconds_per_token, mean_tokens=args.mean_tokens, max_tokens=args.max_tokens, seed=args.seed
    )
    results: list[Figures] = []
    predicted: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, num_tasks=GROUPS_PER_STEP * (args.warmup + args.steps + 2 * MAX_STALENESS + 2))
        for kind in KINDS:
            warmup = args.warmup if kind.max_staleness else 1
            predicted[kind.name] = predicted_overhead(kind, workload, folder, warmup=warmup, steps=args.steps)
            if kind.name in args.kinds.split(","):
                results.append(measure(kind, workload, folder, warmup=warmup, steps=args.steps))
                print(line_of(results[-1]), flush=True)
    ratios = ratios_of({figures.kind: figures.overhead for figures in results})
    expected = ratios_of(predicted)
    for name, ratio in expected.items():
        print(f"{name}: predicted {ratio:.2f}" + (f", measured {ratios[name]:.2f}" if name in ratios else ""))
    record = {
        "workload": asdict(workload),
        "results": [asdict(f) for f in results],
        "ratios": ratios,
        "predicted_ratios": expected,
    }
    write_result(args.out, record)
    if not results:
        return 0
    has_passed = ratios.get("asynchronous_over_work", 1.0) <= MAX_OVERHEAD and all(
        ratios.get(name, least) >= least for name, least in MIN_SPEEDUPS.items()
    )
    wanted = ", ".join(f"{name} at least {least}" for name, least in MIN_SPEEDUPS.items())
    print(f"wanted: {wanted}, asynchronous_over_work at most {MAX_OVERHEAD}: {'yes' if has_passed else 'NO'}")
    return int(not has_passed)


if __name__ == "__main__":
    sys.exit(main())
