"""One policy in both seats of Nim: its win rate against its own warm start, which stays frozen.

    python benchmarks/nim.py --steps 80 --out docs/results/nim.json

Writes the rows, imitates random legal moves, and trains that policy: by self-play, or with `--against` in
games with the opponent. The run serves the opponent. Validation plays each pile from both sides. The exit
code is 1 if the win rate does not rise by `--rise`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import facts, write_whole

ROOT = Path(__file__).resolve().parents[1]
AGENTRL = (sys.executable, "-m", "agentrl.cli")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--against", action="store_true", help="train in games with the frozen opponent")
    parser.add_argument("--rise", type=float, default=0.15, help="by which the win rate has to rise")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench" / "nim")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    name = "against_frozen" if args.against else "self_play"
    figures = measure(args.runs.resolve(), name=name, steps=args.steps, overrides=args.overrides)
    print(json.dumps(figures["win_rate"]))
    if args.out is not None:
        stored = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
        others = [run for run in stored if run["name"] != name]
        write_whole(args.out, {"runs": [*others, {"name": name, **facts(), **figures}]})
    rates = list(figures["win_rate"].values())
    return int(rates[-1] - rates[0] < args.rise)


def measure(folder: Path, *, name: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Prepare what is missing in `folder`, make one run, and return its figures."""
    data, warm_start, run = folder / "data", folder / "warm_start", folder / name
    if not (warm_start / "config.json").exists():
        command([sys.executable, "examples/nim_rows.py", str(data)])
        files = [f"data.train_files=[{data}/sft.jsonl]", f"trainer.output={warm_start}"]
        command([*AGENTRL, "sft", "examples/nim_sft.yaml", *files])
    shutil.rmtree(run, ignore_errors=True)  # resuming an interrupted run would mix two curves
    rows = "against" if name == "against_frozen" else "selfplay"
    given = [
        f"data.train_files=[{data}/{rows}.jsonl]",
        f"data.val_files=[{data}/val.jsonl]",
        f"model.path={warm_start}",
        f"agent.opponents.frozen.model.path={warm_start}",
        f"trainer.run_dir={run}",
        f"trainer.steps={steps}",
    ]
    started = time.monotonic()
    command([*AGENTRL, "train", "examples/nim.yaml", *given, *overrides])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "what": f"agentrl train examples/nim.yaml, {rows}.jsonl, from imitated random moves; one seed",
        "steps": steps,
        "overrides": overrides,
        "wall_s": round(time.monotonic() - started, 1),
        "win_rate": {
            str(r["step"]): round(r["val/accuracy"], 4) for r in records if r["kind"] == "validation"
        },
        "counts": json.loads((run / "result.json").read_text())["counts"],
    }


def command(arguments: list[str]) -> None:
    subprocess.run(arguments, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
