"""What a room, or a package of others, registers as `agentrl.commands`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.registered import Registered, registered

CORE = "Commands"
PLAN, LOOK, EVALUATE = "Begin, plan and check", "Inspect runs", "Compare and score"
EXTEND, SERVE = "Data", "Models and servers"
"""Panels of the help."""
PANELS = (CORE, PLAN, LOOK, EVALUATE, EXTEND, SERVE)
"""In the order of use; those of others come last."""


@dataclass(frozen=True)
class Command:
    """A command.

    path: its words after `agentrl`, such as "data show".
    function: typer reads its options from the signature.
    text: its help; None: the docstring of `function`.
    panel: of the help, for a path of one word.
    """

    path: str
    function: Callable[..., Any]
    example: str
    panel: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class CommandFamily:
    """The first word of commands of two words."""

    path: str
    text: str
    panel: str


def core_commands() -> tuple[Command | CommandFamily, ...]:
    """Return the commands that need no extra."""
    from agentrl.cli import configs, evaluation, pages, runs, training

    return (
        Command("train", training.train, "agentrl train configs/quickstart.yaml trainer.steps=20", CORE),
        Command("eval", evaluation.evaluate, "agentrl eval --model MODEL --on gsm8k --n 4", CORE),
        CommandFamily(
            "servers", "Manage the inference servers of a running training: list, add or drain them.", CORE
        ),
        Command("servers list", runs.servers_list, "agentrl servers list runs/quickstart/run"),
        Command(
            "servers add", runs.servers_add, "agentrl servers add runs/quickstart/run http://127.0.0.1:30000"
        ),
        Command(
            "servers drain",
            runs.servers_drain,
            "agentrl servers drain runs/quickstart/run http://127.0.0.1:30000",
        ),
        CommandFamily(
            "config",
            "Show or explain a config, list the packaged configs, or import a config of verl.",
            CORE,
        ),
        Command("config list", configs.config_list, "agentrl config list"),
        Command("config show", configs.config_show, "agentrl config show recipes/gsm8k_grpo"),
        Command("docs", pages.docs, "agentrl docs quickstart", CORE),
    )


def all_commands(warn: Callable[[str], None]) -> list[Command | CommandFamily]:
    """Return the commands of the core, then those of all packages, in the order of the help: groups before
    what belongs to them. `warn` of those that do not load, and of a second one of the same words.
    """
    owners: dict[str, Registered | None] = {}  # None: the core
    found = []
    for entry, one in [*((None, one) for one in core_commands()), *_registered(warn)]:
        if one.path in owners:
            other = _owner(owners[one.path])
            warn(f"command {one.path!r} of {_owner(entry)} is left out: {other} registers it too")
            continue
        owners[one.path] = entry
        found.append(one)
    families = {one.path for one in found if isinstance(one, CommandFamily)}
    for one in [one for one in found if " " in one.path and one.path.split()[0] not in families]:
        owner = _owner(owners[one.path])
        warn(f"command {one.path!r} of {owner} is left out: nothing registers the family of it")
        found.remove(one)
    return sorted(found, key=lambda one: (isinstance(one, Command) and one.panel is None, _place(one.panel)))


def _place(panel: str | None) -> int:
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def _owner(entry: Registered | None) -> str:
    return "agentrl" if entry is None else entry.owner


def _registered(warn: Callable[[str], None]) -> Iterator[tuple[Registered, Command | CommandFamily]]:
    for name, one in registered("agentrl.commands").items():
        try:
            commands = tuple(one.load())
        except Exception as error:  # noqa: BLE001 - a third party's code; the others go on
            warn(f"the commands {name!r} of {one.owner} ({one.entry.value}) cannot be loaded: {error}")
            continue
        yield from ((one, command) for command in commands)
