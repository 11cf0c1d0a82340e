"""The upload of a run, as its start sees it: what is registered as `upload` of `agentrl.storage`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol, cast

from agentrl.config.schema import Config
from agentrl.config.storage_urls import shown
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.listeners import FinishedStep, Opened, RunListener
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


class UploadListener(RunListener):
    """Copies the run folder in the background, from before its processes start until they are gone."""

    def __init__(self, config: Config, upload: ClaimedUpload) -> None:
        self._config = config
        self._upload = upload
        self._copying = ExitStack()
        self._uploading: Uploading | None = None

    def on_open(self, opened: Opened) -> None:
        uploading = self._upload.uploading(
            interval_s=self._config.trainer.upload_interval_s,
            say=opened.observer.say,
            snapshots=opened.needed,
        )
        self._uploading = self._copying.enter_context(uploading)

    def metrics(self, step: FinishedStep) -> Mapping[str, float]:
        return {} if self._uploading is None else self._uploading.metrics()

    def pinned(self) -> Collection[str]:
        return () if self._uploading is None else self._uploading.pinned()

    def close(self) -> None:
        self._copying.close()


def upload(config: Config, run_dir: RunDir) -> RunListener | None:
    claimed = claim_upload(config.trainer, run_dir, say=_say_early)
    return None if claimed is None else UploadListener(config, claimed)


def _say_early(text: str) -> None:
    """Show a message before there is a console."""
    sys.stderr.write(f"{text}\n")


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
