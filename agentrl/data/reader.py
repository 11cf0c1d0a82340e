"""Conversion of a file's rows to tasks, by configured columns or by the user's own function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from agentrl.config.data import DataConfig
from agentrl.data.image_files import ImageFolder
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import plain
from agentrl.data.rows import AgentChoice, Row, read_row
from agentrl.errors import DataError, PluginError
from agentrl.plugins import import_source
from agentrl.types import Task

TaskReader = Callable[[Row, RowPlace], Task]
"""Raises DataError or PluginError with file and row."""


def task_reader(config: DataConfig, agents: AgentChoice, folder: ImageFolder | None = None) -> TaskReader:
    """Return the reader of `data.reader`, else the reader of the configured columns, which stores images in
    `folder`.

    Raises:
        DataError: `data.reader` does not name a function.
    """
    if config.reader is None:
        return lambda row, place: read_row(row, place, config, agents, folder)
    source, function = config.reader, load_function(config.reader)
    return lambda row, place: _read_with(function, source, row, place, agents)


def load_function(source: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function `module:function` or `file.py:function`.

    Raises:
        DataError: the text has another form, or there is no such module or function.
    """
    module_name, _, function_name = source.rpartition(":")
    if not module_name or not function_name:
        raise DataError(f"data.reader={source!r} must have the form module:function or file.py:function")
    try:
        module = import_source(module_name)
    except PluginError as error:
        raise DataError(f"data.reader={source!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise DataError(f"data.reader={source!r}: {module_name} has no function {function_name!r}")
    return function


def _read_with(
    function: Callable[[dict[str, Any]], Any], source: str, row: Row, place: RowPlace, agents: AgentChoice
) -> Task:
    try:
        task = function(dict(row))
    except Exception as error:  # user code: any exception concerns this row
        raise DataError(f"{place}: data.reader={source} failed: {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise DataError(
            f"{place}: data.reader={source} must return an agentrl.types.Task, returned {type(task).__name__}"
        )
    if not task.messages:
        raise DataError(f"{place}: data.reader={source} returned a Task without messages")
    try:
        agent_name = agents.choose(
            task.agent_name,
            has_interaction=task.interaction_kwargs is not None,
            has_tools=bool(task.tools_kwargs or task.environment_kwargs),
        )
    except PluginError as error:
        raise PluginError(f"{place}: {error}") from error
    return dataclasses.replace(
        task,
        agent_name=agent_name,
        task_id=task.task_id or place.task_id,
        ground_truth=plain(task.ground_truth, place, "ground_truth"),
        extra_info=plain(task.extra_info, place, "extra_info"),
        tools_kwargs=plain(task.tools_kwargs, place, "tools_kwargs"),
        interaction_kwargs=plain(task.interaction_kwargs, place, "interaction_kwargs"),
        environment_kwargs=agents.environment_kwargs(
            plain(task.environment_kwargs, place, "environment_kwargs")
        ),
    )
