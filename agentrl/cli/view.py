"""`agentrl view`: the page of runs, evaluations and files of attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Debug


def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN ...]",
            help="Folders of runs or evaluations, running or not, or Parquet files of attempts.",
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with tokenizer.json, if the run's own has moved."),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the default browser.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve a local web page: curves of a run, its attempts token by token, and runs side by side.

    Reads only, and needs no network. The address contains a key; only this machine can open it.
    """
    import webbrowser

    from agentrl.view.app import Pages
    from agentrl.view.server import serve
    from agentrl.view.sources import open_sources

    pages = Pages(open_sources(runs), tokenizer=tokenizer)

    def on_ready(address: str) -> None:
        typer.echo(f"{address}\nCtrl-C ends it")
        if browser:
            webbrowser.open(address)

    serve(pages, port=port, on_ready=on_ready)
