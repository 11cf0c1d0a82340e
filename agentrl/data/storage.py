"""Files and folders that may be in object storage. A local path is itself. Of a URL, what is registered as
`objects` of `agentrl.storage` keeps a copy on this machine, and sends what was written into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, cast

from agentrl.config.data import DataConfig
from agentrl.config.storage_urls import is_url, shown
from agentrl.data.atomic_files import require_new_folder
from agentrl.registered import required


class Storage(Protocol):
    """What reads and writes URLs. Every method raises ConfigError of a wrong URL, and StorageError."""

    def fetched_file(self, url: str) -> Path: ...
    def fetched_folder(self, url: str) -> Path: ...
    def fetched(self, url: str) -> Path: ...
    def fetched_checkpoint(self, url: str) -> Path: ...
    def new_folder(self, url: str) -> AbstractContextManager[Path]: ...
    def mirrored_folder(self, url: str, *, sends_after_error: bool) -> AbstractContextManager[Path]: ...
    def mirrored_file(self, url: str) -> AbstractContextManager[Path]: ...


def storage_of(url: str) -> Storage:
    """Return what reads and writes a URL.

    Raises:
        ConfigError: nothing that does is installed.
    """
    return cast(Storage, required("agentrl.storage", "objects", by=shown(url)))


def local_file(path: str) -> Path:
    """Return the file, of a URL its copy.

    Raises:
        ConfigError: the URL is wrong, or there is no such file.
        StorageError: it cannot be read.
    """
    return storage_of(path).fetched_file(path) if is_url(path) else Path(path)


def local_folder(path: str) -> Path:
    """Return the folder, of a URL its copy; raises as `local_file`."""
    return storage_of(path).fetched_folder(path) if is_url(path) else Path(path)


def local_path(path: str) -> Path:
    """Return the file or folder, of a URL its copy; raises as `local_file`."""
    return storage_of(path).fetched(path) if is_url(path) else Path(path)


def local_checkpoint(path: str) -> Path:
    """Return the folder of a checkpoint, of a URL a copy whose files have the hashes of the manifest.

    Raises:
        ConfigError: the URL names no checkpoint.
        StorageError: it cannot be read, or is damaged.
    """
    return storage_of(path).fetched_checkpoint(path) if is_url(path) else Path(path)


def with_local_files(data: DataConfig) -> DataConfig:
    """Return the section with URLs replaced by local copies: all processes of a run read the same rows."""
    local = {
        key: tuple(str(local_file(path)) if is_url(path) else path for path in getattr(data, key))
        for key in ("train_files", "val_files")
    }
    return data.model_copy(update=local)


@contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """Yield a folder that does not exist yet, for `out`: itself, or a local one that is sent at the end.

    Raises:
        ConfigError: `out` exists, or cannot be written.
        StorageError: it could not be sent.
    """
    if is_url(out):
        with storage_of(out).new_folder(out) as folder:
            yield folder
    else:
        require_new_folder(Path(out))
        yield Path(out)


@contextmanager
def mirrored_folder(out: str | Path, *, sends_after_error: bool = True) -> Iterator[Path]:
    """Yield the folder of results that grow: `out` itself, or a local copy of what is at the URL `out`.

    What changed in the copy is sent at the end. The copy stays: if the command is killed, the same command
    on this machine continues with everything that was finished.

    sends_after_error: also send what is there if the block raises.

    Raises:
        ConfigError: `out` cannot be written, or was changed from elsewhere since the copy was made.
        StorageError: it could not be sent.
    """
    if is_url(str(out)):
        with storage_of(str(out)).mirrored_folder(str(out), sends_after_error=sends_after_error) as folder:
            yield folder
    else:
        yield Path(out)


@contextmanager
def mirrored_file(out: str) -> Iterator[Path]:
    """Yield the file to write: `out` itself, or a local one that is sent to the URL `out` at the end.

    What is written beside a local one stays on this machine, so that an interrupted command continues.

    Raises:
        ConfigError: `out` cannot be written.
        StorageError: it could not be sent.
    """
    if is_url(out):
        with storage_of(out).mirrored_file(out) as file:
            yield file
    else:
        yield Path(out)
