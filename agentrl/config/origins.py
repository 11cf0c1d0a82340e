"""Where a key of the composed config was set: `run.yaml:7`, or the override on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.keys import Key
from agentrl.config.yaml_files import read_nodes


@dataclass(frozen=True)
class SourceFile:
    """One YAML file of the composition; `package` is the key under which its content was merged."""

    label: str
    package: Key
    root: yaml.Node | None

    @classmethod
    def read(cls, path: Path, *, label: str, package: Key = ()) -> SourceFile:
        """Parse `path` into nodes with line numbers.

        Raises:
            yaml.YAMLError: see `read_nodes`.
        """
        return cls(label, package, read_nodes(path))

    def line_of(self, key: Key) -> int | None:
        """Return the line (from 1) that sets `key`; None if this file does not set it."""
        if key[: len(self.package)] != self.package:
            return None
        node, line = self.root, 1
        for part in key[len(self.package) :]:
            if not isinstance(node, yaml.MappingNode):
                return None
            found = next(((name, value) for name, value in node.value if name.value == part), None)
            if found is None:
                return None
            name, node = found
            line = name.start_mark.line + 1
        return line


@dataclass(frozen=True)
class WrittenOverride:
    """One `key=value` of the command line, as typed and as parsed."""

    text: str
    key: Key
    value: Any

    def writes(self, key: Key) -> bool:
        if self.key[: len(key)] == key:
            return True
        if key[: len(self.key)] != self.key:
            return False
        value = self.value
        for part in key[len(self.key) :]:
            if not isinstance(value, Mapping) or part not in value:
                return False
            value = value[part]
        return True


@dataclass(frozen=True)
class Origins:
    """All places that set keys, from weakest to strongest; overrides are stronger than files."""

    main: str
    files: tuple[SourceFile, ...]
    overrides: tuple[WrittenOverride, ...]

    def find(self, key: Key) -> str:
        """Return the strongest place that set `key`, else its nearest enclosing section, else the file."""
        for length in range(len(key), 0, -1):
            place = self._find(key[:length])
            if place is not None:
                return place
        return self.main

    def _find(self, key: Key) -> str | None:
        for override in reversed(self.overrides):
            if override.writes(key):
                return f"override {override.text!r}"
        for file in reversed(self.files):
            line = file.line_of(key)
            if line is not None and key != file.package[: len(key)]:
                return f"{file.label}:{line}"
        return None
