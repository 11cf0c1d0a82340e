"""Facts about where a benchmark ran (commit, processor), which come first in every result file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def facts() -> dict[str, str | int]:
    """Return the commit and the machine's properties, on which figures depend."""
    return {
        "commit": current_commit(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }


def current_commit() -> str:
    """Return the short hash of the commit that is checked out, with `+` if files have changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return described.stdout.strip()


def cpu_name() -> str:
    """Return the processor's name, family and model; virtual machines may hide only the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    said = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))
    }
    return (
        f"{said.get('model name', 'unknown')} (family {said.get('cpu family', '?')}, model "
        f"{said.get('model', '?')})"
    )


def write_result(out: Path | None, result: Mapping[str, object]) -> None:
    """Write the facts of this machine and the result to `out`; None: write nothing."""
    if out is not None:
        write_whole(out, {**facts(), **result})


def write_whole(file: Path, content: object) -> None:
    """Write JSON atomically: after an interruption, the file is either the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, file)
