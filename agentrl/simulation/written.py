"""A config as YAML that contains only what differs from the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.compose import dump_values
from agentrl.config.schema import Config
from agentrl.errors import ConfigError


def config_yaml(config: Config, lines: Sequence[str]) -> str:
    """Return the config as YAML, its differences from the defaults only, below `lines` as comments."""
    values = _differences(config.model_dump(mode="json"), Config().model_dump(mode="json"))
    comments = [f"# {line}".rstrip() for line in lines]
    return "\n".join([*comments, dump_values(values)])


def write_yaml(path: Path, text: str) -> None:
    """Write a config.

    Raises:
        ConfigError: the name does not end in .yaml, or the file cannot be written.
    """
    refuse_other_suffix(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from None


def refuse_other_suffix(path: Path) -> None:
    """Raise ConfigError unless a config at `path` can be loaded by its name."""
    if path.suffix != ".yaml":
        raise ConfigError(f"--out {path}: a config must end in .yaml")


def _differences(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _differences(value, default)
            if value:
                found[name] = value
        elif name not in defaults or value != default:
            found[name] = value
    return found
