"""`agentrl view`: the page of runs, evaluations and files of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Debug
from agentrl.errors import UserError


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
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Write one self-contained file with the curves and chosen attempts, at most 5 MB, and end.",
        ),
    ] = None,
    filters: Annotated[
        str,
        typer.Option(
            "--filter",
            metavar="FILTERS",
            help="With --export or --tui: attempts, as the page filters: 'step:40 outcome:truncated'.",
        ),
    ] = "",
    limit: Annotated[
        int, typer.Option(min=1, max=2000, help="With --export: most attempts of each run.")
    ] = 200,
    tui: Annotated[
        bool,
        typer.Option("--tui", help="Show attempts in this terminal instead of a page, as over ssh."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve a local web page: curves of a run, its attempts token by token, and runs side by side.

    Reads only, and needs no network. The address contains a key; only this machine can open it.
    """
    if tui:
        if export is not None:
            raise UserError("--tui shows attempts here, --export writes them to a file; give one of the two")
        _show_in_terminal(runs, tokenizer, filters)
        return
    if filters and export is None:
        raise UserError("--filter chooses what --export writes or --tui begins with; the page has its own")
    import webbrowser

    from agentrl.extras.view.app import Pages
    from agentrl.extras.view.attempts import Filters
    from agentrl.extras.view.server import serve
    from agentrl.extras.view.sources import open_sources

    def advantages(run: Path, file: Path) -> Sequence[Sequence[float]]:
        from agentrl.extras.research.step_advantages import compute_apart

        return compute_apart(run, file)

    pages = Pages(open_sources(runs), tokenizer=tokenizer, advantages=advantages)
    if export is not None:
        from agentrl.extras.view.export import export as write_export

        count, num_bytes = write_export(pages, export, filters=Filters.parse_line(filters), limit=limit)
        typer.echo(f"wrote {export}: {count} attempts, {num_bytes / 1e6:.1f} MB")
        return

    def on_ready(address: str) -> None:
        typer.echo(f"{address}\nCtrl-C ends it")
        if browser:
            webbrowser.open(address)

    serve(pages, port=port, on_ready=on_ready)


def _show_in_terminal(runs: list[Path], tokenizer: Path | None, filters: str) -> None:
    import sys

    from agentrl.extras.view.sources import open_sources
    from agentrl.tracking.terminal import is_terminal

    sources = open_sources(runs)
    if not (is_terminal(sys.stdout) and sys.stdin.isatty()):
        raise UserError("--tui needs a terminal; without --tui a page is served, and --export writes a file")
    from agentrl.extras.view.terminal.app import TerminalApp

    app = TerminalApp(sources, tokenizer=tokenizer, line=filters)
    app.run()
    if app.return_code:
        raise typer.Exit(app.return_code)
