"""`agentrl fetch` and `disk`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Debug


def fetch(
    url: Annotated[str, typer.Argument(metavar="URL", help="`trainer.upload_to` of a run.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write; it must not exist.")],
    debug: Debug = False,
) -> None:
    """Fetch an uploaded run: all files, compared with their hashes. Commands on runs work in the folder; to
    continue the run, use `agentrl train` in an empty folder instead.
    """
    from agentrl.extras.storage.uploaded import fetch_run

    fetch_run(url, folder, say=partial(typer.echo, err=True))
    typer.echo(f"wrote {folder}")


def disk(
    run: Annotated[str, typer.Argument(metavar="RUN|URL", help="Folder of a run, or `trainer.upload_to`.")],
    debug: Debug = False,
) -> None:
    """Show how much of a run is on this machine, and how much is uploaded."""
    from agentrl.extras.storage.uploaded import disk_lines

    for line in disk_lines(run):
        typer.echo(line)
