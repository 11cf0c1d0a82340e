"""What of a source changed: sizes and times of its files, looked at every POLL_S while a page is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.data.failures import FILE as FAILURES
from agentrl.extras.view.sources import METRICS, STORE, ViewSource

POLL_S = 2.0
_FILES = {
    "metrics": (METRICS, "validations.json", "result.json", "results.json"),
    "alarms": ("alarms.jsonl",),
    "servers": ("control/servers.json",),
    "attempts": ("trajectories", "validation", FAILURES, STORE, "attempts.parquet", "."),
}


def state_of(source: ViewSource) -> dict[str, Any]:
    """Return a value per part of the page that differs whenever the part may look different."""
    found: dict[str, Any] = {
        name: tuple(_stamp(source.folder / file) for file in names) for name, names in _FILES.items()
    }
    if (
        source.kind == "run"
    ):  # a folder changes with everything in it; a run's own attempts are in two of them
        found["attempts"] = found["attempts"][:3]
    found["life"] = source.is_live
    return found


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
