"""A config as YAML that contains only what differs from the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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
    refuse_out(path, ".yaml")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from None


def refuse_out(path: Path, suffix: Literal[".yaml", ".png"]) -> None:
    """Raise ConfigError unless a file of this suffix can be at `path`. For use before the work."""
    if path.suffix != suffix:
        kind = "config" if suffix == ".yaml" else "picture"
        raise ConfigError(f"--out {path}: a {kind} must end in {suffix}")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: the folder {path.parent} does not exist; create it")


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
