"""The upload of a run, as its start sees it: what is registered as `upload` of `agentrl.storage`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from agentrl.config.storage_urls import shown
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.run_dir import RunDir
from agentrl.registered import required


class Uploading(Protocol):
    """A copy that is kept up to date in the background."""

    def metrics(self) -> dict[str, float]:
        """Return how far it is behind, for the metrics of a step."""

    def pinned(self) -> Collection[str]:
        """Return the names of the checkpoints that must not be removed now."""


class ClaimedUpload(Protocol):
    """A place in object storage that belongs to this run folder."""

    def uploading(
        self, *, interval_s: float, say: Callable[[str], None], snapshots: Callable[[int], Collection[Path]]
    ) -> AbstractContextManager[Uploading]:
        """Return the upload. snapshots: returns the folders of the run that a resume after a step needs."""


def claim_upload(
    trainer: TrainerConfig, run_dir: RunDir, *, say: Callable[[str], None]
) -> ClaimedUpload | None:
    """Make the run folder the owner of `trainer.upload_to`, and fetch what is there if the folder is new.

    Returns None without `trainer.upload_to`.

    Raises:
        ConfigError: it cannot be written, or contains a run that this folder must not continue.
        StorageError: the upload cannot be fetched.
    """
    if (url := trainer.upload_to) is None:
        return None
    claim = required("agentrl.storage", "upload", by=f"trainer.upload_to={shown(url)}")
    return cast(ClaimedUpload, claim(url, run_dir, trainer, say=say))
