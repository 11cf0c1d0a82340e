"""CPUs and memory that this process may use: the minimum of machine, CPU affinity, control groups and SLURM.

In a container, a Kubernetes pod or a SLURM job, `os.cpu_count()` still counts the host. All functions read
files below `root` and variables of `environ`, so that tests can supply their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

Source = Literal["machine", "affinity", "cgroup", "SLURM"]
Resource = Literal["cpu", "memory"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound of a resource (number of CPUs, or bytes), and its source."""

    amount: float
    source: Source


@dataclass(frozen=True, slots=True)
class Granted:
    """CPUs (at least one) and memory that this process may use. `machine_*`: totals of the machine."""

    num_cpus: int
    cpu_source: Source
    machine_cpus: int
    memory_bytes: int
    memory_source: Source
    machine_memory_bytes: int


def granted_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1."""
    return granted().num_cpus


def granted(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    *,
    machine_cpus: int | None = None,
    affinity: int | None = None,
) -> Granted:
    """Read all bounds and return the smallest; ties go to the first in the order of `Source`.

    A fraction of a CPU is rounded down: a program with one more busy thread would be throttled constantly.

    Args:
        machine_cpus: number of CPUs of the machine; None: as the kernel reports.
        affinity: number of CPUs that this process may run on; None: as the kernel reports.
    """
    total_cpus = machine_cpus or os.cpu_count() or 1
    allowed = affinity or len(os.sched_getaffinity(0))
    cpus = [
        Bound(total_cpus, "machine"),
        Bound(allowed, "affinity"),
        *cgroup_bounds("cpu", root),
        *slurm_bounds("cpu", environ, allowed),
    ]
    total_memory = _machine_memory(root)
    memory = [
        Bound(total_memory, "machine"),
        *cgroup_bounds("memory", root),
        *slurm_bounds("memory", environ, allowed),
    ]
    least_cpus, least_memory = (
        min(cpus, key=lambda bound: bound.amount),
        min(memory, key=lambda bound: bound.amount),
    )
    return Granted(
        max(1, int(least_cpus.amount)),
        least_cpus.source,
        total_cpus,
        int(least_memory.amount),
        least_memory.source,
        total_memory,
    )


# --------------------------------------------------------------------------------------------- control groups


def cgroup_bounds(resource: Resource, root: Path) -> Iterator[Bound]:
    """Yield the bounds of this process's control group and of all its ancestors, for cgroup v1 and v2."""
    groups = _own_groups(root)
    for mount in _mounts(root):
        if mount.is_unified:
            path, read = groups.get(""), _read_v2
        elif resource in mount.controllers:
            path, read = groups.get(resource), _read_v1
        else:
            continue
        for folder in _chain(root, mount, path or "/"):
            amount = read(resource, folder)
            if amount is not None:
                yield Bound(amount, "cgroup")


def _read_v2(resource: Resource, folder: Path) -> float | None:
    """Read `cpu.max` ("QUOTA PERIOD", in microseconds) or `memory.max` (bytes); "max" is no bound: None."""
    if resource == "memory":
        return _positive(_text(folder / "memory.max"))
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return _ratio(quota, period or "100000")


def _read_v1(resource: Resource, folder: Path) -> float | None:
    """Read `cpu.cfs_*_us` or `memory.limit_in_bytes`.

    Without a bound, the quota is -1 and the limit is larger than any machine's memory.
    """
    if resource == "memory":
        return _positive(_text(folder / "memory.limit_in_bytes"))
    return _ratio(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy of control groups. `top`: its group that is mounted. `point`: the mount point."""

    top: str
    point: str
    is_unified: bool
    controllers: frozenset[str]


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if separator and len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            yield _Mount(
                _plain(fields[3]), _plain(fields[4]), kind[0] == "cgroup2", frozenset(kind[2].split(","))
            )


def _own_groups(root: Path) -> dict[str, str]:
    """Return controller -> path of this process's group; the key is "" in the unified hierarchy (v2)."""
    found: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number and path.startswith("/"):
            found |= dict.fromkeys(names.split(","), path)
    return found


def _chain(root: Path, mount: _Mount, path: str) -> Iterator[Path]:
    """Yield the folders of the group and of its ancestors, up to the mount point.

    A container often sees only a part of the hierarchy, mounted as if it were the whole. Groups outside of it
    are invisible; then only the mount point itself is read.
    """
    group = PurePosixPath(path)
    inside = group.relative_to(mount.top) if group.is_relative_to(mount.top) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    point = root / mount.point.lstrip("/")
    for level in (inside, *inside.parents):
        yield point / level


# ------------------------------------------------------------------------------------------------------ SLURM


def slurm_bounds(resource: Resource, environ: Mapping[str, str], num_cpus: float) -> Iterator[Bound]:
    """Yield SLURM's bounds of this task and of the job on this node.

    `num_cpus`: CPUs of this process, for memory per CPU if SLURM does not report the node's CPUs.
    """
    if resource == "cpu":
        names = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
        amounts = [_positive(environ.get(name, "")) for name in names]
    else:
        per_node, per_cpu = (
            _positive(environ.get(name, "")) for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU")
        )
        on_node = _positive(environ.get("SLURM_CPUS_ON_NODE", "")) or num_cpus
        amounts = [per_node and per_node * MIB, per_cpu and per_cpu * MIB * on_node]
    yield from (Bound(amount, "SLURM") for amount in amounts if amount)


# ---------------------------------------------------------------------------------------------------- reading


def _machine_memory(root: Path) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(file: Path) -> str:
    """Return a file's text, "" if it cannot be read: which files exist depends on kernel and container."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _plain(path: str) -> str:
    """Undo the octal escapes of mountinfo, for example of spaces."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _positive(text: str) -> float | None:
    """Return a positive number; None for anything else: "max" and -1 mean that there is no bound."""
    return float(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _ratio(quota: str, period: str) -> float | None:
    over, under = _positive(quota), _positive(period)
    return over / under if over and under else None
