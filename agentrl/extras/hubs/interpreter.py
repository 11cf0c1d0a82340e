"""Packages that need an interpreter of their own: its options, and the hub process that runs in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from agentrl.errors import ConfigError
from agentrl.extras.hubs.process import HubProgram
from agentrl.extras.hubs.variables import clean_environment
from agentrl.plugins.options import Options


class InterpreterOptions(Options):
    """Options of an environment whose package is installed elsewhere."""

    python: str = Field(description="Interpreter of the environment in which the package is installed.")
    path: tuple[str, ...] = Field((), description="Folders with modules of your own.")
    env: dict[str, str] = Field(default_factory=dict, description="Variables of the process.")
    pass_env: tuple[str, ...] = Field((), description="Variables of the run that the process gets, too.")
    start_timeout_s: float = Field(120.0, gt=0, description="Deadline of the process's start.")


def interpreter_program(
    options: InterpreterOptions, *, world: str, script: str, defaults: Mapping[str, str] | None = None
) -> HubProgram:
    """Return the hub process of these options.

    Args:
        world: name of the environment, for errors.
        script: a file of `inside/`.
        defaults: variables that `options.env` may replace.

    Raises:
        ConfigError: the interpreter or a folder does not exist, or a variable is not set.
    """
    key = f"agent.environment_config.{world}"
    python = os.path.abspath(os.path.expanduser(options.python))
    if not os.access(python, os.X_OK) or os.path.isdir(python):
        raise ConfigError(
            f"{key}.python={options.python!r} is no program; name the interpreter, like venv/bin/python"
        )
    folders = [os.path.abspath(os.path.expanduser(folder)) for folder in options.path]
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{key}.path: {folder!r} is no folder")
    passed = clean_environment(options.pass_env, key=f"{key}.pass_env") | dict(defaults or {}) | options.env
    own = [passed["PYTHONPATH"]] if passed.get("PYTHONPATH") else []
    variables = {**passed, "PYTHONPATH": os.pathsep.join([*folders, *own])}
    return HubProgram(
        f"the process of {world}", python, script, tuple(sorted(variables.items())), options.start_timeout_s
    )
