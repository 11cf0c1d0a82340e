"""`agentrl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Debug


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a training run, which may be running or interrupted."),
    ],
    debug: Debug = False,
) -> None:
    """Draw `report.png` and write `summary.md` anew from the files of a run. Needs no Ray and no GPU."""
    from agentrl.extras.view.run_report import report_run

    for path in report_run(folder):
        typer.echo(f"wrote {path}")
