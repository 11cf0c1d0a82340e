"""Checks the models of `tracking.baselines` before the run starts.

Servers load them in turn before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.plugins.sources import absence
from agentrl.weights.verify import read_shapes


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
