"""`agentrl data reasoning_gym` and `agentrl data gymnasium`: rows of worlds that others built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.data_options import Agent, Plugin, System, Template, read_text
from agentrl.cli.options import Debug
from agentrl.data.instructions import PLACEHOLDER


def data_reasoning_gym(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write into.")],
    generators: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="Generators of reasoning-gym, which alternate."),
    ],
    config: Annotated[
        str,
        typer.Option(
            metavar="JSON|@FILE", help='Configs by generator, such as {"chain_sum": {"max_terms": 3}}.'
        ),
    ] = "{}",
    train_rows: Annotated[int, typer.Option("--train", min=1, help="Number of training rows.")] = 3000,
    val_rows: Annotated[int, typer.Option("--val", min=0, help="Number of validation rows.")] = 192,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    agent: Agent = None,
    plugin: Plugin = None,
    system: System = None,
    template: Template = PLACEHOLDER,
    debug: Debug = False,
) -> None:
    """Write tasks of reasoning-gym's generators, scored by the generators themselves (docs/hubs.md)."""
    from agentrl.data.convert import choose_styles
    from agentrl.hubs.reasoning_gym_rows import INSTRUCTION, read_mix, write_generated
    from agentrl.plugins import load_plugins

    (style,) = choose_styles(
        None,
        agent=agent,
        system=INSTRUCTION if system is None else read_text("--system", system),
        template=read_text("--template", template),
        plugins=load_plugins(plugin or ()),
    )
    mix = read_mix(generators, read_text("--config", config))
    written = write_generated(out, mix, style, seed=seed, num_train=train_rows, num_val=val_rows)
    for split, (count, asked) in {
        "train": (written["train"], train_rows),
        "val": (written["val"], val_rows),
    }.items():
        typer.echo(f"wrote {out / split}.parquet: {count:,} row{'' if count == 1 else 's'}")
        if count < asked:
            typer.echo(f"left out {asked - count:,} training rows whose question is one of val.parquet")


def data_gymnasium(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write into.")],
    games: Annotated[
        str,
        typer.Option(metavar="ID,ID", help="Games of Gymnasium, which alternate."),
    ],
    options: Annotated[
        str,
        typer.Option(
            metavar="JSON|@FILE", help='Arguments by game, such as {"FrozenLake-v1": {"is_slippery": false}}.'
        ),
    ] = "{}",
    train_rows: Annotated[int, typer.Option("--train", min=1, help="Number of training rows.")] = 3000,
    val_rows: Annotated[int, typer.Option("--val", min=0, help="Number of validation rows.")] = 192,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    plugin: Plugin = None,
    system: System = None,
    template: Template = PLACEHOLDER,
    debug: Debug = False,
) -> None:
    """Write games of Gymnasium, played by a tool and scored by their own rewards (docs/hubs.md)."""
    from agentrl.data.convert import choose_styles
    from agentrl.hubs.gymnasium_rows import INSTRUCTION, read_games, write_games
    from agentrl.plugins import load_plugins

    (style,) = choose_styles(
        None,
        agent="tool_agent",
        system=INSTRUCTION if system is None else read_text("--system", system),
        template=read_text("--template", template),
        plugins=load_plugins(plugin or ()),
    )
    chosen = read_games(games, read_text("--options", options))
    written = write_games(out, chosen, style, seed=seed, num_train=train_rows, num_val=val_rows)
    for split, count in written.items():
        typer.echo(f"wrote {out / split}.parquet: {count:,} row{'' if count == 1 else 's'}")
