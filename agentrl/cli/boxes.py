"""`agentrl boxes`: containers that runs started, and those that nobody owns any more."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from agentrl.cli.options import Debug


def boxes(
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove those whose owner on this machine has ended.")
    ] = False,
    command: Annotated[
        str | None,
        typer.Option(
            help="The engine's command, as in the environment's options; default: podman and docker."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the containers that runs on this machine started as boxes, with their owners.

    Boxes of other kinds end with their process. Ends with 1 if nobody owns a box and it was not removed.
    """
    from agentrl.boxes.audit import found_boxes, installed_engines, sweep

    engines = installed_engines() if command is None else [tuple(shlex.split(command))]
    removed = [box for engine in engines for box in (sweep(engine) if remove else [])]
    for box in removed:
        typer.echo(f"{box.name}  removed  {box.lease}")
    left = [box for engine in engines for box in found_boxes(engine)]
    for box in left:
        typer.echo(f"{box.name}  {box.ownership}  {box.lease}")
    if not left and not removed:
        typer.echo("no boxes")
    raise typer.Exit(any(box.ownership == "nobody's" for box in left))
