"""Damages each file of a finished run in turn, and lets all readers read the run: none may be silent.

```
python tests/extras/runs/damage.py [RUN] --number 400 --out docs/results/damage.json
```

A damage flips a bit, cuts the end off, removes the file, puts another file of its kind in its place, cuts a
line out, or inserts text. A reader either raises an error of one line, or reads exactly what it reads of the
undamaged run. What it reads may also differ if the audit finds the damage: of a file that is missing, a page
that shows attempts cannot know. Everything else is silent, or a traceback.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.buffer.journal import FILE as JOURNAL
from agentrl.buffer.journal import Journal
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import find_checkpoint, read_checkpoint
from agentrl.controller.run_dir import RunDir
from agentrl.controller.verification import verify_here
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.failures import FILE as FAILURES
from agentrl.data.failures import FailureTable
from agentrl.errors import AgentRLError
from agentrl.extras.research.audit import audit_run
from agentrl.extras.research.replay import load_replay_config
from agentrl.extras.research.stored_steps import StoredSteps
from agentrl.extras.view.app import Pages, to_json
from agentrl.extras.view.run import DAMAGED
from agentrl.extras.view.sources import open_sources
from agentrl.figures.attempts import read_attempts
from agentrl.extras.view.closing import closing_table
from agentrl.tracking.metrics import MetricsFile

ROOT = Path(__file__).parents[3]
DETECTED, EQUAL, DIFFERENT, TRACEBACK = "detected", "equal", "different", "traceback"
NOT_READ = (".lock", "summary.md", "report.png", "readiness.txt", "ledger.sqlite-shm", ".mark")
"""Files that no reader reads, by name."""
NOT_READ_FOLDERS = ("servers", "alarms", "watchdog", "wandb", "tensorboard", "replay")


class Found(Exception):
    """A reader that reports in its own way has found the damage."""


# ---------------------------------------------------------------------------------------------------- readers


def audit(run: Path) -> Any:
    """`agentrl audit`."""
    found = audit_run(run)
    if not found.audit.is_balanced:
        raise Found(found.audit.problems[0])
    return found.lines()


def resume(run: Path) -> Any:
    """What `agentrl train` reads of a run before it goes on."""
    trainer = TrainerConfig(run_dir=str(run))
    checkpoint = find_checkpoint(run / "checkpoints", trainer)
    assert checkpoint is not None
    verify_here(checkpoint, "full", num_threads=1, say=lambda line: None)
    state = json.loads(checkpoint.buffer_state())
    run_dir = _opened(run)
    with tempfile.TemporaryDirectory() as scratch:
        for file in run.glob(f"{JOURNAL}*"):
            shutil.copy(file, scratch)
        shutil.copy(run / "metrics.jsonl", scratch) if (run / "metrics.jsonl").exists() else None
        journal = Journal(Path(scratch) / JOURNAL)
        events = list(journal.numbered_events())
        attempts = [
            AttemptFacts.from_json(data, run / "attempts").load()
            for group_id, owner in journal.plays()
            for data in journal.attempts(group_id, owner).values()
        ]
        journal.close()
        kept = MetricsFile(Path(scratch) / "metrics.jsonl", restored_step=checkpoint.step).kept
    versions = run_dir.next_version(), run_dir.published(), run_dir.read_validations()
    failures = list(FailureTable(run / FAILURES, keeps_earlier=True).earlier())
    return checkpoint.step, checkpoint.version, state, events, attempts, kept, versions, failures


def _opened(run: Path) -> RunDir:
    lock = (run / ".lock").open("a")
    lock.close()
    return RunDir(run, lock, run / "trajectories", run / "validation", None)  # type: ignore[arg-type]


def report(run: Path) -> Any:
    """`agentrl report`, without the picture, which is of the same records."""
    return closing_table(run).to_markdown()


def compare(run: Path) -> Any:
    """`agentrl compare`, which reads files of attempts."""
    return [read_attempts(file) for file in sorted((run / "validation").glob("*.parquet"))]


def replay(run: Path) -> Any:
    """What `agentrl replay` reads: the run's config, and its batches with their versions."""
    config = _config(run, (run / "config.yaml").read_bytes() if (run / "config.yaml").exists() else b"")
    stored = StoredSteps.find(run)
    steps = [stored.read(step) for step in range(1, stored.num_steps + 1)]
    return config, [(s.step, s.learned_by, s.lineage.state(), [g.attempts for g in s.groups]) for s in steps]


