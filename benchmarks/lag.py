"""Effect of stale tokens and of their correction, on the quickstart task with a lag of 8, several seeds.

    python benchmarks/lag.py --seeds 0,1,2 --out docs/results/lag.json

Four rows. `on_policy` waits for every publish. The others train on tokens that are `--max-staleness` versions
old: `decoupled` with the importance weight of the proximal over the behavior policy, `bypass` with the
clipped ratio to the behavior policy, `uncorrected` as if the tokens were fresh. The lag is forced (see
train_behind.py), so it is the same on every machine. Runs that are in the JSON file, for the same overrides
and commit, are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from quickstart_runs import Figures, Plan, Results, add_arguments, measure_all

CORRECTIONS = {
    "decoupled": ("algorithm.mode=decoupled",),
    "bypass": ("algorithm.mode=bypass",),
    "uncorrected": ("algorithm.mode=decoupled", "algorithm.correction.weight=none"),
}
BASELINE = "on_policy"
PROGRAM = (sys.executable, str(Path(__file__).with_name("train_behind.py")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default=",".join([BASELINE, *CORRECTIONS]), help="which of them, separated by commas"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--max-staleness", type=int, default=8)
    parser.add_argument("--eval-n", type=int, default=4, help="attempts at each of the validation rows")
    parser.add_argument(
        "--within",
        type=float,
        default=0.03,
        help="how far the mean of `decoupled` may be below that of `on_policy`",
    )
    add_arguments(parser, "lag")
    args = parser.parse_args()
    plans = [
        Plan(row, int(seed), args.steps, (*overrides_of(row, args), *args.overrides))
        for seed in args.seeds.split(",")
        for row in args.rows.split(",")
    ]
    results = Results(
        args.out, what="benchmarks/lag.py: the quickstart task, servers kept buffer.max_staleness steps ahead"
    )
    measured = list(measure_all(plans, results, commit=args.commit, runs=args.runs, program=PROGRAM))
    print("\n" + table(measured))
    return int(len(measured) < len(plans) or not is_recovered(measured, within=args.within))


def overrides_of(row: str, args: argparse.Namespace) -> tuple[str, ...]:
    own = (
        ("buffer.max_staleness=0",)
        if row == BASELINE
        else (f"buffer.max_staleness={args.max_staleness}", *CORRECTIONS[row])
    )
    return (*own, f"eval.n={args.eval_n}", f"trainer.test_freq={max(1, args.steps // 3)}")


def mean_accuracy(measured: list[Figures], row: str) -> float | None:
    values = [figures.accuracy for figures in measured if figures.name == row]
    return statistics.mean(values) if values else None


def is_recovered(measured: list[Figures], *, within: float) -> bool:
    """Return whether `decoupled` reaches the accuracy of `on_policy`; True unless both were measured."""
    fresh, old = mean_accuracy(measured, BASELINE), mean_accuracy(measured, "decoupled")
    return fresh is None or old is None or old >= fresh - within


def table(measured: list[Figures]) -> str:
    """Return a Markdown table: one row per kind of run, the seeds side by side."""
    rows = [
        "| | final accuracy (by seed) | mean | lag mean | lag max | s per step |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(figures.name for figures in measured):
        runs = [figures for figures in measured if figures.name == name]
        final, mean = (
            ", ".join(f"{run.accuracy:.3f}" for run in runs),
            statistics.mean(run.accuracy for run in runs),
        )
        lag, per_step = (
            statistics.mean(run.lag_mean for run in runs),
            statistics.mean(run.steps_s / run.steps for run in runs),
        )
        rows.append(
            f"| `{name}` | {final} | {mean:.3f} | {lag:.2f} | {max(run.lag_max for run in runs):g} | "
            f"{per_step:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
