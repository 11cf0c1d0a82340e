"""Finished attempts as records for statistics, read from trajectories or from their Parquet columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.data.attempt_facts import num_tool_calls
from agentrl.data.parquet_files import check_seal, open_parquet, reading_parquet
from agentrl.data.trajectories import WHAT, check_schema, decode
from agentrl.errors import DataError
from agentrl.types import SCORED_OUTCOMES, Outcome, Trajectory

ATTEMPTS = "attempts.parquet"
"""Name of the file with all attempts, in the folder of an evaluation."""

_ROWS_AT_ONCE = 1024

_DIFFICULTY_KEYS = ("difficulty", "level")
"""Keys of `extra_info` that data sets use for the difficulty. MATH uses `level`."""


@dataclass(frozen=True, slots=True)
class EvaluatedAttempt:
    """One finished attempt at one problem, as a record for statistics."""

    source: str  # data_source
    problem: str  # task_id; shared by all attempts at the problem
    member: int  # 0..n-1
    # Unshaped, in [0, 1]; None: not scored (an infrastructure failure is never a wrong answer)
    accuracy: float | None
    reward: float | None  # weighted sum of the rewards; None: not scored
    answer: str | None  # canonical text of the final answer, for majority votes; None: no answer found
    format: float | None
    is_truncated: bool
    num_tokens: int  # sampled tokens
    num_turns: int
    num_tool_calls: int
    num_tool_errors: int
    failure: str | None  # why there is no score; None: there is one
    difficulty: str | None  # extra_info.difficulty or .level, as text
    agent: str


def attempt_of(trajectory: Trajectory) -> EvaluatedAttempt:
    """Return the record of a trajectory.

    If the reward reports no accuracy, a positive reward counts as right. An attempt that failed, or that no
    reward has scored, has neither accuracy nor reward.
    """
    failure = _failure(trajectory)
    own = None if failure is not None else _own_reward(trajectory)
    accuracy = trajectory.metrics.get("accuracy", float(trajectory.reward > 0))
    return EvaluatedAttempt(
        source=trajectory.data_source,
        problem=trajectory.task_id,
        member=trajectory.member,
        accuracy=None if failure is not None else float(accuracy),
        reward=None if failure is not None else trajectory.reward,
        answer=None if failure is not None else _answer(trajectory),
        format=None if own is None else trajectory.metrics.get(f"reward/{own}/format"),
        is_truncated=trajectory.outcome is Outcome.TRUNCATED,
        num_tokens=trajectory.num_action_tokens,
        num_turns=int(trajectory.turn_ids.max(initial=-1)) + 1,
        num_tool_calls=num_tool_calls(trajectory),
        num_tool_errors=int(trajectory.metrics.get("num_tool_errors", 0)),
        failure=failure,
        difficulty=next(
            (
                str(trajectory.extra_info[key])
                for key in _DIFFICULTY_KEYS
                if trajectory.extra_info.get(key) is not None
            ),
            None,
        ),
        agent=trajectory.agent_name,
    )


def attempts_of(table: pa.Table | pa.RecordBatch) -> list[EvaluatedAttempt]:
    """Return the records of a table with at least the columns of `agentrl.data.trajectories.SCHEMA`."""
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    return [attempt_of(trajectory) for batch in batches for trajectory in decode(batch)]


def read_attempts(path: Path) -> list[EvaluatedAttempt]:
    """Read the attempts of one evaluation.

    `path` is a Parquet file, or a folder. In a folder, `attempts.parquet` is read, or else all other Parquet
    files.

    Raises:
        DataError: there is no such file or folder, the folder has no Parquet file, a file contains no
            trajectories, or an attempt occurs twice.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    files = [path]
    if path.is_dir():
        files = [path / ATTEMPTS] if (path / ATTEMPTS).exists() else sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(
            f"{path}: no *.parquet in this folder; give the folder of an evaluation, or one of its files"
        )
    attempts = []
    for file in files:
        with reading_parquet(file, WHAT):
            attempts += [attempt for batch in _batches(file) for attempt in attempts_of(batch)]
    seen: set[tuple[str, str, int]] = set()
    for attempt in attempts:
        key = (attempt.source, attempt.problem, attempt.member)
        if key in seen:
            raise DataError(
                f"{path}: attempt {attempt.member} at problem {attempt.problem!r} occurs twice; give the "
                "file of one evaluation"
            )
        seen.add(key)
    return attempts


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Yield a file in batches: the tokens of a whole evaluation may take gigabytes."""
    with reading_parquet(file, WHAT):
        check_seal(file, whole=True)
        with open_parquet(file, WHAT) as parquet:
            check_schema(parquet.schema_arrow, str(file))
            yield from parquet.iter_batches(batch_size=_ROWS_AT_ONCE)


def _failure(trajectory: Trajectory) -> str | None:
    if trajectory.outcome not in SCORED_OUTCOMES:
        return trajectory.outcome.value if trajectory.failure is None else str(trajectory.failure)
    is_scored = bool(trajectory.rewards) or any(
        name == "accuracy" or name.startswith("reward/") for name in trajectory.metrics
    )
    return None if is_scored else "not scored by any reward"


def _own_reward(trajectory: Trajectory) -> str | None:
    """Return the name of the task's own reward, which scoring records before all other terms."""
    names = (name.split("/") for name in trajectory.metrics if name.startswith("reward/"))
    return next((parts[1] for parts in names if len(parts) == 3 and parts[2] in ("accuracy", "format")), None)


def _answer(trajectory: Trajectory) -> str | None:
    """Return the answer that a reward reports in its details, as text; None if no reward reports one."""
    details: Mapping[str, Mapping[str, Any]] = trajectory.extra_info.get("reward_details") or {}
    found = next((reported["answer"] for reported in details.values() if "answer" in reported), None)
    return found if found is None or isinstance(found, str) else json.dumps(found, sort_keys=True)
