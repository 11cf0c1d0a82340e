"""Local copies of inputs in object storage: data files and folders of models.

Rows are read at random for weeks, and servers read models from folders: a file is fetched once, whole, into
a cache (`AGENTRL_CACHE`, by default ~/.cache/agentrl), and read there. The name of a copy contains a hash of
the URL and of the file's size and time: a file that was replaced is fetched again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from agentrl.config.storage_urls import problem_of
from agentrl.data.checkpoint_files import MANIFEST, parse_manifest
from agentrl.data.folder_index import INDEX, FolderIndex, below
from agentrl.errors import ConfigError, StorageError
from agentrl.extras.storage.storage import StoragePath


def cache_folder() -> Path:
    """Return the folder of all local copies."""
    return Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")


def fetched_file(url: str) -> Path:
    """Return the local copy of a file; of file:///PATH, the file itself.

    Raises:
        ConfigError: the URL is wrong, or there is no such file.
        StorageError: it cannot be read.
    """
    if (local := _local(url)) is not None:
        return local
    place = StoragePath.of(url)
    identity = place.identity()
    if identity is None:
        raise ConfigError(f"file {str(place)!r} does not exist")
    target = cache_folder() / "files" / _key(url, identity) / place.name
    if not target.is_file():
        place.download(target)
    return target


def fetched_folder(url: str) -> Path:
    """Return the local copy of a folder; of file:///PATH, the folder itself.

    A folder that agentrl sent is compared with its index, file by file. Of other folders, all files that a
    listing shows are fetched.

    Raises:
        ConfigError: the URL is wrong, or there is no such folder.
        StorageError: it cannot be read, or differs from its index.
    """
    if (local := _local(url)) is not None:
        return local
    place = StoragePath.of(url)
    index = read_index(place)
    if index is None:
        listed = place.files()
        if not listed:
            raise ConfigError(f"folder {str(place)!r} does not exist or is empty")
        files: dict[str, tuple[int, str] | None] = dict.fromkeys(listed)
        what = json.dumps(listed)
    else:
        files, what = dict(complete(index, place)), index.to_bytes().decode()
    target = cache_folder() / "folders" / _key(url, what) / place.name
    if not target.is_dir():
        fetch_files(place, target, files)
    return target


def complete(index: FolderIndex, place: StoragePath) -> dict[str, tuple[int, str]]:
    """Return the files of a folder; raise StorageError if it was not sent completely."""
    if index.files is None:
        raise StorageError(
            f"{str(place)!r} is incomplete: the command that sent it did not end; run it again"
        )
    return index.files


def fetched_checkpoint(place: StoragePath, manifest: bytes) -> Path:
    """Return the local copy of a checkpoint, whose files have the sizes and hashes of its manifest.

    Raises:
        StorageError: it cannot be read, or is damaged.
    """
    target = cache_folder() / "checkpoints" / _key(place.url, manifest.decode()) / place.name
    if not target.is_dir():
        fetch_checkpoint(place, manifest, target)
    return target


def fetch_checkpoint(place: StoragePath, manifest: bytes, target: Path) -> None:
    """Fetch a checkpoint into `target`, which appears complete or not at all."""
    own = {MANIFEST: (len(manifest), hashlib.sha256(manifest).hexdigest())}
    fetch_files(place, target, {**parse_manifest(manifest, str(place)).files, **own})


def fetch_files(place: StoragePath, target: Path, files: Mapping[str, tuple[int, str] | None]) -> None:
    """Fetch files of a folder into `target`, which appears complete or not at all.

    Args:
        files: relative path -> bytes and sha256, None if they are unknown.
    """
    partial = target.with_name(f"{target.name}.partial_{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, expected in files.items():
            (place / name).download(below(partial, name), expected=expected)
        if not target.is_dir():  # else another process was faster
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_index(place: StoragePath) -> FolderIndex | None:
    """Return the index of a folder that agentrl sent; None if it has none.

    Raises:
        StorageError: it is damaged.
    """
    content = (place / INDEX).read()
    if content is None:
        return None
    try:
        return FolderIndex.model_validate_json(content)
    except ValidationError as error:
        raise StorageError(f"{place / INDEX} is damaged; send the folder again") from error


def is_folder(url: str) -> bool:
    """Return whether a URL names a folder."""
    local = _local(url)
    return StoragePath.of(url).is_folder() if local is None else local.is_dir()


def _local(url: str) -> Path | None:
    if problem := problem_of(url):
        raise ConfigError(problem)
    parts = urlsplit(url)
    return Path(parts.path) if parts.scheme == "file" else None


def _key(url: str, what: str) -> str:
    return hashlib.sha256(f"{url}\n{what}".encode()).hexdigest()[:20]
