"""`agentrl config list` and `show`."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Annotated

import typer

from agentrl.cli.options import ConfigFile, Debug, ForCommand, Overrides, schema_for


def config_show(
    config: ConfigFile, overrides: Overrides = None, command: ForCommand = "train", debug: Debug = False
) -> None:
    """Print the resolved config, defaults included."""
    from agentrl.config.compose import dump_config, load_section

    typer.echo(dump_config(load_section(schema_for(command), config, overrides or [])))


def config_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: name, is_whole, text.")] = False,
    debug: Debug = False,
) -> None:
    """List the packaged configs: those that run as they are, and the parts of which a `defaults` list picks
    one of each folder.
    """
    from agentrl.config.packaged import packaged_configs

    found = packaged_configs()
    if as_json:
        typer.echo(json.dumps([asdict(config) for config in found], indent=2))
        return
    width = max(len(config.name) for config in found)
    for folder, members in itertools.groupby(
        found, key=lambda config: None if config.is_whole else config.folder
    ):
        heading = (
            "Configs: agentrl train NAME" if folder is None else f"Parts: agentrl train CONFIG {folder}=NAME"
        )
        typer.echo(
            f"{heading}\n"
            + "\n".join(f"  {config.name.ljust(width)}  {config.text}" for config in members)
            + "\n"
        )
