"""Check for input files that a config's own commands create.

The error for a missing file lists these commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentrl.config.storage_urls import is_url
from agentrl.data.model_source import is_hub_id
from agentrl.errors import ConfigError


def check_prepared(commands: Sequence[str], model: str, **files: Sequence[str]) -> None:
    """Check that the local files and folders that a config reads exist.

    Args:
        commands: `trainer.prepared_by`. Without them nothing is checked here: the readers of the files raise
            more specific errors.
        model: `model.path`.
        files: paths by their key of the section `data`, those that are read.

    Raises:
        ConfigError: one is missing; the message lists the commands.
    """
    missing = [
        f"{key}={path!r}"
        for key, path in _inputs(model, files)
        if not is_url(path) and not Path(path).exists()
    ]
    if commands and missing:
        made_by = "this command creates" if len(commands) == 1 else "these commands create"
        raise ConfigError(
            "\n  ".join([f"{missing[0]} does not exist yet; {made_by} the missing files:", *commands])
        )


def _inputs(model: str, files: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield key and path of the local files that are read; hub ids are skipped."""
    if model and not is_hub_id(model):
        yield "model.path", model
    for key, paths in files.items():
        yield from ((f"data.{key}", path) for path in paths)
