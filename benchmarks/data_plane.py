"""What a batch costs the processes that it passes, by its tokens: player, buffer, controller, rank, recorder.

    python benchmarks/data_plane.py --tokens 10 50 268 --out docs/results/data_plane.json

One process stands for each of them in turn, with the code of a run but without Ray between: what Ray would
carry is pickled and unpickled instead, on both sides' account. Seconds are those of the CPU. A batch has
attempts of 32,768 tokens, half of them sampled, in groups of 8, GRPO with `max_lag`, 64 ranks.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from machine import write_result

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.controller.credit import (
    credit,
    group_attempts,
    leave_out_masked,
    leave_out_old,
    split_minibatches,
    with_reward,
)
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.figures.trajectory_metrics import summarise_attempts
from agentrl.fleet.recorder import write_attempts
from agentrl.learner.packing import plan_microbatches
from agentrl.learner.sample_refs import loaded, planned
from agentrl.types import Message, Outcome, RewardEvent, Task, Trajectory

R = TypeVar("R")
GROUP_SIZE = 8
TURNS = 4
NUM_RANKS = 64
MICROBATCH_TOKENS = 65_536
LOADED_SHARE = 16
"""One rank in LOADED_SHARE of the batch is loaded, and one attempt in as many is recorded."""


@dataclass(frozen=True, slots=True)
class Figures:
    """CPU seconds for a batch. controller_mib: growth of the peak memory while it handles the batch."""

    tokens: int
    attempts: int
    play_s: float
    buffer_add_s: float
    buffer_take_s: float
    controller_s: float
    controller_mib: float
    facts_bytes: int
    plan_bytes: int
    rank_load_s: float
    record_s: float
    controller_us_per_token: float
    buffer_us_per_token: float


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


def measure(folder: Path, *, num_tokens: int, attempt_tokens: int) -> Figures:
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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = clock.of("controller", lambda: controller(message))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    mine = pickle.loads(parts[0])
    microbatches = clock.of("load", lambda: loaded(mine))
    share = sum(m.num_tokens for m in microbatches) / (num_groups * GROUP_SIZE * attempt_tokens)
    attempts = pickle.loads(message)[::LOADED_SHARE]
    columns = {"step": 1, "learned_by": 0}
    clock.of("record", lambda: write_attempts(folder / "step.parquet", attempts, columns))
    buffer.close()
    s, total = clock.seconds, num_groups * GROUP_SIZE * attempt_tokens
    buffer_s = s["add"] + s["take"]
    return Figures(
        tokens=total,
        attempts=num_groups * GROUP_SIZE,
        play_s=s["play"],
        buffer_add_s=s["add"],
        buffer_take_s=s["take"],
        controller_s=s["controller"],
        controller_mib=grown / 1024,
        facts_bytes=len(message),
        plan_bytes=sum(map(len, parts)),
        rank_load_s=s["load"] / share,
        record_s=s["record"] * num_groups * GROUP_SIZE / len(attempts),
        controller_us_per_token=1e6 * s["controller"] / total,
        buffer_us_per_token=1e6 * buffer_s / total,
    )


def facts_of(files: AttemptFiles, played: Trajectory) -> list[AttemptFacts]:
    [ref] = files.write([played])
    return [AttemptFacts.of(played, ref)]


def controller(message: bytes) -> list[bytes]:
    """Do what the controller does with a batch, from the buffer's answer to the message for each rank."""
    groups = group_attempts(pickle.loads(message))
    groups = with_reward(groups)
    samples = credit(groups, AlgorithmConfig(), group_size=GROUP_SIZE)
    samples = leave_out_old(samples, lags=lambda versions: 1 - versions, max_lag=4)
    samples = leave_out_masked(samples, ())
    messages = []
    for minibatch in split_minibatches(samples, num_minibatches=1, rng=np.random.default_rng(0)):
        shards = plan_microbatches(
            [ref.shape for ref in minibatch],
            max_tokens=MICROBATCH_TOKENS,
            world_size=NUM_RANKS,
            shared_prefix=True,
        )
        messages += [pickle.dumps(planned(shard, minibatch), protocol=5) for shard in shards]
    attempts = [t for group in groups for t in group.attempts]
    summarise_attempts(attempts, lags=lambda versions: 1 - versions)
    pickle.dumps(attempts, protocol=5)  # for the recorder
    return messages


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=float, nargs="+", default=[10.0], help="millions of tokens of a batch"
    )
    parser.add_argument("--attempt-tokens", type=int, default=32_768)
    parser.add_argument("--folder", type=Path, help="where the batch is written, default: a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = []
    for millions in sorted(args.tokens):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            figures = measure(
                Path(name), num_tokens=round(1e6 * millions), attempt_tokens=args.attempt_tokens
            )
        found.append(asdict(figures))
        print(", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()), flush=True)
    write_result(args.out, {"batches": found})


if __name__ == "__main__":
    main()
