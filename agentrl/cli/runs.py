"""`agentrl servers`: those of a live run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Debug
from agentrl.errors import UserError

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a running training.")]
RequestTimeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.1, help="Seconds until the request is withdrawn; runs answer between steps."
    ),
]


def servers_list(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the servers: state, version, tokens that agents wait for (prompt and what may still be sampled),
    restarts.
    """
    from agentrl.cluster.control import format_servers, read_servers

    table = read_servers(run)
    typer.echo(table.model_dump_json(indent=1) if as_json else format_servers(table))


def servers_add(
    run: RunFolder,
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="A running server to attach to.")] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start one more server, with the kind and options of the run.")
    ] = False,
    timeout_s: RequestTimeout = 600.0,
    debug: Debug = False,
) -> None:
    """Let a server join: it gets the current weights, is checked, and then serves."""
    from agentrl.cluster.control import ControlRequest, ask

    if start == (url is not None):
        raise UserError("give either the URL of a running server or --start")
    typer.echo(
        ask(
            run,
            ControlRequest(verb="attach", server=url) if url is not None else ControlRequest(verb="start"),
            timeout_s=timeout_s,
        )
    )


def servers_drain(
    run: RunFolder,
    server: Annotated[str, typer.Argument(metavar="URL", help="URL of the server, or its name in the list.")],
    timeout_s: RequestTimeout = 600.0,
    debug: Debug = False,
) -> None:
    """Let a server go: its trajectories go on elsewhere from what they have. One that the run started ends,
    another is left as it is.
    """
    from agentrl.cluster.control import ControlRequest, ask

    typer.echo(ask(run, ControlRequest(verb="drain", server=server), timeout_s=timeout_s))
