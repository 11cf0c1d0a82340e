"""Writes the files of a new plugin: its source, a passing test, and the YAML that names it in a config."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from agentrl.errors import PluginError
from agentrl.types import PluginKind

NAMED_IN: Mapping[PluginKind, str] = {
    "tool": "agent:\n  tools: [$file:$name]",
    "interaction": "agent:\n  plugins: [$file]\n\n# and in the rows of the data:\n"
    "extra_info: {interaction_kwargs: {name: $name, word: cheese}}",
    "environment": "agent:\n  default: tool_agent\n  environment: $file:$class_name\n\n# and in the rows "
    "of the data:\nextra_info: {environment_kwargs: {name: $name, boxes: 3, prize: 2}}",
    "agent": "agent:\n  default: $file:$class_name    # or in the rows' column agent_name",
    "reward": "reward:\n  sources:\n    my_data_source: $file:$class_name",
}
"""How a config names the plugin, for each kind."""
KINDS = tuple(NAMED_IN)


@dataclass(frozen=True, slots=True)
class WrittenPlugin:
    """The files written, and the YAML that names the plugin."""

    file: Path
    test: Path
    yaml: str


def write_plugin(kind: PluginKind, name: str, folder: Path) -> WrittenPlugin:
    """Write `name.py` and `test_name.py` into `folder`, which is created if needed.

    Raises:
        PluginError: the name is not a lowercase Python identifier, or a file already exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"{name!r} cannot be the name of a plugin; use small letters, digits and _, as in my_{kind}"
        )
    written = WrittenPlugin(folder / f"{name}.py", folder / f"test_{name}.py", "")
    for path in (written.file, written.test):
        if path.exists():
            raise PluginError(f"{path} already exists; choose another name, or another --out")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    values = {"name": name, "Class": class_name, "class_name": class_name, "file": str(written.file)}
    folder.mkdir(parents=True, exist_ok=True)
    written.file.write_text(_filled(f"{kind}.py.txt", values), encoding="utf-8")
    written.test.write_text(_filled(f"test_{kind}.py.txt", values), encoding="utf-8")
    return WrittenPlugin(written.file, written.test, Template(NAMED_IN[kind]).substitute(values))


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = files("agentrl.extras.testing").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)
