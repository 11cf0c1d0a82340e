"""One word per idea: no public class name stands for two things."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("agentrl", "agents", "tools", "interactions")
SHIM = "agentrl/extras/verl/shim"
"""Stand-ins for verl's own classes, which have its names."""


def is_plugin(node: ast.ClassDef) -> bool:
    """Return whether a class gives itself a plugin's `name`.

    Plugins of different kinds may share a class name: `Gsm8k`.
    """
    return any(ast.unparse(field).startswith(("name: ClassVar[str] = ", "name = ")) for field in node.body)


def test_no_public_class_name_stands_for_two_things() -> None:
    places = defaultdict(set)
    for path in [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]:
        file = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and not is_plugin(node)
                and not file.startswith(SHIM)
            ):
                places[node.name].add(file)
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}
