"""Restarts of the replay buffer from a journal of many days, with snapshots and without.

    python benchmarks/journal_age.py --out runs/bench/journal_age.json

A run is aged by many small steps, of which every 20th is settled (a checkpoint). What grows with a run's age
are its versions and its archive, not the size of its batches. Then all groups that the bound admits are
leased and played, without a checkpoint, and the buffer is opened again. Without snapshots, a restart reads
every event; its time is measured with fewer steps and is proportional to them.

Also: the cost of one arrival with SQLite's write-ahead log and with a rollback journal.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from buffer_waits import Tasks, attempt
from machine import write_result

from agentrl.buffer import journal as journal_module
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.snapshots import take_snapshot
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.extras.research.audit import audit_run

SMALL = 2
"""Groups of a step that only ages the run."""
SETTLED_EVERY = 20
TOKENS = 16


@dataclass(frozen=True)
class Figures:
    """CPU seconds of the process. events: ever written; stored_events: those in the file before the restart.

    snapshot_s: of computing one at that moment. audit_s: of `agentrl audit`.
    """

    has_snapshots: bool
    steps: int
    groups: int
    events: int
    stored_events: int
    file_mb: float
    restart_s: float
    snapshot_s: float
    audit_s: float


def cpu_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def opened(folder: Path, groups: int, group_size: int, *, has_snapshots: bool) -> ReplayBuffer:
    rules = LedgerRules(groups_per_step=groups, max_staleness=1, group_size=group_size)
    journal = Journal(folder / FILE)
    if journal.is_empty:
        journal.set_fact("max_staleness", "1")
    buffer = ReplayBuffer(Tasks(), rules, folder / FOLDER, journal=journal)
    if not has_snapshots:
        buffer._take_snapshot = lambda: None  # type: ignore[method-assign]
    return buffer


def play(buffer: ReplayBuffer, files: AttemptFiles, num_groups: int, group_size: int, version: int) -> None:
    for lease in buffer.lease("a", num_groups, 0.0):
        for member in range(group_size):
            buffer.add("a", [attempt(files, lease.group_id, member, version, TOKENS)])


def measure(folder: Path, *, steps: int, groups: int, group_size: int, has_snapshots: bool) -> Figures:
    buffer = opened(folder, groups, group_size, has_snapshots=has_snapshots)
    files = AttemptFiles(folder / FOLDER, is_synced=False)
    buffer.advance(0, 0)
    for step in range(1, steps + 1):
        play(buffer, files, SMALL, group_size, step - 1)
        assert buffer.take(SMALL, 0.0, step) is not None
        buffer.advance(step, step)
        if step % SETTLED_EVERY == 0:
            buffer.settle(step)
            buffer.release_batches(step)
    play(buffer, files, 2 * groups, group_size, steps)
    snapshot_s = cpu_s(lambda: take_snapshot(buffer._groups, buffer._audit))
    before, num_events = buffer.counts(), buffer._journal.num_events
    stored = buffer._journal._database.execute("SELECT COUNT(*) FROM events").fetchone()[0]
    buffer._journal.close()
    start = time.process_time()
    again = opened(folder, groups, group_size, has_snapshots=has_snapshots)
    restart_s = time.process_time() - start
    assert again.counts() == before
    again._journal.close()
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
    found = []
    audit_s = cpu_s(lambda: found.append(audit_run(folder)))
    problems = found[0].audit.problems  # there are no other files
    assert not any(problem.startswith(("event", "the archive")) for problem in problems), problems
    return Figures(has_snapshots, steps, groups, num_events, stored, size, restart_s, snapshot_s, audit_s)


def arrival_ms(folder: Path, *, is_shared: bool, num: int) -> float:
    """Return the CPU milliseconds of one arrival of 2,000 tokens."""
    found = journal_module.is_shared
    journal_module.is_shared = lambda path: is_shared
    try:
        buffer = opened(folder, num, 1, has_snapshots=True)
    finally:
        journal_module.is_shared = found
    buffer.advance(0, 0)
    files = AttemptFiles(folder / FOLDER, is_synced=False)
    calls = [[attempt(files, lease.group_id, 0, 0, 2000)] for lease in buffer.lease("a", num, 0.0)]
    return 1000 * cpu_s(lambda: [buffer.add("a", call) for call in calls]) / num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 2000, 20000])
    parser.add_argument("--steps-without", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--groups", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--arrivals", type=int, default=500)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs = []
    for has_snapshots, steps in [
        *((True, s) for s in given.steps),
        *((False, s) for s in given.steps_without),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(
                Path(folder),
                steps=steps,
                groups=given.groups,
                group_size=given.group_size,
                has_snapshots=has_snapshots,
            )
        runs.append(asdict(figures))
        print(", ".join(f"{name} {value:.4g}" for name, value in runs[-1].items()), flush=True)
    modes = {}
    for name, is_shared in (("log", False), ("rollback", True)):
        with tempfile.TemporaryDirectory() as folder:
            modes[name] = arrival_ms(Path(folder), is_shared=is_shared, num=given.arrivals)
        print(f"{name}: {modes[name]:.3g} ms per arrival", flush=True)
    write_result(given.out, {"cases": runs, "arrival_ms": modes})


if __name__ == "__main__":
    main()
