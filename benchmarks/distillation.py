"""A policy of the quickstart learns from a teacher: what on-policy distillation needs beside rewards.

    python benchmarks/distillation.py --out docs/results/distillation.json

The teacher is the quickstart's trained policy, which is trained first if it is not there. From the warm start
of the quickstart, one run learns from the teacher alone, one from rewards alone, and one from both, all with
the same number of steps. The figures of the runs with a teacher include its KL by step. The exit code is 1 if
a run failed, or if the KL of a run with a teacher does not fall to a half of its first value.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from machine import write_whole
from quickstart_runs import ROOT, TRAIN, Figures, Plan, Results, add_arguments, command, measure_all, prepare

TEACHER = ROOT / "runs" / "quickstart" / "run" / "policy"
WINDOW = 5
"""Steps of which the first and last KL are means."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--teacher", type=Path, default=TEACHER, help="folder of another teacher of the same family"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", default="0")
    add_arguments(parser, "distillation")
    args = parser.parse_args()
    results = Results(
        args.out, what="agentrl train configs/quickstart.yaml from one warm start, one after another"
    )
    if not (args.teacher / "config.json").exists():
        prepare()
        command([*TRAIN, "configs/quickstart.yaml"])
    plans = [
        Plan(name, int(seed), args.steps, (*own, *args.overrides))
        for seed in args.seeds.split(",")
        for name, own in rows(os.path.relpath(args.teacher, ROOT)).items()
    ]
    measured = list(measure_all(plans, results, commit=args.commit, runs=args.runs))
    falls = {f"{f.name}, seed {f.seed}": teacher_kl(f, args.runs, args.commit) for f in measured}
    falls = {name: kl for name, kl in falls.items() if kl}
    stored = json.loads(args.out.read_text())
    write_whole(args.out, {**stored, "teacher_kl_by_step": falls})
    print("\n" + table(measured))
    fell = [mean(kl[-WINDOW:]) < 0.5 * mean(kl[:WINDOW]) for kl in falls.values()]
    return int(len(measured) < len(plans) or not all(fell))


def rows(teacher: str) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each row. teacher: its folder, from the project root, where the runs start."""
    taught = f"algorithm.distillation.teacher={teacher}"
    return {
        "teacher_alone": (taught, "algorithm.distillation.with_rewards=false"),
        "rewards_and_teacher": (taught,),
        "rewards_alone": (),
    }


def teacher_kl(figures: Figures, runs: Path, commit: str) -> list[float]:
    """Return the mean of log policy - log teacher per token at every step; empty without a teacher."""
    file = runs / f"{figures.name}_seed{figures.seed}_{commit}" / "metrics.jsonl"
    records = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    return [round(r["learner/teacher_kl"], 5) for r in records if "learner/teacher_kl" in r]


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def table(measured: Sequence[Figures]) -> str:
    """Return a Markdown table with a row per run."""
    lines = ["| run | seed | steps | initial | final | s per step |", "|---|---|---|---|---|---|"]
    for one in measured:
        lines.append(
            f"| `{one.name}` | {one.seed} | {one.steps} | {one.initial['val/accuracy']:.3f} | "
            f"{one.accuracy:.3f} | {one.steps_s / one.steps:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
