"""Every extra is a room of the same form: what it registers, a short page, its tests."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.parent.name for path in (ROOT / "agentrl/extras").glob("*/__init__.py"))
MOST_WORDS = 1_000
"""Of a README, tables and code included."""


def registered() -> dict[str, dict[str, dict[str, str]]]:
    """Return what pyproject.toml registers: room -> group -> name -> object."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for group, entries in groups.items():
        for name, value in entries.items():
            if value.startswith("agentrl.extras."):
                found[value.partition(":")[0].split(".")[2]][group][name] = value
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lists_what_it_registers(room: str) -> None:
    plugin = importlib.import_module(f"agentrl.extras.{room}.plugin")
    listed = {group: entries for group, entries in plugin.REGISTERS.items() if group != "pytest11"}
    own = {group: dict(entries) for group, entries in registered()[room].items() if group != "pytest11"}
    assert listed == own


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_short_page_and_tests(room: str) -> None:
    page = (ROOT / "agentrl/extras" / room / "README.md").read_text()
    assert len(re.findall(r"\w\S*", page)) <= MOST_WORDS
    assert list((ROOT / "tests/extras" / room).glob("test_*.py")), "tests/extras has no tests of it"
