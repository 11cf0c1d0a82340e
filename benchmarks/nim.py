"""Nim by one policy or two, against its past or its start: win rates against the warm start, which is frozen.

    python benchmarks/nim.py --setups self_play --steps 80 --out docs/results/nim.json
    python benchmarks/nim.py --setups roles past --steps 80 --out docs/results/opponents.json

Writes the rows, imitates random legal moves, and trains that policy. The setups:

    self_play       one policy in both seats
    against_frozen  against the warm start
    past            against the policy of the last tenth step
    roles           an adapter for each seat

The runs serve the opponents. Validation plays each pile from both sides. The exit code is 1 if a win rate
does not rise by `--rise`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml
from machine import facts, write_whole

from agentrl.data.trajectories import decode, read_parquet

ROOT = Path(__file__).resolve().parents[1]
AGENTRL = (sys.executable, "-m", "agentrl.cli")


class Setup(NamedTuple):
    """A config of `examples`, and the file with its rows."""

    config: str
    rows: str


SETUPS = {
    "self_play": Setup("nim", "selfplay"),
    "against_frozen": Setup("nim", "against"),
    "past": Setup("nim_past", "past"),
    "roles": Setup("nim_roles", "selfplay"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=["self_play"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rise", type=float, default=0.15, help="by which each win rate has to rise")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench" / "nim")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    runs = args.runs.resolve()
    data, warm_start = prepare(runs)
    rises = []
    for name in args.setups:
        figures = measure(name, data, warm_start, runs / name, steps=args.steps, overrides=args.overrides)
        print(name, json.dumps(figures["win_rate"]))
        if args.out is not None:
            stored = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
            others = [run for run in stored if run["name"] != name]
            write_whole(args.out, {"runs": [*others, {"name": name, **facts(), **figures}]})
        rates = list(figures["win_rate"].values())
        rises.append(rates[-1] - rates[0])
    return int(min(rises) < args.rise)


def prepare(folder: Path) -> tuple[Path, Path]:
    """Write the rows and the warm start into `folder` if they are not there; return where they are."""
    data, warm_start = folder / "data", folder / "warm_start"
    if not (warm_start / "config.json").exists():
        command([sys.executable, "examples/nim_rows.py", str(data)])
        files = [f"data.train_files=[{data}/sft.jsonl]", f"trainer.output={warm_start}"]
        command([*AGENTRL, "sft", "examples/nim_sft.yaml", *files])
    return data, warm_start


def measure(
    name: str, data: Path, warm_start: Path, run: Path, *, steps: int, overrides: list[str]
) -> dict[str, Any]:
    """Make the run of a setup, and return its figures."""
    shutil.rmtree(run, ignore_errors=True)  # resuming an interrupted run would mix two curves
    config, rows = f"examples/{SETUPS[name].config}.yaml", f"{SETUPS[name].rows}.jsonl"
    given = [
        f"data.train_files=[{data}/{rows}]",
        f"data.val_files=[{data}/val.jsonl]",
        f"model.path={warm_start}",
        f"agent.opponents.frozen.model.path={warm_start}",
        f"trainer.run_dir={run}",
        f"trainer.steps={steps}",
    ]
    started = time.monotonic()
    command([*AGENTRL, "train", config, *given, *overrides])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = {r["step"]: r for r in records if r["kind"] == "validation"}
    trained = {r["step"]: r for r in records if r["kind"] == "train"}
    return {
        "what": f"agentrl train {config}, {rows}, from imitated random moves; one seed",
        "seed": yaml.safe_load((run / "config.yaml").read_text())["trainer"]["seed"],
        "steps": steps,
        "overrides": overrides,
        "wall_s": round(time.monotonic() - started, 1),
        "win_rate": {str(step): round(r["val/accuracy"], 4) for step, r in validations.items()},
        "win_rate_by_side": by_side(run / "validation"),
        "in_training": {
            str(step): {
                "win_rate": round(record["rollout/accuracy"], 4),
                **{key: record[key] for key in record if key.startswith("opponents/")},
            }
            for step, record in trained.items()
        },
        "counts": json.loads((run / "result.json").read_text())["counts"],
    }


def by_side(validations: Path) -> Mapping[str, Mapping[str, float]]:
    """Return side -> step -> share of the games that the policy won on that side."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for file in sorted(validations.glob("step_*.parquet")):
        won: dict[str, list[float]] = defaultdict(list)
        for game in decode(read_parquet(file)):
            won[game.extra_info["side"]].append(game.metrics.get("accuracy", float(game.reward > 0)))
        for side, games in won.items():
            found[side][str(int(file.stem.removeprefix("step_")))] = round(mean(games), 4)
    return found


def command(arguments: list[str]) -> None:
    subprocess.run(arguments, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
