"""What this room registers as `objects` of `agentrl.storage`: `agentrl.data.storage.Storage`."""

from __future__ import annotations

from pathlib import Path

from agentrl.data.checkpoint_files import MANIFEST
from agentrl.errors import ConfigError
from agentrl.extras.storage import fetched as copies
from agentrl.extras.storage.fetched import fetched_file, fetched_folder
from agentrl.extras.storage.sent import mirrored_file, mirrored_folder, new_folder
from agentrl.extras.storage.storage import StoragePath

__all__ = [
    "fetched",
    "fetched_checkpoint",
    "fetched_file",
    "fetched_folder",
    "mirrored_file",
    "mirrored_folder",
    "new_folder",
]


def fetched(url: str) -> Path:
    return fetched_folder(url) if copies.is_folder(url) else fetched_file(url)


def fetched_checkpoint(url: str) -> Path:
    place = StoragePath.of(url)
    manifest = (place / MANIFEST).read()
    if manifest is None:
        raise ConfigError(
            f"{str(place)!r} is not a checkpoint: it has no {MANIFEST}; checkpoints are folders such as "
            "checkpoints/step_000020"
        )
    return copies.fetched_checkpoint(place, manifest)
