"""Rows of tasks in the layout of tau2-bench, for a domain that is an environment of one's own.

The right database is found here, once: the task's actions are called in a fresh environment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import trio
from pydantic import ValidationError

from agentrl.data.files import write_rows
from agentrl.errors import DataError
from agentrl.extras.datatools.task_rows import row_schema
from agentrl.extras.hubs.tau2 import KEY
from agentrl.extras.hubs.tau2_tasks import Tau2Task
from agentrl.plugins import Environment, WrongCall, environment_tools
from agentrl.plugins.functions import MethodTool
from agentrl.types import JsonObject

OPENING = "Hello."

_TEXT = pa.string()
TAU2_SCHEMA = row_schema(
    *(("index", pa.int64()), ("split", _TEXT), ("id", _TEXT)),
    ("environment_kwargs", pa.struct([("name", _TEXT), ("database", _TEXT)])),
    ("interaction_kwargs", pa.struct([("name", _TEXT), ("persona", _TEXT), ("goal", _TEXT)])),
)


@dataclass(frozen=True, slots=True)
class Domain:
    """What a conversation of a domain is made of.

    Attributes:
        make: makes the environment, with its options of the config.
        policy: the rules that the policy must follow, its system message.
        opening: the first words of each customer.
        partner: name of the interaction that plays the customer.
        persona: who the customer is, of tasks that do not say it.
    """

    make: Callable[[], Environment]
    policy: str
    opening: str = OPENING
    partner: str = "simulated_user"
    persona: str = "You are an ordinary customer."


def write_conversations(
    out: Path, tasks: Sequence[Tau2Task], domain: Domain, *, num_val: int
) -> tuple[dict[str, int], Counter[str]]:
    """Write `train.parquet` and `val.parquet` into `out`: the first `num_val` tasks are for validation.

    Returns:
        The number of rows of each file, and of the tasks that were left out by why.

    Raises:
        DataError: no task is left for training, or the actions of a task cannot be made.
    """
    left_out = Counter(task.unplayable for task in tasks if task.unplayable)
    playable = [task for task in tasks if not task.unplayable]
    if len(playable) <= num_val:
        why = "".join(f"; left out {count}: {reason}" for reason, count in left_out.items())
        raise DataError(
            f"{len(playable)} of {len(tasks)} tasks can be played, and --val={num_val} takes all; lower "
            f"--val, or add tasks{why}"
        )
    splits = {"train": playable[num_val:], "val": playable[:num_val]}
    written = {
        split: write_rows(out / f"{split}.parquet", _rows(split, part, domain), TAU2_SCHEMA)
        for split, part in splits.items()
    }
    return written, left_out


def _rows(split: str, tasks: Sequence[Tau2Task], domain: Domain) -> Iterator[dict[str, Any]]:
    for index, task in enumerate(tasks):
        environment, criteria = domain.make(), task.evaluation_criteria
        assert criteria is not None, "a task without criteria is left out"
        runs = trio.run if environment.runtime == "trio" else _run_asyncio
        kwargs = environment_kwargs(task)
        goal = {
            "database": runs(_database_after, environment, kwargs, task),
            "told": criteria.communicate_info or [],
            "actions": [action.model_dump() for action in criteria.actions or ()],
            "basis": criteria.reward_basis,
        }
        scenario = task.user_scenario
        yield {
            "data_source": f"{KEY}/{environment.name}",
            "prompt": [
                {"role": "system", "content": domain.policy},
                {"role": "user", "content": domain.opening},
            ],
            "ability": "conversation",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(goal, sort_keys=True)},
            "extra_info": {
                "index": index,
                "split": split,
                "id": task.id,
                "environment_kwargs": {"name": environment.name, **kwargs},
                "interaction_kwargs": {
                    "name": domain.partner,
                    "persona": scenario.persona or domain.persona,
                    "goal": str(scenario.instructions),
                },
            },
            "agent_name": "interaction_agent",
        }


def environment_kwargs(task: Tau2Task) -> dict[str, str]:
    """Return what the environment's `start` gets: what differs from the domain's database, as JSON."""
    data = None if task.initial_state is None else task.initial_state.initialization_data
    return {"database": json.dumps((data.agent_data if data is not None else None) or {}, sort_keys=True)}


async def _database_after(environment: Environment, kwargs: dict[str, str], task: Tau2Task) -> Any:
    """Return the environment's fact `database` after the task's actions."""
    await environment.start(**kwargs)
    try:
        for action in (task.evaluation_criteria and task.evaluation_criteria.actions) or ():
            await _called(environment, action.name, action.arguments, f"task {task.id}")
        facts = await environment.facts()
    finally:
        await environment.close()
    if "database" not in facts:
        raise DataError(
            f"environment {environment.name!r}: its facts need `database`, have {', '.join(facts) or 'none'}"
        )
    return facts["database"]


async def _called(environment: Environment, name: str, arguments: JsonObject, place: str) -> None:
    tools = environment_tools(type(environment))
    if name not in tools:
        raise DataError(
            f"{place}: environment {environment.name!r} has no tool {name!r}; it has "
            f"{', '.join(tools) or 'none'}"
        )
    method = cast(type[MethodTool], tools[name])
    try:
        given = method.arguments.model_validate(dict(arguments))
        fields = type(given).model_fields
        values = {str(fields[field].alias): getattr(given, field) for field in given.model_fields_set}
        result = method.function(environment, **values)
        if inspect.isawaitable(result):
            await result
    except (ValidationError, WrongCall) as error:
        why = " ".join(str(error).split())[:300]
        raise DataError(
            f"{place}: the action {name}({json.dumps(arguments)[:200]}) is refused: {why}"
        ) from error


def _run_asyncio(function: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.run(function(*arguments))