@cache
def _config(run: Path, content: bytes) -> Any:
    return load_replay_config(run, out=run.parent / "replay")


def export(run: Path) -> Any:
    """What `agentrl export` verifies of each checkpoint before it reads it."""
    found = []
    for folder in sorted((run / "checkpoints").glob("step_*")):
        checkpoint = read_checkpoint(folder)
        verify_here(checkpoint, "full", num_threads=1, say=lambda line: None)
        found.append((checkpoint.step, checkpoint.version, checkpoint.metric))
    return found


def view(run: Path) -> Any:
    """The answers of `agentrl view` from which its pages are made."""
    pages = Pages(open_sources([run]))
    overview = pages.answer("overview", {})
    if told := [alarm.advice for alarm in overview.alarms if alarm.rule == DAMAGED]:
        raise Found(told[0])
    table = pages.answer("attempts", {"limit": "500"})
    keys = [row["key"] for row in table["rows"] if row["set"] != "failed"]
    shown = [pages.answer(name, {"key": key}) for key in keys[::7] for name in ("attempt", "tokens")]
    return to_json([overview, pages.answer("series", {"names": "rollout/reward_mean"}), table, shown])


READERS: Mapping[str, Callable[[Path], Any]] = {
    one.__name__: one for one in (audit, resume, report, compare, replay, export, view)
}


READS = {
    "resume": (
        "checkpoints/",
        "ledger.sqlite",
        "attempts/",
        "metrics",
        "versions",
        "validations",
        "failures",
    ),
    "report": ("config", "metrics", "validations", "result", "failures"),
    "compare": ("validation/",),
    "replay": ("config", "trajectories/", "versions", "ledger.sqlite"),
    "export": ("checkpoints/",),
    "view": (
        *("config", "trajectories/", "validation", "failures", "metrics", "alarms", "control/", "policy/"),
        *("proximal/", "result"),
    ),
}
"""What each reader reads, by the beginning of names; the audit reads everything."""


def read(reader: Callable[[Path], Any], run: Path) -> tuple[str, str]:
    """Return (DETECTED, the line), (TRACEBACK, the error), or (EQUAL, a hash of what was read)."""
    try:
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
            return EQUAL, hashlib.sha256(repr(reader(run)).encode()).hexdigest()
    except (AgentRLError, Found) as error:
        lines = str(error).strip().splitlines()
        return (DETECTED if len(lines) == 1 else TRACEBACK), str(error)
    except Exception as error:  # noqa: BLE001 - that there is none is what is tested
        return TRACEBACK, f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------------------------------- damages


def flip(file: Path, rng: random.Random, others: list[Path]) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, rng: random.Random, others: list[Path]) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def remove(file: Path, rng: random.Random, others: list[Path]) -> None:
    file.unlink()


def swap(file: Path, rng: random.Random, others: list[Path]) -> None:
    file.write_bytes(rng.choice(others).read_bytes())


def cut_line(file: Path, rng: random.Random, others: list[Path]) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    file.write_bytes(b"".join(lines))


def insert(file: Path, rng: random.Random, others: list[Path]) -> None:
    garbage = rng.choice(
        [b'{"step": [1, {}], "version": 1e999}\n', b"[" * 2000 + b"\n", b"\x00\xff", b"null\n"]
    )
    lines = file.read_bytes().splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), garbage)
    file.write_bytes(b"".join(lines))


DAMAGES = (flip, truncate, remove, swap, cut_line, insert)


def kind_of(name: str) -> str:
    """Return the kind of a file by its name in the run."""
    first, *rest = name.split("/")
    if not rest:
        return "ledger.sqlite-*" if first.startswith("ledger.sqlite-") else first
    return f"{first}/{rest[-1]}" if first in ("checkpoints", "policy") else f"{first}/"


