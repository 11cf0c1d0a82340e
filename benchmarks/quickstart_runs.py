"""Sequential runs of the quickstart task with their figures in a JSON file, for recipes.py, lag.py,
resumed.py.

Each run is started as by hand: `agentrl train configs/quickstart.yaml KEY=VALUE ...`. Results are written
after every run, so an interrupted benchmark resumes; runs that are already in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import cpu_name, current_commit, write_whole

ROOT = Path(__file__).parents[1]
DATA = ROOT / "runs" / "quickstart" / "data"
WARM_START = ROOT / "runs" / "quickstart" / "warm_start"
AGENTRL = (sys.executable, "-m", "agentrl.cli")
TRAIN = (*AGENTRL, "train")


@dataclass(frozen=True)
class Plan:
    """A run to make. name: its row in the table. overrides: the row's config overrides."""

    name: str
    seed: int
    steps: int
    overrides: tuple[str, ...]

    def key(self, commit: str) -> tuple[object, ...]:
        """The identity of a measurement: results with the same key are the same measurement."""
        return (self.name, self.seed, self.steps, list(self.overrides), commit)


@dataclass(frozen=True)
class Figures:
    """The figures of one run.

    Accuracies: of validation, at temperature 1. Lag: in versions, over sampled tokens.
    """

    name: str
    seed: int
    steps: int
    overrides: list[str]
    commit: str
    initial: dict[str, float]
    final: dict[str, float]
    accuracy_by_step: dict[str, float]
    lag_mean: float
    lag_max: float
    wall_s: float
    steps_s: float
    entropy_last: float
    num_skipped_updates: int
    counts: dict[str, Any]
    cpu: str = "not recorded"

    @property
    def accuracy(self) -> float:
        return self.final["val/accuracy"]


class Results:
    """The JSON file of a benchmark: {"what": ..., "runs": [...]}, rewritten atomically after each run."""

    def __init__(self, file: Path, *, what: str) -> None:
        self._file = file
        self._what = what
        stored = json.loads(file.read_text())["runs"] if file.exists() else []
        self.runs = [Figures(**run) for run in stored]

    def find(self, plan: Plan, commit: str) -> Figures | None:
        """Return the stored figures of this run, or None."""
        keys = ((f.name, f.seed, f.steps, f.overrides, f.commit) for f in self.runs)
        return next(
            (figures for figures, key in zip(self.runs, keys, strict=True) if key == plan.key(commit)), None
        )

    def add(self, figures: Figures) -> None:
        self.runs.append(figures)
        write_whole(self._file, {"what": self._what, "runs": [asdict(run) for run in self.runs]})


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments that these benchmarks share. `name`: of the result file and of the folder of runs."""
    parser.add_argument(
        "--commit",
        default=current_commit(),
        help="name of the measured state; by default the hash of what is checked out",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / f"{name}.json")
    parser.add_argument(
        "--runs",
        type=_whole_path,
        default=ROOT / "runs" / "bench" / name,
        help="where the runs' own folders go",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs")


def _whole_path(text: str) -> Path:
    return Path(text).resolve()


class RunFailed(Exception):
    """A run ended with an error; the message names its log."""


def measure_all(
    plans: Sequence[Plan], results: Results, *, commit: str, runs: Path, program: Sequence[str] = TRAIN
) -> Iterator[Figures]:
    """Yield the figures of each plan in turn: the stored ones, or those of a new run.

    A new run is `program CONFIG KEY=VALUE ...`. A failed run is reported and left out.
    """
    for plan in plans:
        figures = results.find(plan, commit)
        try:
            if figures is None:
                figures = measure(plan, commit=commit, runs=runs, program=program)
                results.add(figures)
        except RunFailed as error:
            print(f"{plan.name} seed {plan.seed}: {error}", flush=True)
            continue
        print(line(figures), flush=True)
        yield figures


def measure(plan: Plan, *, commit: str, runs: Path, program: Sequence[str] = TRAIN) -> Figures:
    """Make one run, from the warm start to the last validation.

    Raises:
        RunFailed: the command ended with an error.
    """
    prepare()
    run_dir = runs / f"{plan.name}_seed{plan.seed}_{commit}"
    shutil.rmtree(run_dir, ignore_errors=True)  # resuming an interrupted run would hide a part of its time
    run_dir.mkdir(parents=True)
    common = [
        f"trainer.seed={plan.seed}",
        f"trainer.steps={plan.steps}",
        f"trainer.run_dir={run_dir}",
        "trainer.save_freq=-1",
    ]
    common += ["trainer.keep_trajectories=false", "~tracking.baselines.untrained", "tracking.report=false"]
    started = time.monotonic()
    command([*program, "configs/quickstart.yaml", *plan.overrides, *common], log=run_dir / "output.log")
    return read_figures(plan, run_dir, commit=commit, wall_s=time.monotonic() - started)


def read_figures(plan: Plan, run_dir: Path, *, commit: str, wall_s: float) -> Figures:
    """Read the figures of a finished run from its folder."""
    result = json.loads((run_dir / "result.json").read_text())
    records = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    return Figures(
        name=plan.name,
        seed=plan.seed,
        steps=plan.steps,
        overrides=list(plan.overrides),
        commit=commit,
        initial=_accuracies(result["validation"]["initial"]),
        final=_accuracies(result["validation"]["final"]),
        accuracy_by_step={
            str(r["step"]): round(r["val/accuracy"], 4) for r in records if r["kind"] == "validation"
        },
        lag_mean=round(statistics.mean(r["rollout/lag/mean"] for r in train), 3),
        lag_max=max(r["rollout/lag/max"] for r in train),
        wall_s=round(wall_s, 1),
        steps_s=round(sum(r["time/step_s"] for r in train), 1),
        entropy_last=round(train[-1]["learner/entropy"], 4),
        num_skipped_updates=sum(r["learner/is_skipped"] > 0 for r in train),
        counts=result["counts"],
        cpu=cpu_name(),
    )


def _accuracies(validation: dict[str, float]) -> dict[str, float]:
    names = [
        name for name in validation if name.startswith("val/accuracy") or name == "val/tool_use/needs_tool"
    ]
    return {name: round(validation[name], 4) for name in names}


def prepare() -> None:
    """Write the quickstart's dataset and warm-started model if they do not exist."""
    if not (DATA / "val.parquet").exists():
        command([*AGENTRL, "data", "arithmetic", str(DATA)])
    if not (WARM_START / "config.json").exists():
        command([*AGENTRL, "sft", "configs/quickstart_sft.yaml"])


def command(arguments: Sequence[str], *, log: Path | None = None) -> None:
    """Run a program in the project root, which the configs' paths are relative to; its output goes to `log`.

    Raises:
        RunFailed: its exit code is not 0.
    """
    output = log.open("w") if log else None
    try:
        code = subprocess.run(
            arguments, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        ).returncode
    finally:
        if output:
            output.close()
    if code != 0:
        raise RunFailed(
            f"`{' '.join(arguments[1:4])} ...` ended with exit code {code}" + (f"; see {log}" if log else "")
        )


def line(figures: Figures) -> str:
    """Return the figures as one line of text."""
    kinds = "  ".join(
        f"{name.removeprefix('val/accuracy/')} {value:.3f}"
        for name, value in figures.final.items()
        if name.startswith("val/accuracy/")
    )
    return (
        f"{figures.name:<22} seed {figures.seed}: accuracy {figures.initial['val/accuracy']:.3f} -> "
        f"{figures.accuracy:.3f}  ({kinds})  lag mean {figures.lag_mean:.2f} max {figures.lag_max:g}  "
        f"{figures.wall_s:.0f} s"
    )
