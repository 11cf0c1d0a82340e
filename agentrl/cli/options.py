"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

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
ForCommand = Annotated[
    Literal["train", "sft", "rm"], typer.Option("--for", help="The command for which the config is written.")
]
