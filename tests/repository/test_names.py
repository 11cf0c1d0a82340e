"""One word per idea: no public class name stands for two things."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = ("agents", "tools", "interactions", "rewards")
"""Plugins of different kinds may share a name, as the reward and the interaction `gsm8k` do; so may stand-ins for verl's own classes."""


def test_no_public_class_name_stands_for_two_things() -> None:
    places = defaultdict(set)
    for path in [file for folder in ("agentrl", *PLUGINS) for file in (ROOT / folder).rglob("*.py")]:
        parts = path.relative_to(ROOT).parts
        if set(parts) & {*PLUGINS, "shim"} and parts[:2] != ("agentrl", "plugins"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(path.relative_to(ROOT)))
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}
