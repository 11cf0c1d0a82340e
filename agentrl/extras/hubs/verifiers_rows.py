"""Rows of environments of verifiers, as Parquet files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.data.files import write_rows
from agentrl.errors import ConfigError, DataError
from agentrl.extras.datatools.task_rows import row_schema
from agentrl.extras.hubs.process import HubProcess
from agentrl.extras.hubs.verifiers import KEY, VerifiersOptions, program_of
from agentrl.types import JsonObject

UNPROMPTED = "(the environment begins)"
"""In place of a prompt, for tasks that have none: the environment says the first word."""

_TEXT = pa.string()
_WORLD = pa.struct([("name", _TEXT), ("environment", _TEXT), ("arguments", _TEXT), ("task", _TEXT)])
VERIFIERS_SCHEMA = row_schema(("index", pa.int64()), ("split", _TEXT), ("environment_kwargs", _WORLD))


@dataclass(frozen=True, slots=True)
class Chosen:
    """An environment, its arguments, and how many of its tasks become rows: the first `num_val` for
    validation, those after them for training.
    """

    environment: str
    arguments: JsonObject
    num_train: int
    num_val: int


def read_arguments(option: str, text: str) -> JsonObject:
    """Return the JSON object of an option.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option}={text[:80]!r}: should be a JSON object")
    return found


def write_tasks(out: Path, options: VerifiersOptions, chosen: Chosen) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet` into `out`; return the number of rows of each. An environment
    with fewer tasks gives fewer training rows.

    Raises:
        ConfigError: the interpreter does not exist.
        DataError: verifiers refuses the environment, or it has no task for training.
        EnvironmentFailed: the process failed.
    """
    tasks = asyncio.run(_tasks(options, chosen))
    if len(tasks) <= chosen.num_val:
        raise DataError(
            f"environment {chosen.environment!r} has {len(tasks)} tasks, and --val={chosen.num_val} takes "
            "all; lower --val"
        )
    splits = {"train": tasks[chosen.num_val :], "val": tasks[: chosen.num_val]}
    return {
        split: write_rows(out / f"{split}.parquet", _rows(split, part, chosen), VERIFIERS_SCHEMA)
        for split, part in splits.items()
    }


async def _tasks(options: VerifiersOptions, chosen: Chosen) -> list[JsonObject]:
    process = HubProcess(program_of(options))
    asked = {
        "environment": chosen.environment,
        "arguments": chosen.arguments,
        "seat": options.seat,
        "count": chosen.num_val + chosen.num_train,
    }
    try:
        found: list[JsonObject] = await process.call("tasks", asked)
    finally:
        await process.close()
    return found


def _rows(split: str, tasks: list[JsonObject], chosen: Chosen) -> Iterator[dict[str, Any]]:
    for index, task in enumerate(tasks):
        world = {
            "name": KEY,
            "environment": chosen.environment,
            "arguments": json.dumps(chosen.arguments, sort_keys=True),
            "task": json.dumps(task["task"]),
        }
        yield {
            "data_source": f"{KEY}/{chosen.environment}",
            "prompt": task["prompt"] or [{"role": "user", "content": UNPROMPTED}],
            "ability": "environment",
            "reward_model": {"style": "rule", "ground_truth": None},
            "extra_info": {"index": index, "split": split, "environment_kwargs": world},
            "agent_name": KEY,
        }
