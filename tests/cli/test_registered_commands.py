"""Commands of other packages: what cannot be added is told, and all others are there."""

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from agentrl.cli import command
from agentrl.cli.command import Command
from agentrl.registered import Registered


def nothing() -> None:
    """Do nothing."""


ORPHAN = (Command("no_family of_it", nothing, "agentrl no_family of_it"),)
TWICE = (Command("train", nothing, "agentrl train"),)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "commands_of_mine:ORPHAN",
            "command 'no_family of_it' of an unknown package is left out",
        ),
        (
            "commands_of_mine:TWICE",
            "command 'train' of an unknown package is left out: agentrl",
        ),
        ("no_such_package:COMMANDS", "the commands 'mine' of an unknown package (no_such_package:COMMANDS)"),
    ],
)
def test_what_cannot_be_added_is_told(monkeypatch: pytest.MonkeyPatch, value: str, line: str) -> None:
    entry = Registered(EntryPoint("mine", value, "agentrl.commands"))
    monkeypatch.setattr(command, "registered", lambda group: {"mine": entry})
    monkeypatch.setitem(sys.modules, "commands_of_mine", SimpleNamespace(ORPHAN=ORPHAN, TWICE=TWICE))
    told: list[str] = []
    found = command.all_commands(told.append)
    assert [text[: len(line)] for text in told] == [line]
    assert [one.function for one in found if one.path == "train"] != [nothing]
    assert all(one.path != "no_family of_it" for one in found)
