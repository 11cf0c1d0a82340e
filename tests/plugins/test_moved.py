"""Whoever imports a module by its former name is told the new one."""

import importlib

import pytest

from agentrl.errors import PluginError
from agentrl.plugins import load_plugins


def test_a_former_name_is_answered_with_the_new_one(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import agentrl.fleet.servers\n")
    with pytest.raises(PluginError, match=r"; it is agentrl.cluster now \(.*mine.py:1\)$"):
        load_plugins([str(file)])


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("agentrl.workers", "agentrl.cluster"),
        ("agentrl.doctor", "agentrl.extras.doctor"),
        ("agentrl.controller.watchdog", "agentrl.extras.watch.watchdog or agentrl.tracking.watchdog"),
    ],
)
def test_a_script_is_answered_too(former: str, now: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{former}'; it is {now} now$"):
        importlib.import_module(former)


def test_what_never_was_is_not_guessed(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import agentrl.nothing_of_the_kind\n")
    with pytest.raises(PluginError, match=r"No module named 'agentrl.nothing_of_the_kind' \("):
        load_plugins([str(file)])
