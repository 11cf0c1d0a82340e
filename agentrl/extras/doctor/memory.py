"""Check `memory`: memory, and shared memory for Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from agentrl.cluster.cluster import OBJECT_STORE_SHARE, SHARED_MEMORY, object_store_bytes
from agentrl.config.cluster import MIN_OBJECT_STORE_BYTES
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.extras.plan.explain_cpu import memory_warning
from agentrl.granted import Granted, granted

GIB = 1 << 30
LITTLE_BYTES = 2 * GIB
"""Ray, a learner and a server of a small model take as much before they do anything."""
REFUSED_BYTES = 10_000_000_000
"""Ray refuses a larger object store outside of shared memory; a smaller one it puts on the disk."""


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Compare memory and shared memory with what the run and Ray will take."""
    grant = granted()
    available = min(int(psutil.virtual_memory().available), grant.memory_bytes)
    warning = memory_warning(subject.config, granted_bytes=grant.memory_bytes) if subject.is_given else None
    yield judge_memory(grant, available, warning)
    if Path(SHARED_MEMORY).is_dir():
        disk = shutil.disk_usage(SHARED_MEMORY)
        chosen = subject.config.cluster.object_store_bytes
        yield judge_shared_memory(disk.total, disk.free, chosen=chosen, grant=grant)


def judge_memory(grant: Granted, available: int, warning: str | None) -> Diagnosis:
    """Judge memory by what is free now, and by the forecast for the run (`warning`; None: it fits)."""
    text = f"{_gib(grant.memory_bytes)} of {_gib(grant.machine_memory_bytes)} granted "
    text += f"({grant.memory_source}), {_gib(available)} available now"
    figures = {"granted_bytes": float(grant.memory_bytes), "available_bytes": float(available)}
    if warning is not None:
        return Diagnosis("memory", "wrong", f"{text}; {warning}", "a smaller run, or more memory", figures)
    if available < LITTLE_BYTES:
        return Diagnosis("memory", "slow", text, "end other programs, or grant more memory", figures)
    return Diagnosis("memory", "ok", text, figures=figures)


def judge_shared_memory(total: int, free: int, *, chosen: int | None, grant: Granted) -> Diagnosis:
    """Judge the shared memory of these sizes in bytes.

    Ray maps its object store there; NCCL, between processes of one machine, its buffers.

    Args:
        chosen: `cluster.object_store_bytes`.
    """
    wanted = chosen or object_store_bytes(grant, free)
    if wanted is None:  # Ray's own default
        wanted = min(int(OBJECT_STORE_SHARE * grant.memory_bytes), max(REFUSED_BYTES, int(0.95 * free)))
    text = f"{_gib(free)} of {_gib(total)} free in {SHARED_MEMORY}; the object store gets {_gib(wanted)}"
    figures = {"total_bytes": float(total), "free_bytes": float(free), "object_store_bytes": float(wanted)}
    cure = (
        f"remove files in {SHARED_MEMORY}, or enlarge it (docker run --shm-size={max(1, wanted // GIB + 1)}g"
        "; Kubernetes: an emptyDir with medium Memory)"
    )
    if free < MIN_OBJECT_STORE_BYTES:
        return Diagnosis("shared memory", "wrong", f"{text}; it is full", cure, figures)
    if free < wanted and wanted > REFUSED_BYTES:
        return Diagnosis("shared memory", "wrong", f"{text}; Ray refuses to start", cure, figures)
    if free < wanted:
        cure = f"{cure}, or set cluster.object_store_bytes to at most {free}"
        return Diagnosis("shared memory", "slow", f"{text}, on the disk", cure, figures)
    return Diagnosis("shared memory", "ok", text, figures=figures)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
