"""Resource limits of one program, and the walls that may be missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from agentrl.errors import ConfigError

Wall = Literal["filesystem", "network", "processes", "privileges", "memory", "process_count", "disk"]
WALLS: tuple[Wall, ...] = get_args(Wall)

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one execution, for all of its processes together unless stated otherwise.

    cpu_s, wall_s: seconds of CPU time and of wall-clock time.
    memory_mib: for each process (address space), and for the sum over all.
    max_processes: processes and threads.
    output_kib: for stdout and for stderr; more ends the program.
    file_mib, disk_mib: for one file; for all files.
    max_files: files and folders.
    max_open_files: descriptors of each process.
    """

    cpu_s: float = 10.0
    wall_s: float = 20.0
    memory_mib: int = 1024
    max_processes: int = 32
    output_kib: int = 256
    file_mib: int = 32
    disk_mib: int = 64
    max_files: int = 4096
    max_open_files: int = 128

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float) if field.type == "float" else int) and not isinstance(
                value, bool
            )
            if not is_number or not value > 0 or value == float("inf"):
                kind = "number" if field.type == "float" else "whole number"
                raise ConfigError(
                    f"limits of the sandbox: {field.name}={value!r}; give a finite {kind} above 0"
                )


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """Options of `agent.tool_config.python`, and the sandbox's part of `reward.reward_config.code`.

    allow_unprotected: walls that may be missing.
    packages: programs may import the packages installed beside agentrl (numpy, sympy, ...), not only the
        standard library.
    max_concurrent: programs that run at the same time in one process; None: one per CPU core.
    """

    limits: Limits = Limits()
    allow_unprotected: tuple[Wall, ...] = ()
    packages: bool = True
    max_concurrent: int | None = None


def read_options(config: Mapping[str, Any], *, key: str, others: Iterable[str] = ()) -> SandboxOptions:
    """Read limits and options from a plugin's configuration.

    Args:
        key: where the user wrote the configuration, for messages.
        others: keys that the plugin reads itself.

    Raises:
        ConfigError: an unknown key, a value out of range, or an unknown wall.
    """
    names = {field.name for field in dataclasses.fields(Limits)}
    known = [*sorted(names), "allow_unprotected", "packages", "max_concurrent"]
    if unknown := set(config) - set(known) - set(others):
        raise ConfigError(
            f"{key}: unknown {', '.join(sorted(unknown))}; available: {', '.join([*known, *others])}"
        )
    allowed = config.get("allow_unprotected", ())
    if isinstance(allowed, str) or not set(allowed) <= set(WALLS):
        raise ConfigError(f"{key}.allow_unprotected={allowed!r}: must be a list of {', '.join(WALLS)}")
    if not isinstance(packages := config.get("packages", True), bool):
        raise ConfigError(f"{key}.packages={packages!r}: true or false")
    concurrent = config.get("max_concurrent")
    if concurrent is not None and (not isinstance(concurrent, int) or concurrent < 1):
        raise ConfigError(f"{key}.max_concurrent={concurrent!r}: a whole number above 0")
    limits = Limits(**{name: value for name, value in config.items() if name in names})
    return SandboxOptions(limits, tuple(dict.fromkeys(allowed)), packages, concurrent)
