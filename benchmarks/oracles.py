"""Records what a change of the house must leave as it is, and compares it afterwards, on one machine.

    python benchmarks/oracles.py record FOLDER     short runs, and what this code computes of them
    python benchmarks/oracles.py check FOLDER      computes it again; prints each difference, exit status 1

Of each run (on-policy; with a critic, an adapter, experts, images, two ranks): the losses, gradient norms and
the weights' hash of its replay, bit for bit, and what the audit says of its journal and files. Besides them
the help of all commands, the reference of the config, and the names of all tests.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from machine import ROOT, facts, write_whole

ARITHMETIC = ("configs/quickstart.yaml", "data.train_files=[{data}/train.parquet]", "data.val_files=[]")
SQUARES = ("examples/squares.yaml", "data.train_files=[{squares}/data/train.parquet]", "data.val_files=[]")
CASES: dict[str, tuple[str, ...]] = {
    "plain": (*ARITHMETIC, "model.path={plain}", "trainer.steps=10"),
    "critic": (*ARITHMETIC, "model.path={plain}", "algorithm.advantage=gae", "critic.optimizer.lr=1e-5"),
    "adapter": (*ARITHMETIC, "model.path={plain}", "model.lora.rank=8"),
    "experts": (*ARITHMETIC, "model.path={experts}"),
    "images": (*SQUARES, "model.path={squares}/model"),
    "ranks": (*ARITHMETIC, "model.path={plain}", "learner.world_size=2"),
}
COMMON = (
    "buffer.max_staleness=0",
    "buffer.groups_per_step=4",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
)
STEPS = "trainer.steps=3"
WARM_UP = ("trainer.steps=20", "trainer.batch_size=32")
LONGEST_S = 1200
CLOCKS = re.compile(r"^(time|idle)/|^wall_s$|_s$|per_s|memory|rss|/gib|compute/|tokens_per")
"""Metrics that no two runs share."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    file = folder / "oracles.json"
    if args.action == "record":
        for case in args.cases:
            _train(case, folder)
        write_whole(file, {**facts(), "observed": dict(_observed(folder, args.cases))})
        return 0
    before = json.loads(file.read_text())["observed"]
    differences = [*_differences(before, dict(_observed(folder, args.cases)))]
    print("\n".join(differences) or "all oracles are equal")
    return int(bool(differences))


def _train(case: str, folder: Path) -> None:
    if (folder / case / "run" / "result.json").exists():
        return
    places = _prepare(folder)
    config, *own = (word.format(**places) for word in CASES[case])
    _agentrl("train", config, f"trainer.run_dir={folder / case / 'run'}", *COMMON, STEPS, *own)


def _prepare(folder: Path) -> dict[str, Path]:
    """Write data and small models, once; return where they are."""
    places = {name: folder / "given" / name for name in ("data", "plain", "experts", "squares")}
    if not places["data"].exists():
        _agentrl("data", "arithmetic", str(places["data"]))
    for name, config in (("plain", "quickstart_sft"), ("experts", "quickstart_experts_sft")):
        if not places[name].exists():
            data = f"data.train_files=[{places['data']}/sft.parquet]"
            out = (f"trainer.output={places[name]}", "trainer.untrained_output=null")
            _agentrl("sft", f"configs/{config}.yaml", data, *out, *WARM_UP)
    if not places["squares"].exists():
        subprocess.run([sys.executable, "examples/squares.py", str(places["squares"])], cwd=ROOT, check=True)
    return places


def _observed(folder: Path, cases: Sequence[str]) -> Iterator[tuple[str, object]]:
    for case in cases:
        with tempfile.TemporaryDirectory() as place:
            _agentrl("replay", str(folder / case / "run"), "--out", place)
            yield (
                f"weights of {case}",
                json.loads((Path(place) / "result.json").read_text())["weights_sha256"],
            )
            lines = (Path(place) / "metrics.jsonl").read_text().splitlines()
            yield f"steps of {case}", [_step(json.loads(line)) for line in lines]
        yield f"audit of {case}", _agentrl("audit", str(folder / case / "run"))
    yield from _helps(("agentrl",), _commands())
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "config.md"
        subprocess.run(
            [sys.executable, "-m", "agentrl.extras.plan.config_reference", str(file)], cwd=ROOT, check=True
        )
        yield "config", file.read_text()
    yield "tests", _tests()


def _step(record: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in record.items() if not CLOCKS.search(name) and name != "crc"}


def _commands() -> typer.core.TyperGroup:
    from agentrl.cli.app import app

    return typer.main.get_command(app)  # type: ignore[return-value]


def _helps(path: Sequence[str], command: object) -> Iterator[tuple[str, str]]:
    """Yield the help of a command and of those below it."""
    yield f"help of {' '.join(path)}", _agentrl(*path[1:], "--help")
    for name in sorted(getattr(command, "commands", {})):
        yield from _helps((*path, name), command.commands[name])  # type: ignore[attr-defined]


def _tests() -> list[str]:
    """Return the names of all tests without their folders, which may move."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=LONGEST_S)
    return sorted(line.rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line)


def _agentrl(*words: str) -> str:
    """Run a command of this checkout; return what it prints."""
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    if done.returncode:
        raise SystemExit(f"agentrl {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def _differences(before: dict[str, object], after: dict[str, object]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        old, new = (_lines(found.get(name)) for found in (before, after))
        yield f"{name}:"
        yield from (f"  {line}" for line in difflib.unified_diff(old, new, "before", "after", "", "", 0, ""))


def _lines(value: object) -> list[str]:
    if isinstance(value, list):
        return [json.dumps(one, sort_keys=True) if not isinstance(one, str) else one for one in value]
    return str(value).splitlines()


if __name__ == "__main__":
    sys.exit(main())
