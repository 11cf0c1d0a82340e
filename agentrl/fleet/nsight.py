"""Profiling of ranks with NVIDIA Nsight Systems, through Ray's runtime environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.config.placement import Role
from agentrl.config.profiler import NsightConfig
from agentrl.errors import ConfigError
from agentrl.workers.pools import Seat


def check_nsight(config: NsightConfig) -> None:
    """Check that a requested profile can be recorded.

    Raises:
        ConfigError: the config needs `nsys`, which is not installed on this machine.
    """
    if config.roles and shutil.which("nsys") is None:
        raise ConfigError(
            "profiler.nsight needs the program nsys of NVIDIA Nsight Systems on PATH; install it, or leave profiler.nsight.roles=[]"
        )


def recorded(seats: Mapping[Role, Sequence[Seat]], config: NsightConfig, folder: Path) -> dict[Role, Sequence[Seat]]:
    """Return the seats, with those of `config.roles` wrapped in nsys.

    Each wrapped process writes `<role>_<pid>.nsys-rep` to `folder` when it ends.
    """
    if config.roles:
        folder.mkdir(parents=True, exist_ok=True)
    # Ray starts a wrapped worker as `nsys ... python`. PATH makes that this interpreter, even without an
    # activated environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    place = str(folder.resolve()).replace(" ", r"\ ")  # a shell reads the command
    wrapped = {role: {"nsight": {**config.options, "o": f"{place}/{role}_%p"}, "env_vars": {"PATH": path}} for role in config.roles}
    return {role: [replace(seat, runtime_env=wrapped.get(role, {})) for seat in own] for role, own in seats.items()}
