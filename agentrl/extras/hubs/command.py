"""Rows of worlds that others built: `agentrl data reasoning_gym`, `openenv`, `harbor` and their like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Debug
from agentrl.extras.datatools.instructions import PLACEHOLDER
from agentrl.extras.datatools.options import Agent, Out, Plugin, System, Template, read_text, say_written


def data_reasoning_gym(
    out: Out,
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
    """Write tasks of reasoning-gym's generators, scored by the generators themselves (agentrl docs hubs)."""
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.datatools.convert import choose_styles
    from agentrl.extras.hubs.reasoning_gym_rows import INSTRUCTION, read_mix, write_generated
    from agentrl.plugins import load_plugins

    (style,) = choose_styles(
        None,
        agent=agent,
        system=INSTRUCTION if system is None else read_text("--system", system),
        template=read_text("--template", template),
        plugins=load_plugins(plugin or ()),
    )
    mix = read_mix(generators, read_text("--config", config))
    with mirrored_folder(out) as folder:
        written = write_generated(folder, mix, style, seed=seed, num_train=train_rows, num_val=val_rows)
    say_written(out, written)
    if written["train"] < train_rows:
        left_out = train_rows - written["train"]
        typer.echo(f"left out {left_out:,} training rows whose question is one of val.parquet")


def data_gymnasium(
    out: Out,
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
    about: Annotated[bool, typer.Option(help="Tell the rules and the actions in the prompt.")] = True,
    train_rows: Annotated[int, typer.Option("--train", min=1, help="Number of training rows.")] = 3000,
    val_rows: Annotated[int, typer.Option("--val", min=0, help="Number of validation rows.")] = 192,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    plugin: Plugin = None,
    system: System = None,
    template: Template = PLACEHOLDER,
    debug: Debug = False,
) -> None:
    """Write games of Gymnasium, played by a tool and scored by their own rewards (agentrl docs hubs)."""
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.datatools.convert import choose_styles
    from agentrl.extras.hubs.gymnasium_rows import INSTRUCTION, GameRows, read_games, write_games
    from agentrl.plugins import load_plugins

    (style,) = choose_styles(
        None,
        agent="tool_agent",
        system=INSTRUCTION if system is None else read_text("--system", system),
        template=read_text("--template", template),
        plugins=load_plugins(plugin or ()),
    )
    chosen = read_games(games, read_text("--options", options))
    rows = GameRows(chosen, style, seed, num_train=train_rows, num_val=val_rows, has_rules=about)
    with mirrored_folder(out) as folder:
        written = write_games(folder, rows)
    say_written(out, written)


def data_harbor(
    tasks: Annotated[
        Path, typer.Argument(metavar="TASKS", help="A task in Harbor's layout, or a folder of tasks.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File of rows to write: data/tasks.jsonl.")],
    images: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="Image of each task, {task} being the name of its folder; default: what task.toml names.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write terminal tasks as rows (agentrl docs boxes). Images are not built."""
    from agentrl.extras.boxes.terminal import TerminalTask, task_folders

    found = [TerminalTask.read(folder) for folder in task_folders(tasks)]
    rows = [
        task.row(image=None if images is None else images.format(task=task.folder.name)) for task in found
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    typer.echo(f"wrote {len(rows):,} rows to {out}")


def data_openenv(
    out: Out,
    server: Annotated[
        str,
        typer.Option(
            metavar="NAME=URL|JSON",
            help="A server by the name that the config gives it: its URL, or its options there, such as "
            'ladder={"command": ["python", "ladder_server.py", "--port", "{port}"]}.',
        ),
    ],
    reset: Annotated[
        str,
        typer.Option(metavar="JSON|@FILE", help="Arguments of reset; each row adds its seed."),
    ] = "{}",
    shown: Annotated[
        str, typer.Option(help="Field of the observation that the policy reads; default: all, as JSON.")
    ] = "",
    field: Annotated[
        str,
        typer.Option(
            help="Field of the action that a turn's text becomes; default: the policy acts by tools."
        ),
    ] = "",
    about: Annotated[
        bool, typer.Option(help="Describe the environment, and its actions or tools, in the prompt.")
    ] = True,
    train_rows: Annotated[int, typer.Option("--train", min=1, help="Number of training rows.")] = 3000,
    val_rows: Annotated[int, typer.Option("--val", min=0, help="Number of validation rows.")] = 192,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    system: System = None,
    template: Template = PLACEHOLDER,
    debug: Debug = False,
) -> None:
    """Write episodes of an OpenEnv server, scored by its own rewards (agentrl docs hubs)."""
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.datatools.task_rows import RowStyle
    from agentrl.extras.hubs.openenv_rows import (
        INSTRUCTION,
        EpisodeRows,
        read_episode,
        read_server,
        write_episodes,
    )

    name, found = read_server(server)
    rows = EpisodeRows(
        read_episode(name, read_text("--reset", reset), shown=shown, field=field),
        RowStyle(
            system=INSTRUCTION if system is None else read_text("--system", system),
            template=read_text("--template", template),
        ),
        describes=about,
        seed=seed,
        num_train=train_rows,
        num_val=val_rows,
    )
    with mirrored_folder(out) as folder:
        written = write_episodes(folder, found, rows)
    say_written(out, written)


def data_verifiers(
    out: Out,
    environment: Annotated[str, typer.Option(metavar="NAME", help="Environment of verifiers.")],
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Interpreter of the environment with verifiers in it.")
    ],
    arguments: Annotated[
        str,
        typer.Option(metavar="JSON|@FILE", help="Arguments of load_environment, or options of the taskset."),
    ] = "{}",
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Folder with environments of your own; repeatable."),
    ] = None,
    train_rows: Annotated[int, typer.Option("--train", min=1, help="Number of training rows.")] = 3000,
    val_rows: Annotated[int, typer.Option("--val", min=0, help="Number of validation rows.")] = 192,
    debug: Debug = False,
) -> None:
    """Write tasks of an environment of verifiers, which plays and scores them itself (agentrl docs hubs)."""
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.hubs.verifiers import VerifiersOptions
    from agentrl.extras.hubs.verifiers_rows import Chosen, read_arguments, write_tasks

    given = read_arguments("--arguments", read_text("--arguments", arguments))
    options = VerifiersOptions(python=python, path=tuple(path or ()))
    chosen = Chosen(environment, given, num_train=train_rows, num_val=val_rows)
    with mirrored_folder(out) as folder:
        written = write_tasks(folder, options, chosen)
    say_written(out, written)


