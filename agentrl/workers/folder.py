"""Workers of a cluster stand in the driver's working directory, so that a path of the config means the same file everywhere."""

from __future__ import annotations

import os
from typing import Any

from agentrl import heap

VARIABLE = "AGENTRL_WORKING_DIRECTORY"


def in_drivers_folder(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return Ray's runtime environment with what lets each worker begin in this process's folder.

    A Ray that runs already starts its workers where `ray start` stood.
    """
    variables = {VARIABLE: os.getcwd(), **heap.FEW}
    return {**(runtime_env or {}), "env_vars": variables, "worker_process_setup_hook": f"{__name__}.enter_folder"}


def enter_folder() -> None:
    """Go to the driver's folder where this machine has it; elsewhere only absolute paths are found."""
    folder = os.environ.get(VARIABLE, "")
    if os.path.isdir(folder):
        os.chdir(folder)
