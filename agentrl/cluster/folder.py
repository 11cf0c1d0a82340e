"""Workers run in the driver's working directory, so a relative path means the same file everywhere."""

from __future__ import annotations

import os
from typing import Any

from agentrl import heap

VARIABLE = "AGENTRL_WORKING_DIRECTORY"


def in_drivers_folder(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return Ray's runtime environment, extended so that each worker starts in this process's folder.

    An existing Ray cluster would start workers in the folder where `ray start` was run.
    """
    variables = {VARIABLE: os.getcwd(), **heap.FEW}
    return {
        **(runtime_env or {}),
        "env_vars": variables,
        "worker_process_setup_hook": f"{__name__}.enter_folder",
    }


def enter_folder() -> None:
    """Change to the driver's folder if this machine has it; otherwise only absolute paths work."""
    folder = os.environ.get(VARIABLE, "")
    if os.path.isdir(folder):
        os.chdir(folder)