def data_textarena(
    out: Out,
    games: Annotated[str, typer.Option(metavar="ID,ID", help="Games of TextArena, which alternate.")],
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Interpreter of the environment with textarena in it.")
    ],
    options: Annotated[
        str,
        typer.Option(metavar="JSON|@FILE", help='Arguments by game: {"Nim-v0": {"piles": [3, 4]}}.'),
    ] = "{}",
    players: Annotated[int, typer.Option(min=0, help="Seats; 0: the fewest that a game takes.")] = 0,
    opponent: Annotated[
        str | None,
        typer.Option(help="Model of agent.opponents in the other seats; default: the policy has all."),
    ] = None,
    val_opponent: Annotated[
        str | None, typer.Option(help="The same, for validation; default: that of --opponent.")
    ] = None,
    turns: Annotated[
        bool, typer.Option("--turns", help="Games for one player are played by turns, not by the tool act.")
    ] = False,
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Folder with modules of your own; repeatable."),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Module that registers games of your own; repeatable."),
    ] = None,
    train_rows: Annotated[int, typer.Option("--train", min=1, help="Number of training rows.")] = 3000,
    val_rows: Annotated[int, typer.Option("--val", min=0, help="Number of validation rows.")] = 192,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    system: System = None,
    debug: Debug = False,
) -> None:
    """Write games of TextArena, for one player or several, scored by their rewards (agentrl docs hubs)."""
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.hubs.gymnasium_rows import read_games
    from agentrl.extras.hubs.textarena import TextArenaOptions
    from agentrl.extras.hubs.textarena_rows import MatchRows, write_matches

    opponents = {"train": opponent, "val": val_opponent or opponent}
    rows = MatchRows(
        read_games(games, read_text("--options", options)),
        seed,
        num_train=train_rows,
        num_val=val_rows,
        players=players,
        opponents={split: name for split, name in opponents.items() if name},
        by_turns=turns,
        system=None if system is None else read_text("--system", system),
    )
    elsewhere = TextArenaOptions(python=python, path=tuple(path or ()), modules=tuple(module or ()))
    with mirrored_folder(out) as folder:
        written = write_matches(folder, elsewhere, rows)
    say_written(out, written)


def data_tau2(
    out: Out,
    tasks: Annotated[
        Path, typer.Option(metavar="FILE", help="Tasks in the layout of tau2-bench (tasks.json).")
    ],
    environment: Annotated[
        str, typer.Option(metavar="NAME", help="Environment with the domain's tools and database.")
    ],
    policy: Annotated[
        str, typer.Option(metavar="TEXT|@FILE", help="The domain's policy: the system message.")
    ],
    config: Annotated[
        str,
        typer.Option(
            metavar="JSON|@FILE", help="Options of the environment, as agent.environment_config has."
        ),
    ] = "{}",
    opening: Annotated[str, typer.Option(help="The first words of each customer.")] = "Hello.",
    partner: Annotated[str, typer.Option(help="Interaction that plays the customer.")] = "simulated_user",
    plugin: Plugin = None,
    val_rows: Annotated[int, typer.Option("--val", min=0, help="The first tasks are for validation.")] = 0,
    debug: Debug = False,
) -> None:
    """Write tasks of tau2-bench's layout for a domain of your own: a customer with a hidden goal, scored by
    the database and by what was told (agentrl docs hubs).
    """
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.hubs.tau2_rows import Domain, write_conversations
    from agentrl.extras.hubs.tau2_tasks import read_tasks
    from agentrl.extras.hubs.verifiers_rows import read_arguments
    from agentrl.plugins import load_plugins

    plugins = load_plugins(plugin or ())
    plugins.interactions.get(partner)
    kind = plugins.environment(environment)
    options = read_arguments("--config", read_text("--config", config))
    domain = Domain(lambda: kind(options), read_text("--policy", policy), opening, partner)
    found = read_tasks(tasks)
    with mirrored_folder(out) as folder:
        written, left_out = write_conversations(folder, found, domain, num_val=val_rows)
    say_written(out, written)
    for reason, count in left_out.items():
        typer.echo(f"left out {count:,} task{'' if count == 1 else 's'}: {reason}")
