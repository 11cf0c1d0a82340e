"""Checks the models of `tracking.baselines` before the run starts.

Servers load them in turn before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.schema import Config
from agentrl.controller.listeners import Opened, RunListener
from agentrl.controller.run_dir import RunDir
from agentrl.errors import ConfigError
from agentrl.plugins.sources import absence
from agentrl.weights.verify import read_shapes

if TYPE_CHECKING:
    from agentrl.controller.run import Run


def check_baselines(baselines: Mapping[str, str], *, policy: Path) -> None:
    """Refuse baselines (name -> folder) that the servers could not load in place of the policy.

    Raises:
        ConfigError: a folder does not exist, contains no model, or its tensors differ in shape from the
            policy's.
    """
    for name, folder in baselines.items():
        _check_baseline(Path(folder), key=f"tracking.baselines.{name}={folder!r}", policy=policy)


def _check_baseline(folder: Path, *, key: str, policy: Path) -> None:
    cure = "use the folder of a model, or remove all baselines with tracking.baselines={}"
    if not folder.is_dir():
        raise ConfigError(f"{key} {'is a file' if folder.exists() else absence(folder)}; {cure}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key} is not the folder of a model: it has no config.json; {cure}")
    found, wanted = read_shapes(folder), read_shapes(policy)
    if not found:
        raise ConfigError(f"{key} has no weights: there is no *.safetensors in it; {cure}")
    shared = sorted(found.keys() & wanted.keys())
    other = next(
        (
            f"{name} is {list(found[name])} instead of {list(wanted[name])}"
            for name in shared
            if found[name] != wanted[name]
        ),
        None,
    )
    if other is None and wanted and not shared:
        other = "they have no tensor in common"
    if other is not None:
        raise ConfigError(f"{key} cannot replace model.path={str(policy)!r} in the servers: {other}")


class BaselinesListener(RunListener):
    """Plays the validation rows with each baseline before training; a resumed run does not."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config = config

    def on_open(self, opened: Opened) -> None:
        if opened.resumed_at is None and self._config.data.val_files:
            check_baselines(self._config.tracking.baselines, policy=Path(self._config.model.path))

    def on_begin(self, run: Run) -> None:
        if not run.is_resumed:
            for name, folder in self._config.tracking.baselines.items():
                run.validate_other(name, folder)


def baselines(config: Config, run_dir: RunDir) -> RunListener | None:
    return BaselinesListener(config, run_dir) if config.tracking.baselines else None
