"""`make smollm` for several seeds: accuracy, curve, time, memory of all processes, disk.

    python benchmarks/smollm.py --configs smollm,smollm_lora --seeds 0,1,2

Each seed has its own warm start, which its configs share; smollm_hard has another. Runs are made one after
the other, each as by hand, with the folders in `--runs`. A run whose figures are in the file, for the same
config, seed, overrides and commit, is not repeated. The exit status is 1 if a run failed or ended below
`--at-least` on products.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from machine import cpu_name, current_commit, write_whole

ROOT = Path(__file__).parents[1]
AGENTRL = (sys.executable, "-m", "agentrl.cli")
SAMPLE_S = 2.0
CURVES = ("rollout/accuracy", "rollout/tool_use/needs_tool", "learner/entropy", "learner/mismatch_mean")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", default="smollm,smollm_lora,smollm_hard")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-least", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "smollm.json")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench" / "smollm")
    parser.add_argument("--warm-start-steps", type=int, default=24)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all trainings")
    args = parser.parse_args()
    runs = args.runs.resolve()
    stored = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    commit, is_good = current_commit(), True
    prepare(runs)
    for seed in map(int, args.seeds.split(",")):
        for config in args.configs.split(","):
            plan = {"config": config, "seed": seed, "overrides": args.overrides, "commit": commit}
            figures = next((run for run in stored if plan.items() <= run.items()), None)
            if figures is None:
                cost = warm_start(config, seed, runs, num_steps=args.warm_start_steps)
                figures = plan | {"cpu": cpu_name()} | cost | measure(config, seed, runs, args.overrides)
                stored.append(figures)
                write_whole(args.out, {"what": "make smollm CONFIG=..., seed by seed", "runs": stored})
            final = figures["validation"]["final"]["val/accuracy/tool_agent"]
            is_good &= final >= args.at_least
            seconds = figures["train"]["wall_s"]
            print(f"{config} seed {seed}: products {final:.3f}, {seconds:.0f} s", flush=True)
    return int(not is_good)


def prepare(runs: Path) -> None:
    """Fetch the model and write the data, if they are not there."""
    if not (runs / "model" / "config.json").exists():
        run("models", "fetch", "smollm2", str(runs / "model"))
    run("data", "arithmetic", str(runs / "data"), "--kinds", "tool,interaction", "--tool-use", "0.35")
    run("data", "arithmetic", str(runs / "all_kinds"), "--tool-use", "0.35")


def start_of(config: str) -> str:
    """Return the name of the folder of a config's warm start."""
    return "warm_start_hard" if config == "smollm_hard" else "warm_start"


def data_of(config: str, runs: Path) -> Path:
    return runs / ("all_kinds" if config == "smollm_hard" else "data")


def warm_start(config: str, seed: int, runs: Path, *, num_steps: int) -> dict[str, Any]:
    """Make the seed's warm start; return its cost, or nothing if it was there."""
    folder = runs / f"seed{seed}" / start_of(config)
    if (folder / "config.json").exists():
        return {}
    with watched() as cost:
        run(
            "sft",
            "configs/smollm_sft.yaml",
            f"data.train_files=[{data_of(config, runs)}/sft.parquet]",
            f"model.path={runs}/model",
            f"trainer.output={folder}",
            f"trainer.steps={num_steps}",
            f"trainer.seed={seed}",
        )
    return {"warm_start": cost}


def measure(config: str, seed: int, runs: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Make one training; return its figures."""
    folder = runs / f"seed{seed}"
    run_dir, data = folder / config, data_of(config, runs)
    shutil.rmtree(run_dir, ignore_errors=True)  # resuming an interrupted run would hide a part of its time
    baseline = [] if config == "smollm_lora" else [f"tracking.baselines={{pretrained: {runs}/model}}"]
    with watched() as cost:
        run(
            "train",
            f"configs/{config}.yaml",
            f"data.train_files=[{data}/train.parquet]",
            f"data.val_files=[{data}/val.parquet]",
            f"model.path={folder / start_of(config)}",
            f"trainer.seed={seed}",
            f"trainer.run_dir={run_dir}",
            *baseline,
            *overrides,
        )
    return {"train": cost} | read(run_dir)


def read(run_dir: Path) -> dict[str, Any]:
    """Return validations, curves and cost of a finished run."""
    records = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    validation = json.loads((run_dir / "result.json").read_text())["validation"]
    kept = ("val/accuracy", "val/tool_use/needs_tool")
    return {
        "validation": {
            policy: {name: value for name, value in metrics.items() if name.startswith(kept)}
            for policy, metrics in validation.items()
        },
        "curves": {name: [record.get(name) for record in train] for name in CURVES},
        "steps_s": [round(record["time/step_s"], 1) for record in train],
        "learner_peak_bytes": max(record["learner/memory/rss_bytes_max"] for record in train),
        "run_folder_bytes": sum(file.stat().st_size for file in run_dir.rglob("*") if file.is_file()),
    }


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Fill the dictionary, at the end of the block, with its duration and the peak of its processes' memory.

    Memory: proportional set sizes of this process's descendants, sampled; shared pages count once.
    """
    cost: dict[str, float] = {}
    is_over, started = threading.Event(), time.monotonic()
    peak = [0.0]

    def sample() -> None:
        while not is_over.wait(SAMPLE_S):
            peak[0] = max(peak[0], sum(map(proportional_bytes, psutil.Process().children(recursive=True))))

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        yield cost
    finally:
        is_over.set()
        watcher.join()
        cost |= {"wall_s": round(time.monotonic() - started, 1), "peak_bytes": peak[0]}


def proportional_bytes(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.Error:
        return 0.0  # it has ended


def run(*words: str) -> None:
    subprocess.run([*AGENTRL, *words], cwd=ROOT, stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    sys.exit(main())
