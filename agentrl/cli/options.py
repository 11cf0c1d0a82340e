"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, cast

import typer

from agentrl.errors import UserError
from agentrl.registered import registered

if TYPE_CHECKING:
    from agentrl.config.section import Section

ConfigFile = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG.yaml",
        help="YAML file with the differences from the defaults in docs/config.md, or a name from `agentrl "
        "config list`.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Hydra overrides, such as trainer.steps=20 rollout.group_size=8."
    ),
]


def _show_tracebacks(is_asked: bool) -> None:
    if is_asked:
        os.environ["AGENTRL_DEBUG"] = "1"


Debug = Annotated[bool, typer.Option("--debug", callback=_show_tracebacks, help="Show tracebacks.")]
ForCommand = Annotated[str, typer.Option("--for", help="The command for which the config is written.")]


def schema_for(command: str) -> type[Section]:
    """Return the schema of a command's configs, which a package registers as `agentrl.configs`.

    Raises:
        UserError: no command of this name reads a config.
    """
    known = registered("agentrl.configs")
    if command not in known:
        raise UserError(f"--for={command}: no such config; known: {', '.join(sorted(known))}")
    return cast("type[Section]", known[command].load())
