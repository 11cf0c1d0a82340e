"""Files that a config reads and that its own commands make: what is missing is answered with those commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from agentrl.config.schema import Config
from agentrl.config.supervised import RMConfig, SFTConfig
from agentrl.data.model_source import is_hub_id
from agentrl.errors import ConfigError

Split = Literal["train_files", "val_files"]


def check_prepared(config: Config | SFTConfig | RMConfig, *, splits: Sequence[Split] = ("train_files", "val_files")) -> None:
    """Raise ConfigError with the commands of `trainer.prepared_by` if a file or folder that the config reads is missing.

    `splits`: those that are read. A config that names no such commands is left to the readers of its files, whose errors say more.
    """
    commands = config.trainer.prepared_by
    missing = [f"{key}={path!r}" for key, path in _inputs(config, splits) if not Path(path).exists()]
    if commands and missing:
        made_by = "this command makes" if len(commands) == 1 else "these commands make"
        raise ConfigError("\n  ".join([f"{missing[0]} does not exist yet; {made_by} what is missing:", *commands]))


def _inputs(config: Config | SFTConfig | RMConfig, splits: Sequence[Split]) -> Iterator[tuple[str, str]]:
    """Yield key and path of the local files that are read; a hub id is no path."""
    if config.model.path and not is_hub_id(config.model.path):
        yield "model.path", config.model.path
    for split in splits:
        files: Sequence[str] = getattr(config.data, split)
        yield from ((f"data.{split}", path) for path in files)
