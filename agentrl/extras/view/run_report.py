"""Writes `summary.md` and `report.png` from a run's folder.

The run may have ended, been interrupted, or be live.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import DataError
from agentrl.extras.view.closing import closing_table
from agentrl.tracking.closing_table import (
    write_summary,
)
from agentrl.tracking.seals import check_text


def report_run(folder: Path) -> list[Path]:
    """Write `summary.md` and `report.png` of a run again, and return their paths.

    Raises:
        DataError: `folder` is not that of a training run.
        CheckpointError: a file of the run is damaged, or no step has been recorded yet.
        InfrastructureError: the files cannot be written.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{str(folder)!r} is not the folder of a training run: it has no metrics.jsonl")
    from agentrl.extras.view.run_picture import draw_report  # matplotlib takes a second to load

    picture = draw_report(folder, max_staleness=_max_staleness(folder))
    summary = folder / "summary.md"
    write_summary(closing_table(folder), summary, title=str(folder))
    return [summary, picture]


def _max_staleness(folder: Path) -> int | None:
    """Return the staleness bound from the run's config; None without a config file."""
    from agentrl.config.compose import load_config

    file = folder / "config.yaml"
    check_text(file)
    return load_config(str(file)).buffer.max_staleness if file.is_file() else None
