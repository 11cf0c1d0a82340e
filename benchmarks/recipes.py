"""Final validation accuracy of every recipe on the quickstart task, from one warm start, several seeds each.

    python benchmarks/recipes.py --recipes grpo,rloo --seeds 0,1 --out docs/results/recipes.json

Each run is `agentrl train configs/quickstart.yaml algorithm=NAME` with the overrides of ON_THIS_TASK, one
after the other. The exit code is 1 if a run failed or ended below `--at-least`. Results that are in the JSON
file, for the same recipe, seed, steps, overrides and commit, are not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from quickstart_runs import Figures, Plan, Results, add_arguments, measure_all

RECIPES = "ppo,grpo,rloo,reinforce_plus_plus,dapo,gspo,cispo"
ON_THIS_TASK = {
    "ppo": ("critic.optimizer.lr=1e-3",),  # the recipe's rate is for large models
    # Towards the end nearly all groups are solved by every attempt.
    "dapo": ("buffer.max_constant_batches=100",),
}
"""Overrides that a recipe needs on this task."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default=RECIPES, help="names of configs/algorithm, separated by commas")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument(
        "--at-least", type=float, default=0.85, help="final accuracy that every run is to reach"
    )
    add_arguments(parser, "recipes")
    args = parser.parse_args()
    plans = [
        Plan(
            recipe,
            int(seed),
            args.steps,
            (f"algorithm={recipe}", *ON_THIS_TASK.get(recipe, ()), *args.overrides),
        )
        for recipe in args.recipes.split(",")
        for seed in args.seeds.split(",")
    ]
    results = Results(
        args.out, what="agentrl train configs/quickstart.yaml algorithm=NAME, one run after the other"
    )
    measured = list(measure_all(plans, results, commit=args.commit, runs=args.runs))
    print("\n" + table(measured))
    return int(len(measured) < len(plans) or any(figures.accuracy < args.at_least for figures in measured))


def table(measured: list[Figures]) -> str:
    """Return a Markdown table: one row per recipe, the seeds side by side."""
    rows = [
        "| recipe | initial | final (by seed) | lowest kind | lag mean | s per step |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(figures.name for figures in measured):
        runs = [figures for figures in measured if figures.name == name]
        final = ", ".join(f"{run.accuracy:.3f}" for run in runs)
        lowest = min(
            value for run in runs for key, value in run.final.items() if key.startswith("val/accuracy/")
        )
        initial, lag = (
            statistics.mean(run.initial["val/accuracy"] for run in runs),
            statistics.mean(run.lag_mean for run in runs),
        )
        per_step = statistics.mean(run.steps_s / run.steps for run in runs)
        rows.append(f"| `{name}` | {initial:.3f} | {final} | {lowest:.3f} | {lag:.2f} | {per_step:.2f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
