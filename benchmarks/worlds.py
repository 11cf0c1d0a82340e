"""The curves of the worlds that a small policy was trained in: whether each rises, in one picture.

    python benchmarks/worlds.py --out docs/results/worlds.json
    python benchmarks/worlds.py ladder=runs/ladder/run --out docs/results/worlds.json

Reads `docs/results/NAME.json` of each world and draws `worlds.png` beside the output. NAME=RUN replaces the
curve of a world by that of a finished run, as its page makes it (docs/tools.md, and the READMEs of
agentrl/extras/hubs and agentrl/extras/boxes). The exit code is 1 if a curve does not rise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ROOT, facts, write_result, write_whole
from matplotlib.figure import Figure

CURVES = ROOT / "docs" / "results"
WORLDS = {
    "shop": "a shop in a database",
    "mending": "repositories to mend, in boxes",
    "spell_backward": "reasoning-gym: words backward",
    "ladder": "OpenEnv: a ladder",
    "larger_number": "verifiers: the larger number",
    "lake": "Gymnasium: a frozen lake",
    "nim": "Nim: both seats, against the start",
}
COLUMNS = 4


@dataclass(frozen=True)
class Curve:
    """Mean reward in validation by step, and of the training batch of each step.

    Attributes:
        validation: by step, before the first one at 0; of Nim, the share of games that are won.
        training: of step 1, 2, ...; empty if it says nothing (what the two seats of a game earn cancels).
    """

    validation: Mapping[int, float]
    training: Sequence[float]

    @property
    def rise(self) -> float:
        values = list(self.validation.values())
        return values[-1] - values[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="NAME=RUN", help="curves to replace, by finished runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for given in args.runs:
        name, _, run = given.partition("=")
        if name not in WORLDS or name == "nim" or not (Path(run) / "metrics.jsonl").exists():
            known = ", ".join(world for world in WORLDS if world != "nim")
            parser.error(f"{given!r} is no NAME=RUN; NAME is one of {known}, RUN a folder with metrics.jsonl")
        write_whole(CURVES / f"{name}.json", {**facts(), **of_run(name, Path(run))})
    curves = {name: stored(name) for name in WORLDS}
    for name, curve in curves.items():
        steps = ", ".join(f"{value:.2f}" for value in curve.validation.values())
        print(f"{WORLDS[name]}: {steps}")
    rises = {name: round(curve.rise, 4) for name, curve in curves.items()}
    write_result(args.out, {"what": __doc__.splitlines()[0], "rises": rises})
    if args.out is not None:
        draw(curves, args.out.with_suffix(".png"))
    return int(min(rises.values()) <= 0)


def of_run(name: str, run: Path) -> dict[str, Any]:
    """Return what `docs/results/NAME.json` has of a finished run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    return {
        "what": f"agentrl train examples/{name}.yaml from a warm start by imitation "
        f"(examples/{name}_sft.yaml), one seed",
        "steps": training[-1]["step"],
        "validation": {str(one["step"]): {"reward": round(one["val/reward_mean"], 4)} for one in validation},
        "training_reward": [round(one["rollout/reward_mean"], 4) for one in training],
    }


def stored(name: str) -> Curve:
    found = json.loads((CURVES / f"{name}.json").read_text())
    if name == "nim":
        (run,) = (run for run in found["runs"] if run["name"] == "self_play")
        return Curve({int(step): rate for step, rate in run["win_rate"].items()}, ())
    validation = {int(step): point["reward"] for step, point in found["validation"].items()}
    return Curve(validation, found["training_reward"])


def draw(curves: Mapping[str, Curve], path: Path) -> None:
    figure = Figure(figsize=(3.4 * COLUMNS, 5.6), layout="constrained")
    axes = figure.subplots(-(-len(curves) // COLUMNS), COLUMNS).flatten()
    for axis, (name, curve) in zip(axes, curves.items(), strict=False):
        axis.plot(range(1, len(curve.training) + 1), curve.training, color="#cbd5e1", label="training batch")
        axis.plot(*zip(*curve.validation.items(), strict=True), "o-", color="#2563eb", label="validation")
        axis.set(title=WORLDS[name], xlabel="step", ylim=(0, 1.03))
        axis.grid(alpha=0.3)
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