def kinds(run: Path) -> dict[str, list[Path]]:
    """Return the files that readers read, by kind."""
    found: dict[str, list[Path]] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        is_read = path.name not in NOT_READ and name.partition("/")[0] not in NOT_READ_FOLDERS
        if path.is_file() and is_read and path.stat().st_size:
            found.setdefault(kind_of(name), []).append(path)
    return found


def plans(run: Path, number: int, seed: int) -> Iterator[tuple[str, Path, str, partial[None]]]:
    """Yield `number` damages, kinds of files in turn: kind, file, name of the damage, and the damage."""
    rng, files = random.Random(seed), kinds(run)
    for index in range(number):
        kind = list(files)[index % len(files)]
        file = rng.choice(files[kind])
        others = [other for other in files[kind] if other.read_bytes() != file.read_bytes()]
        usable = [one for one in DAMAGES if (others or one is not swap)]
        damage = usable[(index // len(files) + index % len(files)) % len(usable)]
        yield kind, file, damage.__name__, partial(damage, file, rng, others)


@dataclass(frozen=True)
class Outcome:
    """One damage. verdict: detected, harmless (every reader read the same), silent, or traceback."""

    kind: str
    file: str
    damage: str
    verdict: str
    readers: dict[str, str]
    lines: dict[str, str]


def judge(run: Path, number: int, *, seed: int = 0) -> list[Outcome]:
    """Return what became of `number` damages of a finished run, which is copied first."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "run"
        shutil.copytree(run, copy)
        whole = {name: read(reader, copy) for name, reader in READERS.items()}
        assert all(status == EQUAL for status, _ in whole.values()), whole
        return [_one(copy, whole, *plan) for plan in plans(copy, number, seed)]


def _one(
    run: Path, whole: Mapping[str, tuple[str, str]], kind: str, file: Path, name: str, damage: partial[None]
) -> Outcome:
    before = file.read_bytes()
    damage()
    is_same = file.is_file() and file.read_bytes() == before
    kept = str(file.relative_to(run))
    found = {
        reader: read(function, run)
        for reader, function in READERS.items()
        if kept.startswith(READS.get(reader, ""))
    }
    file.write_bytes(before)
    statuses = {
        reader: DIFFERENT if status == EQUAL and what != whole[reader][1] else status
        for reader, (status, what) in found.items()
    }
    lines = {reader: what for reader, (status, what) in found.items() if status in (DETECTED, TRACEBACK)}
    return Outcome(kind, kept, name, _verdict(statuses, is_same), statuses, lines)


def _verdict(statuses: Mapping[str, str], is_same: bool) -> str:
    if TRACEBACK in statuses.values():
        return TRACEBACK
    if DIFFERENT in statuses.values() and statuses["audit"] != DETECTED:
        return "silent"
    return DETECTED if DETECTED in statuses.values() and not is_same else "harmless"


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return counts by verdict, by kind of file, and by reader."""
    table: dict[str, Counter[str]] = {}
    by_reader: dict[str, Counter[str]] = {}
    for one in outcomes:
        table.setdefault(one.kind, Counter()).update([one.verdict])
        for reader, status in one.readers.items():
            by_reader.setdefault(reader, Counter()).update([status])
    return {
        "number": len(outcomes),
        "verdicts": dict(Counter(one.verdict for one in outcomes)),
        "by_damage": {
            damage: dict(Counter(one.verdict for one in outcomes if one.damage == damage))
            for damage in sorted({one.damage for one in outcomes})
        },
        "by_kind": {kind: dict(counts) for kind, counts in sorted(table.items())},
        "by_reader": {reader: dict(counts) for reader, counts in by_reader.items()},
        "bad": [asdict(one) for one in outcomes if one.verdict in ("silent", TRACEBACK)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="default: a small one that is written first")
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]
    with tempfile.TemporaryDirectory() as scratch:
        from parts.written_run import write_whole_run

        run = options.run or write_whole_run(Path(scratch) / "run")
        found = summary(judge(run, options.number, seed=options.seed))
    if options.out is not None:
        from machine import facts

        command = " ".join(["python", "tests/extras/runs/damage.py", *sys.argv[1:]])
        options.out.write_text(json.dumps({**facts(), "command": command, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
