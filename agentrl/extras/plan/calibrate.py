"""`calibrate`: the section `simulation` of a run that was recorded, from its metrics and stored trajectories.

Lengths, turns and latencies are those of its attempts; the speed of servers and ranks is what they reached.
So a change of the schedule can be simulated (more servers, another bound on staleness), but not one of the
model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.data.trajectories import decode, read_parquet
from agentrl.errors import DataError
from agentrl.extras.plan.samples import ObservedNumbers
from agentrl.servers.pace import PACE_SUMS
from agentrl.tracking.metrics import StepRecord, read_metrics
from agentrl.types import Trajectory

_MOST_ATTEMPTS = 50_000
"""About how many attempts are read. A step has few tasks, so many of them tell more."""
_STEEPEST = 0.99
"""Largest share of a token's time that running requests explain: one alone must take some time."""
_ROUNDING = 1e-9
_NEEDED = ("time/step_s", "time/update_s", "rollout/action_tokens/mean", "rollout/trajectories")
"""Metrics without which the learner has no speed."""
_WARMUP = 2
"""First steps that are left out if there are enough others: compilers, caches, an empty pipeline."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The config of a run with what it reached as its section `simulation`.

    step_s: mean seconds of a recorded step. num_steps, num_attempts: that were read.
    num_left_out: attempts with several segments, or that failed.
    """

    config: Config
    step_s: float
    num_steps: int
    num_attempts: int
    num_left_out: int


@dataclass(slots=True)
class _Attempts:
    """What attempts did: numbers per attempt, per turn, or per pause between turns, and sums."""

    prompts: ObservedNumbers = field(default_factory=ObservedNumbers)
    turns: ObservedNumbers = field(default_factory=ObservedNumbers)
    turn_tokens: ObservedNumbers = field(default_factory=ObservedNumbers)
    tool_tokens: ObservedNumbers = field(default_factory=ObservedNumbers)
    tool_s: ObservedNumbers = field(default_factory=ObservedNumbers)
    generate_s: float = 0.0
    sampled: int = 0
    num_scored: int = 0
    num_passed: int = 0
    num_read: int = 0
    num_left_out: int = 0
    num_tools: int = 0
    num_tool_timeouts: float = 0.0

    def add(self, attempt: Trajectory) -> None:
        own = attempt.metrics
        self.num_tool_timeouts += own.get("num_tool_timeouts", 0.0)
        if attempt.failure is not None or len(attempt.segment_starts) != 1 or not attempt.action_mask.any():
            self.num_left_out += 1
            return
        actions = np.flatnonzero(attempt.action_mask)
        ids = attempt.turn_ids[actions]
        firsts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
        lengths = np.diff(np.append(firsts, len(ids)))
        between = actions[firsts[1:]] - actions[firsts[1:] - 1] - 1
        group = attempt.group_id
        self.prompts.add(group, [int(actions[0])])
        self.turns.add(group, [len(lengths)])
        self.turn_tokens.add(group, lengths.tolist())
        if len(between):
            self.tool_tokens.add(group, between.tolist())
            waited = sum(own.get(f"{name}_s", 0.0) for name in ("tool", "interaction", "opponent"))
            self.tool_s.add(group, [waited / len(between)] * len(between))
        self.generate_s += own.get("generate_s", 0.0)
        self.sampled += len(actions)
        self.num_read += 1
        self.num_scored += bool(attempt.rewards)
        self.num_passed += sum(event.value for event in attempt.rewards) > 0
        self.num_tools += len(between)


def calibrate(folder: Path) -> Calibrated:
    """Return the calibrated config of the run in `folder`.

    Raises:
        DataError: it is no folder of a run, or it has no steps or no trajectories.
        ConfigError: its config is not one of this version.
    """
    records = _steps(folder)
    files = sorted((folder / "trajectories").glob("step_*.parquet"))
    if not files:
        raise DataError(
            f"{folder} has no trajectories/step_*.parquet, which say what attempts did; record a run with "
            "trainer.keep_trajectories=true"
        )
    observed = _Attempts()
    for file in _spread(files, records):
        for attempt in decode(read_parquet(file)):
            observed.add(attempt)
    if not observed.num_read or not observed.generate_s:
        raise DataError(f"{folder}/trajectories: no attempt was finished, so nothing can be taken from them")
    config = load_config(str(folder / "config.yaml"))
    section = _section(config, observed, records)
    merged = {**config.model_dump(mode="json"), "simulation": section}
    return Calibrated(
        Config.model_validate(merged),
        _mean(records, "time/step_s"),
        len(records),
        observed.num_read,
        observed.num_left_out,
    )


