"""The upload of a run (`trainer.upload_to`): from before its processes start until they are gone."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from agentrl.config.schema import Config
from agentrl.controller.listeners import FinishedStep, Opened, RunListener
from agentrl.controller.run_dir import RunDir
from agentrl.extras.storage.storage import StoragePath
from agentrl.extras.storage.upload import RunUpload
from agentrl.extras.storage.uploaded import UploadIndex, claim_upload


class UploadListener(RunListener):
    """Copies the run folder in the background. index: as `claim_upload` returned it."""

    def __init__(self, config: Config, run_dir: RunDir, place: StoragePath, index: UploadIndex) -> None:
        self._config = config
        self._dir = run_dir
        self._place, self._index = place, index

    def on_open(self, opened: Opened) -> None:
        self._upload = RunUpload(
            self._place,
            self._index,
            self._dir,
            interval_s=self._config.trainer.upload_interval_s,
            say=opened.observer.say,
            snapshots=opened.needed,
        )
        self._upload.__enter__()

    def metrics(self, step: FinishedStep) -> Mapping[str, float]:
        return self._upload.metrics()

    def pinned(self) -> Collection[str]:
        return self._upload.pinned()

    def close(self, error: BaseException | None) -> None:
        self._upload.__exit__(None if error is None else type(error), error, None)


def upload(config: Config, run_dir: RunDir) -> RunListener | None:
    """Make the run folder the owner of `trainer.upload_to`, and fetch what is there if the folder is new.

    Raises:
        ConfigError: it cannot be written, or contains a run that this folder must not continue.
        StorageError: the upload cannot be fetched.
    """
    if (url := config.trainer.upload_to) is None:
        return None
    place = StoragePath.of(url)
    index = claim_upload(place, run_dir, config.trainer, say=_say_early)
    return UploadListener(config, run_dir, place, index)


def _say_early(text: str) -> None:
    """Show a message before there is a console."""
    sys.stderr.write(f"{text}\n")
