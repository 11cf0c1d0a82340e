"""`agentrl boxes`: containers that runs started, and those that nobody owns any more."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.options import Debug
from agentrl.errors import ConfigError, SandboxError

if TYPE_CHECKING:
    from agentrl.extras.boxes.leases import Keeper


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
    cloud: Annotated[
        Literal["e2b", "daytona", "modal"] | None,
        typer.Option(help="Look there instead, with the key of its client's variable."),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(help="The app at Modal, as modal.app in the environment's options; default: agentrl."),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the boxes that runs left: containers on this machine, or machines of a cloud, with their owners.

    Boxes of other kinds end with their process. Ends with 1 if nobody owns a box and it was not removed.
    """
    from agentrl.extras.boxes.leases import sweep

    keepers = _keepers(command, cloud, app)
    if command is None and cloud is None:
        keepers = list(_answering(keepers))
    removed = [box for keeper in keepers for box in (sweep(keeper) if remove else [])]
    for box in removed:
        typer.echo(f"{box.name}  removed  {box.lease}")
    left = [box for keeper in keepers for box in keeper.found()]
    for box in left:
        typer.echo(f"{box.name}  {box.ownership}  {box.lease}")
    if not left and not removed:
        typer.echo("no boxes")
    raise typer.Exit(any(box.ownership == "nobody's" for box in left))


def _answering(engines: Sequence[Keeper]) -> Iterator[Keeper]:
    """Yield the installed engines that answer; one whose daemon is not running has no boxes to list."""
    for engine in engines:
        try:
            engine.found()
        except SandboxError as error:
            typer.echo(f"left out, because it does not answer: {error}", err=True)
        else:
            yield engine


def _keepers(command: str | None, cloud: str | None, app: str | None) -> Sequence[Keeper]:
    from agentrl.extras.boxes.audit import Containers, installed_engines

    if command is not None and cloud is not None:
        raise ConfigError(f"--command {command} is of an engine, --cloud {cloud} has none: give one of them")
    if app is not None and cloud != "modal":
        raise ConfigError(f"--app {app} is of Modal: give --cloud modal, too")
    if cloud is not None:
        return [_cloud(cloud, app)]
    return installed_engines() if command is None else [Containers(tuple(shlex.split(command)))]


def _cloud(name: str, app: str | None) -> Keeper:
    from agentrl.extras.boxes.daytona import DaytonaBoxes
    from agentrl.extras.boxes.e2b import E2bBoxes
    from agentrl.extras.boxes.modal import ModalBoxes
    from agentrl.extras.boxes.options import ModalOptions

    if name == "modal":
        options = ModalOptions() if app is None else ModalOptions(app=app)
        boxes: E2bBoxes | DaytonaBoxes | ModalBoxes = ModalBoxes(
            app=options.app, lifetime_s=1, idle_s=options.idle_s
        )
    else:
        boxes = E2bBoxes(lifetime_s=1) if name == "e2b" else DaytonaBoxes(lifetime_s=1)
    boxes.check()
    return boxes