def _spread(files: Sequence[Path], records: Sequence[StepRecord]) -> Sequence[Path]:
    """Return files at equal distances with about `_MOST_ATTEMPTS` attempts, at least one."""
    most = max(1.0, _MOST_ATTEMPTS / max(1.0, _mean(records, "rollout/trajectories")))
    return files[:: math.ceil(len(files) / most)]


def _steps(folder: Path) -> list[StepRecord]:
    path = folder / "metrics.jsonl"
    if not path.is_file() or not (folder / "config.yaml").is_file():
        raise DataError(
            f"{str(folder)!r} is not the folder of a training run: it lacks metrics.jsonl or config.yaml"
        )
    records = [record for record in read_metrics(path) if record.kind == "train"]
    if not records:
        raise DataError(f"{path} has no step of a training; calibrate with a run that made some")
    for name in _NEEDED:
        if not any(record.values.get(name, 0.0) > 0 for record in records):
            raise DataError(
                f"{path} has no {name} above 0 in any step; calibrate with a run that recorded it"
            )
    return records[_WARMUP:] if len(records) > 2 * _WARMUP else records


def _section(config: Config, observed: _Attempts, records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the section `simulation`."""
    kept = config.simulation.model_dump(mode="json")
    busy_s = sum(_mean(records, f"time/{name}_s") for name in ("score", "update"))
    sampled = _mean(records, "rollout/action_tokens/mean") * _mean(records, "rollout/trajectories")
    driver_s = sum(_mean(records, f"time/{name}_s") for name in ("assess", "credit"))
    total = sampled * _tokens_per_sampled(observed)
    servers = max(1, config.rollout.num_started)
    # Attempts wait for a server while a publish pauses it; that is no sampling.
    paused = min(0.9, _mean(records, "time/publish_s") / max(1e-9, _mean(records, "time/step_s")))
    mean_s = (1 - paused) * observed.generate_s / observed.sampled
    capacity = config.rollout.num_actors * config.rollout.max_concurrent_trajectories
    return {
        **kept,
        "steps": max(4, min(20, len(records))),
        "prompt_tokens": observed.prompts.distribution(),
        "turns": observed.turns.distribution(),
        "turn_tokens": observed.turn_tokens.distribution(),
        "tool_tokens": observed.tool_tokens.distribution(),
        "tool_s": observed.tool_s.distribution(),
        "tool_hang": min(1.0, observed.num_tool_timeouts / max(1, observed.num_tools)),
        "pass_rate": observed.num_passed / max(1, observed.num_scored),
        "publish_s": _mean(records, "time/publish_s"),
        # Bytes are in publish_s, which was measured.
        "disk_gb_s": 1e9,
        "network_gb_s": 1e9,
        "server": {
            **kept["server"],
            **_pace(records, mean_s=mean_s, num_actors=config.rollout.num_actors),
            "max_running": max(1, -(-capacity // servers)),
        },
        "learner": {
            **kept["learner"],
            "tokens_per_s": sampled / max(1e-9, busy_s),
            "driver_us_per_token": 1e6 * driver_s / max(1.0, total),
        },
    }


def _pace(records: Sequence[StepRecord], *, mean_s: float, num_actors: int) -> dict[str, float]:
    """Return the seconds of a token with no other request, and what each running request adds to them.

    The line of least squares through the seconds of a token over the requests that ran meanwhile (see
    `agentrl.servers.pace`), scaled to their mean `mean_s`. Every actor counts only its own requests, and has
    as many as the others. A line that falls, or that is negative without requests, is cut; requests that were
    always as many, and runs without these metrics, tell nothing about its slope: it is 0.
    """
    tokens, running, squared, seconds, crossed = (
        math.fsum(record.values.get(f"pace/{name}", 0.0) for record in records) for name in PACE_SUMS
    )
    spread = tokens * squared - running**2
    if not seconds or spread <= _ROUNDING * running**2:
        return {"seconds_per_token": mean_s, "seconds_per_running": 0.0}
    slope = (tokens * crossed - running * seconds) / spread
    share = min(
        _STEEPEST, max(0.0, slope * running / seconds)
    )  # of the mean, that is due to running requests
    per_running = share * mean_s * tokens / running
    return {
        "seconds_per_token": (1 - share) * mean_s,
        "seconds_per_running": per_running / num_actors,
    }


def _tokens_per_sampled(observed: _Attempts) -> float:
    """Return all tokens of attempts per sampled one."""
    others = sum(observed.prompts.values) + sum(observed.tool_tokens.values)
    return (others + observed.sampled) / observed.sampled


def _mean(records: Sequence[StepRecord], name: str) -> float:
    """Return the mean of a metric; steps in which it was not defined do not count."""
    values = [record.values.get(name, 0.0) for record in records]
    return statistics.mean([value for value in values if math.isfinite(value)] or [0.0])
