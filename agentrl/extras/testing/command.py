"""`agentrl new` and `play`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.cli.options import ConfigFile, Debug, Overrides


def new(
    kind: Annotated[
        Literal["tool", "interaction", "environment", "agent", "reward"],
        typer.Argument(metavar="tool|interaction|environment|agent|reward"),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the plugin, in snake_case, such as word_count.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("."),
    debug: Debug = False,
) -> None:
    """Write a plugin to begin with: its file, a test that passes, and how to name it in a config."""
    from agentrl.extras.testing.scaffold import write_plugin

    written = write_plugin(kind, name, out)
    typer.echo(
        f"wrote {written.file} and {written.test}\n\nTry it (`pip install pytest` brings pytest):\n\npytest "
        f"{written.test}\n"
    )
    typer.echo(f"Add it to your config:\n\n{written.yaml}")


def play(
    config: ConfigFile,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(min=0, help="Row of data.train_files, counted from 0.")] = 0,
    model: Annotated[
        str,
        typer.Option(
            metavar="person|SCRIPT.yaml|URL",
            help="Who plays the model: `person` (you), a YAML file of turns, or the URL of a server.",
        ),
    ] = "person",
    val: Annotated[
        bool, typer.Option("--val", help="Use a row of data.val_files, sampled as in validation.")
    ] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Start the config's server for the model, and stop it afterwards.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Play one conversation through the real loop: transcript, tokens by mask, tools, rewards. Needs no Ray.
    Ends with 1 if it fails.
    """
    from agentrl.config.compose import load_config
    from agentrl.extras.testing.one_row.play import play_row
    from agentrl.extras.testing.one_row.show import show
    from agentrl.tracking.terminal import VisibleConsole
    from agentrl.types import SCORED_OUTCOMES

    loaded = load_config(config, overrides or [])
    played = play_row(
        loaded, row=row, model=model, is_validation=val, starts_server=start, read=_typed_line, say=typer.echo
    )
    show(played, VisibleConsole(), shows_traceback=bool(os.environ.get("AGENTRL_DEBUG")))
    raise typer.Exit(0 if played.trajectory.outcome in SCORED_OUTCOMES else 1)


def _typed_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
