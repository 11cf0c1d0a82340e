"""Check for input files that a config's own commands create.

The error for a missing file lists these commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from agentrl.config.model import ModelConfig
from agentrl.config.storage_urls import is_url
from agentrl.data.model_source import is_hub_id
from agentrl.errors import ConfigError

Split = Literal["train_files", "val_files"]


class FileConfig(Protocol):
    """A config of a command that reads a model and data, which other commands may make first."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def data(self) -> Any: ...
    @property
    def trainer(self) -> Any: ...


def check_prepared(config: FileConfig, *, splits: Sequence[Split] = ("train_files", "val_files")) -> None:
    """Check that the local files and folders that the config reads exist.

    `splits`: the splits that are read. A config without `trainer.prepared_by` is not checked here: the
    readers of its files raise more specific errors.

    Raises:
        ConfigError: one is missing; the message lists the commands of `trainer.prepared_by`.
    """
    commands = config.trainer.prepared_by
    missing = [
        f"{key}={path!r}"
        for key, path in _inputs(config, splits)
        if not is_url(path) and not Path(path).exists()
    ]
    if commands and missing:
        made_by = "this command creates" if len(commands) == 1 else "these commands create"
        raise ConfigError(
            "\n  ".join([f"{missing[0]} does not exist yet; {made_by} the missing files:", *commands])
        )


def _inputs(config: FileConfig, splits: Sequence[Split]) -> Iterator[tuple[str, str]]:
    """Yield key and path of the local files that are read; hub ids are skipped."""
    if config.model.path and not is_hub_id(config.model.path):
        yield "model.path", config.model.path
    for split in splits:
        files: Sequence[str] = getattr(config.data, split)
        yield from ((f"data.{split}", path) for path in files)
