"""The replay buffer under many rollout actors that wait for leases: cost of `add`, `take` and a publish.

    python benchmarks/buffer_waits.py --out runs/bench/buffer_waits.json

One process with the real buffer and its journal on disk. A thread per owner holds its share of all groups
that the staleness bound admits and waits for more, as a rollout actor does. Eight threads add the
trajectories of one batch, one per call, in random order; the first NUM_PACED come one by one with pauses, in
which all that they wake runs to its end. Then the batch is taken, published and settled, and the owners lease
again.

CPU seconds are those of the whole process, so they include the waiting threads that a call wakes up.
"""

from __future__ import annotations

import argparse
import math
import queue
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from machine import write_result

from agentrl.buffer.audit import audit
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.records import Records
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.types import Message, Outcome, RewardEvent, Task, Trajectory

NUM_ADDERS = 8
"""Calls that the buffer's actor runs at the same time."""
POLL_S = 5.0
NUM_PACED = 100
PAUSE_S = 0.1
SETTLED_S = 0.2
"""Without a new lease for this long, all owners wait."""


@dataclass(frozen=True)
class Figures:
    """Means over the steps. `*_cpu_ms`: of the whole process per call; `*_ms`: wall time of a call."""

    actors: int
    groups: int
    leased: int
    tokens: int
    paced_add_cpu_ms: float
    add_cpu_ms: float
    add_median_ms: float
    add_p99_ms: float
    take_cpu_s: float
    take_s: float
    publish_cpu_s: float
    lost: int


class Tasks:
    def task(self, position: int) -> Task:
        return Task(f"t:{position}", "arithmetic", (Message("user", "1 + 1"),), "tool_agent")


class Owners:
    """A thread per owner, which leases `limit` groups at a time while the buffer is open."""

    def __init__(self, buffer: ReplayBuffer, num_owners: int, limit: int) -> None:
        self.leased: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._buffer, self._limit = buffer, limit
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(f"rollout-{i}",)) for i in range(num_owners)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, owner: str) -> None:
        while not self._stopping.is_set():
            for lease in self._buffer.lease(owner, self._limit, POLL_S):
                self.leased.put((owner, lease.group_id))

    def until_all_wait(self, num_groups: int) -> list[tuple[str, int]]:
        """Return `num_groups` leases once nobody leases any more."""
        found = [self.leased.get(timeout=60.0) for _ in range(num_groups)]
        time.sleep(SETTLED_S)
        assert self.leased.empty(), "more groups were leased than the bound admits"
        return found

    def stop(self) -> None:
        self._stopping.set()
        self._buffer.close()
        for thread in self._threads:
            thread.join()


def attempt(files: AttemptFiles, group_id: int, member: int, version: int, tokens: int) -> AttemptFacts:
    """Return the facts of one trajectory, which is written to a file."""
    action = np.arange(tokens) >= tokens // 2
    played = Trajectory(
        group_id,
        member,
        f"t:{group_id}",
        "arithmetic",
        "tool_agent",
        np.arange(tokens, dtype=np.int32),
        action,
        np.where(action, -1.0, 0.0).astype(np.float32),
        np.where(action, version, -1).astype(np.int32),
        np.where(action, 0, -1).astype(np.int16),
        (Message("user", "1 + 1"), Message("assistant", "2")),
        (RewardEvent("exact", float(member % 2), tokens - 1),),
        Outcome.COMPLETED,
    )
    [ref] = files.write([played])
    return AttemptFacts.of(played, ref)


def measure(
    folder: Path, *, actors: int, groups: int, group_size: int, staleness: int, tokens: int, steps: int
) -> Figures:
    rules = LedgerRules(groups_per_step=groups, max_staleness=staleness, group_size=group_size)
    buffer = ReplayBuffer(
        Tasks(), rules, folder / FOLDER, lease_timeout_s=3600.0, journal=Journal(folder / FILE)
    )
    buffer.advance(0, 0)
    num_leased = (staleness + 1) * groups
    owners = Owners(buffer, actors, limit=math.ceil(num_leased / actors))
    paced_cpu_s = add_cpu_s = take_cpu_s = take_s = publish_cpu_s = 0.0
    times_ms: list[float] = []
    try:
        held = owners.until_all_wait(num_leased)
        for step in range(1, steps + 1):
            batch, held = held[:groups], held[groups:]
            paced, rest = add_all(
                buffer,
                AttemptFiles(folder / FOLDER, is_synced=False),
                batch,
                group_size,
                step - 1,
                tokens,
                times_ms,
            )
            paced_cpu_s += paced
            add_cpu_s += rest
            started, cpu = time.perf_counter(), time.process_time()
            taken = buffer.take(groups, POLL_S, step)
            assert taken is not None
            take_s += time.perf_counter() - started
            take_cpu_s += time.process_time() - cpu
            cpu = time.process_time()
            buffer.advance(step, step)
            buffer.settle(step)
            held += owners.until_all_wait(groups)
            publish_cpu_s += time.process_time() - cpu
        counts = buffer.counts()
    finally:
        owners.stop()
    with Records.open(folder / FILE) as records:
        found = audit(records.events(), max_staleness=staleness)
    assert found.is_balanced, found.problems
    lost = counts.drawn - counts.leased - counts.ready - counts.consumed + len(held) - counts.leased
    adds = steps * groups * group_size
    return Figures(
        actors,
        groups,
        num_leased,
        tokens,
        1000 * paced_cpu_s / (steps * NUM_PACED),
        1000 * add_cpu_s / (adds - steps * NUM_PACED),
        float(np.median(times_ms)),
        float(np.quantile(times_ms, 0.99)),
        take_cpu_s / steps,
        take_s / steps,
        publish_cpu_s / steps,
        lost,
    )


def add_all(
    buffer: ReplayBuffer,
    files: AttemptFiles,
    batch: Sequence[tuple[str, int]],
    group_size: int,
    version: int,
    tokens: int,
    times_ms: list[float],
) -> tuple[float, float]:
    """Add all members of `batch` in random order; return the CPU seconds of the process, paced and not."""
    calls = [
        (owner, [attempt(files, group_id, member, version, tokens)])
        for owner, group_id in batch
        for member in range(group_size)
    ]
    random.Random(0).shuffle(calls)

    def add(call: tuple[str, list[AttemptFacts]]) -> float:
        started = time.perf_counter()
        buffer.add(*call)
        return 1000 * (time.perf_counter() - started)

    start = time.process_time()
    for call in calls[:NUM_PACED]:
        add(call)
        time.sleep(PAUSE_S)
    paced_cpu_s = time.process_time() - start
    with ThreadPoolExecutor(NUM_ADDERS) as pool:
        times_ms.extend(pool.map(add, calls[NUM_PACED:]))
    return paced_cpu_s, time.process_time() - start - paced_cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--groups", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs = []
    for actors in given.actors:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(
                Path(folder),
                actors=actors,
                groups=given.groups,
                group_size=given.group_size,
                staleness=given.staleness,
                tokens=given.tokens,
                steps=given.steps,
            )
        runs.append(asdict(figures))
        print(", ".join(f"{name} {value:.4g}" for name, value in runs[-1].items()), flush=True)
    write_result(given.out, {"cases": runs})


if __name__ == "__main__":
    main()
