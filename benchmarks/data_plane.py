"""What a batch costs the processes that it passes, by its tokens: player, buffer, controller, rank, recorder.

    python benchmarks/data_plane.py --tokens 10 50 268 --out figures.json

The code is that of a run, but without Ray between: what Ray would carry is pickled and unpickled instead, on
both sides' account. Seconds are those of the CPU. The controller has a process of its own
(`controller_process.py`), once for each of `--modes`. A batch has attempts of 32,768 tokens, half of them
sampled, in groups of 8, with `max_lag`, for 64 ranks.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from controller_process import ALGORITHMS, run_controller
from machine import write_result

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.cluster.recorder import write_attempts
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.data.token_columns import column_folder
from agentrl.learner.sample_refs import loaded
from agentrl.types import Message, Outcome, RewardEvent, Task, Trajectory

R = TypeVar("R")
GROUP_SIZE = 8
TURNS = 4
RECORDED_SHARE = 16
"""One attempt in as many is recorded."""


@dataclass(frozen=True, slots=True)
class Figures:
    """CPU seconds for a batch."""

    tokens: int
    attempts: int
    play_s: float
    buffer_add_s: float
    buffer_take_s: float
    facts_bytes: int
    record_s: float
    buffer_us_per_token: float
    controller: dict[str, ControllerFigures]


@dataclass(frozen=True, slots=True)
class ControllerFigures:
    """CPU seconds of the controller in one mode, and of all ranks that load what it planned.

    peak_mib: growth of the controller's peak memory while it handles the batch.
    """

    cpu_s: float
    us_per_token: float
    peak_mib: float
    plan_bytes: int
    rank_load_s: float


class Tasks:
    """Endlessly the same task."""

    def task(self, position: int) -> Task:
        return Task(f"t:{position}", "bench", (Message("user", "?"),), "tool_agent")


class Clock:
    """CPU seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, part: str, call: Callable[[], R]) -> R:
        start = time.process_time()
        result = call()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start
        return result


def trajectory(group_id: int, member: int, num_tokens: int, rng: np.random.Generator) -> Trajectory:
    turns = np.repeat(np.arange(2 * TURNS), num_tokens // (2 * TURNS)).astype(np.int16)
    is_action = turns % 2 == 1
    turn_ids = np.where(is_action, turns // 2, -1).astype(np.int16)
    size = len(turns)
    return Trajectory(
        group_id,
        member,
        f"t:{group_id}",
        "bench",
        "tool_agent",
        rng.integers(0, 150_000, size, dtype=np.int32),
        is_action,
        np.where(is_action, rng.normal(-0.5, 0.3, size), 0.0).astype(np.float32),
        np.where(is_action, 0, -1).astype(np.int32),
        turn_ids,
        (Message("user", "?"), Message("assistant", "x" * 2 * num_tokens)),
        (RewardEvent("exact", float(rng.integers(0, 2)), size - 1),),
        Outcome.COMPLETED,
        metrics={"num_tool_calls": 3.0, "accuracy": 1.0, "generate_s": 1.0, "tool_s": 0.5},
    )


def carried(value: Any) -> Any:
    """Return what arrives of `value` in another process."""
    return pickle.loads(pickle.dumps(value, protocol=5))


def measure(folder: Path, *, num_tokens: int, attempt_tokens: int, modes: Sequence[str]) -> Figures:
    num_groups = max(1, num_tokens // attempt_tokens // GROUP_SIZE)
    clock, rng = Clock(), np.random.default_rng(0)
    rules = LedgerRules(groups_per_step=num_groups, max_staleness=1, group_size=GROUP_SIZE)
    buffer = ReplayBuffer(Tasks(), rules, folder / FOLDER, journal=Journal(folder / FILE))
    buffer.advance(0, 0)
    files = AttemptFiles(folder / FOLDER, is_synced=False)
    for lease in buffer.lease("a", num_groups, 0.0):
        for member in range(GROUP_SIZE):
            played = trajectory(lease.group_id, member, attempt_tokens, rng)
            facts = clock.of("play", lambda played=played: facts_of(files, played))
            clock.of("add", lambda facts=facts: buffer.add("a", carried(facts)))
    taken = clock.of("take", lambda: buffer.take(num_groups, 0.0, 1))
    assert taken is not None
    message = clock.of("take", lambda: pickle.dumps(taken, protocol=5))
    total = num_groups * GROUP_SIZE * attempt_tokens
    controlled = {mode: control(mode, message, folder, total) for mode in modes}
    attempts = pickle.loads(message)[::RECORDED_SHARE]
    columns = {"step": 1, "learned_by": 0}
    clock.of("record", lambda: write_attempts(folder / "step.parquet", attempts, columns))
    buffer.close()
    s = clock.seconds
    buffer_s = s["add"] + s["take"]
    return Figures(
        tokens=total,
        attempts=num_groups * GROUP_SIZE,
        play_s=s["play"],
        buffer_add_s=s["add"],
        buffer_take_s=s["take"],
        facts_bytes=len(message),
        record_s=s["record"] * num_groups * GROUP_SIZE / len(attempts),
        buffer_us_per_token=1e6 * buffer_s / total,
        controller=controlled,
    )


def control(mode: str, message: bytes, folder: Path, num_tokens: int) -> ControllerFigures:
    """Let the controller handle a batch, and a rank load what it gets."""
    with column_folder(folder / "columns") as columns:
        done = run_controller(mode, message, Path(columns), group_size=GROUP_SIZE)
        clock = Clock()
        mine = pickle.loads(done.first_message)
        microbatches = clock.of("load", lambda: loaded(mine))
    return ControllerFigures(
        cpu_s=done.cpu_s,
        us_per_token=1e6 * done.cpu_s / num_tokens,
        peak_mib=done.peak_mib,
        plan_bytes=done.plan_bytes,
        rank_load_s=clock.seconds["load"] * num_tokens / sum(m.num_tokens for m in microbatches),
    )


def facts_of(files: AttemptFiles, played: Trajectory) -> list[AttemptFacts]:
    [ref] = files.write([played])
    return [AttemptFacts.of(played, ref)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=float, nargs="+", default=[10.0], help="millions of tokens of a batch"
    )
    parser.add_argument("--modes", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--attempt-tokens", type=int, default=32_768)
    parser.add_argument("--folder", type=Path, help="where the batch is written, default: a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = []
    for millions in sorted(args.tokens):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            figures = measure(
                Path(name),
                num_tokens=round(1e6 * millions),
                attempt_tokens=args.attempt_tokens,
                modes=args.modes,
            )
        found.append(asdict(figures))
        print(json.dumps(found[-1], indent=1), flush=True)
    write_result(args.out, {"batches": found})


if __name__ == "__main__":
    main()
