"""`agentrl plugins`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from agentrl.cli.options import Debug, Overrides


def plugins(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG.yaml]", help="Also list the plugin files and MCP servers of this config."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with full schemas.")] = False,
    debug: Debug = False,
) -> None:
    """List all plugins: where they come from, what they are for, what arguments tools take."""
    from agentrl.adapters.catalog import named_plugins
    from agentrl.config.compose import load_config
    from agentrl.config.schema import Config
    from agentrl.extras.testing.listing import format_plugins, list_plugins

    loaded = load_config(config, overrides or []) if config else Config()
    infos = list_plugins(named_plugins(loaded.agent, loaded.reward, loaded.eval))
    typer.echo(json.dumps([asdict(info) for info in infos], indent=2) if as_json else format_plugins(infos))
