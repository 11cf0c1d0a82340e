"""Where a benchmark ran: the commit and the processor, which come first in every result."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def facts() -> dict[str, str | int]:
    """Return what a figure depends on beside its settings."""
    return {"commit": current_commit(), "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def current_commit() -> str:
    """Return the short hash of what is checked out, with `+` where files of it are changed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return described.stdout.strip()


def cpu_name() -> str:
    """Return the processor's name with its family and model, which a virtual machine tells even where it hides the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return f"{said.get('model name', 'unknown')} (family {said.get('cpu family', '?')}, model {said.get('model', '?')})"


def write_result(out: Path | None, result: Mapping[str, object]) -> None:
    """Write a result behind the facts of this machine; None: nowhere."""
    if out is not None:
        write_whole(out, {**facts(), **result})


def write_whole(file: Path, content: object) -> None:
    """Write JSON so that the file is the old one or the new one, whenever this is interrupted."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, file)
