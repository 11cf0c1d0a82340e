"""What the program does on fixed seeds, as digests: two commits behave alike if this script writes the same
for both.

It makes the quickstart's data and policy, trains on-policy, replays a run (`--replay-of`: one of another
commit), evaluates greedily, and collects the texts of `--help` and the config reference. Of the training,
whose servers draw without a seed, it records the names of metrics and columns, and the journal's tables.

Usage: python benchmarks/behaviour.py --out docs/results/behaviour.json [--folder runs/bench/behaviour]
       [--replay-of RUN]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
from machine import ROOT, write_result

TIMEOUT_S = 900
SMALL = [
    "buffer.max_staleness=0",
    "buffer.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_concurrent_trajectories=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.val_files=[]",
    "tracking.baselines={}",
]


def agentrl(*arguments: str) -> str:
    """Run the command in the root of the project and return what it prints."""
    command = [str(Path(sys.executable).with_name("agentrl")), *arguments]
    environment = {
        **os.environ,
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def digest(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def weights(folder: Path) -> str:
    """Return the digest of a policy's weights."""
    return digest(b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors"))))


def metrics(run: Path) -> list[str]:
    """Return the names of all metrics of steps."""
    return sorted(
        {name for line in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    )


def columns(run: Path) -> list[str]:
    """Return the columns of the stored trajectories with their types."""
    return [
        f"{field.name}: {field.type}"
        for field in pq.read_schema(next((run / "trajectories").glob("*.parquet")))
    ]


def journal(run: Path) -> list[str]:
    """Return the statements that made the journal's tables."""
    with sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True) as connection:
        return sorted(
            sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        )


def commands(app: object, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in getattr(app, "commands", {}).items():
        yield (*path, name)
        yield from commands(command, *path, name)


def help_texts() -> dict[str, str]:
    from typer.main import get_command

    from agentrl.cli.app import app

    return {" ".join(names): agentrl(*names, "--help") for names in [(), *commands(get_command(app))]}


def prepare(folder: Path, updates: int) -> None:
    """Write the quickstart's data and make its policy."""
    agentrl("data", "arithmetic", str(folder / "data"))
    outputs = [f"trainer.output={folder / 'policy'}", f"trainer.untrained_output={folder / 'untrained'}"]
    outputs.append(f"trainer.steps={updates}")
    agentrl(
        "sft",
        "configs/quickstart_sft.yaml",
        f"data.train_files=[{folder / 'data' / 'sft.parquet'}]",
        *outputs,
    )


def train(folder: Path, steps: int) -> dict[str, object]:
    """Train `steps` steps in `folder/run`."""
    files = [
        f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
        f"model.path={folder / 'policy'}",
        f"trainer.steps={steps}",
        f"trainer.save_freq={steps}",
    ]
    agentrl("train", "configs/quickstart.yaml", *SMALL, *files, f"trainer.run_dir={folder / 'run'}")
    run = folder / "run"
    return {
        "metrics": metrics(run),
        "trajectories": columns(run),
        "journal": journal(run),
        "audit": agentrl("audit", str(run)).splitlines()[-1],
    }


def evaluate(folder: Path) -> dict[str, object]:
    out = folder / "eval"
    limit = ["rollout.max_concurrent_trajectories=1", f"model.path={folder / 'policy'}"]
    agentrl(
        "eval",
        "configs/quickstart.yaml",
        *limit,
        "--on",
        str(folder / "data" / "val.parquet"),
        "--greedy",
        "--rows",
        "24",
        "--out",
        str(out),
    )
    return json.loads((out / "results.json").read_text())["summary"]


def behave(folder: Path, replay_of: Path, *, updates: int, steps: int) -> dict[str, object]:
    texts = help_texts()
    prepare(folder, updates)
    trained = train(folder, steps)
    agentrl("replay", str(replay_of), "--out", str(folder / "replay"))
    return {
        "imitation": weights(folder / "policy"),
        "training": trained,
        "replay": weights(folder / "replay" / "policy"),
        "evaluation": evaluate(folder),
        "config_reference": digest((ROOT / "docs" / "config.md").read_text()),
        "help": {name: digest(text) for name, text in texts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench" / "behaviour")
    parser.add_argument(
        "--replay-of", type=Path, help="the run of another commit; default: the one that is trained here"
    )
    parser.add_argument("--updates", type=int, default=350, help="of the imitation")
    parser.add_argument("--steps", type=int, default=10, help="of the training")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    result = behave(
        arguments.folder.resolve(),
        (arguments.replay_of or arguments.folder / "run").resolve(),
        updates=arguments.updates,
        steps=arguments.steps,
    )
    print(json.dumps(result, indent=1))
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
