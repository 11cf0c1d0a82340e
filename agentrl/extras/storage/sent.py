"""Results that go to object storage: a command writes a local folder, which is sent when it is finished.

The index of the folder says first that it is being sent, and at last what is in it: a reader gets the old
folder, the new one, or an error.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.data.folder_index import INDEX, FolderIndex, stored
from agentrl.errors import ConfigError, StorageError
from agentrl.extras.storage.fetched import cache_folder, fetch_files, read_index
from agentrl.extras.storage.storage import StoragePath

_TEMPORARY = (".lock", "-journal", "-wal", "-shm", ".partial")


@contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """`agentrl.data.storage.new_folder` of a URL."""
    place = StoragePath.of(out)
    if place.files():
        raise ConfigError(f"{str(place)!r} exists and is not empty; choose a folder that does not exist")
    place.probe()
    with tempfile.TemporaryDirectory(prefix="agentrl-out-") as scratch:
        folder = Path(scratch) / (place.name or "out")
        yield folder
        send_folder(folder, place)


@contextmanager
def mirrored_folder(out: str, *, sends_after_error: bool) -> Iterator[Path]:
    """`agentrl.data.storage.mirrored_folder` of a URL."""
    place = StoragePath.of(out)
    mirror = _mirror(place)
    folder, known = mirror / (place.name or "out"), mirror / INDEX
    place.probe()
    index = read_index(place)
    sent = FolderIndex.model_validate_json(known.read_bytes()) if known.is_file() else None
    if index is not None and index.files is not None and index != sent:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{str(place)!r} was changed from elsewhere since {str(folder)!r} was copied from it; remove "
                "that copy to continue with what is there, or choose another --out"
            )
        shutil.rmtree(folder, ignore_errors=True)
        fetch_files(place, folder, index.files)
        known.write_bytes(index.to_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        if not sends_after_error:
            raise
        try:
            known.write_bytes(send_folder(folder, place).to_bytes())
        except StorageError as error:
            sys.stderr.write(f"{error}; the results are kept in {folder}\n")
        raise
    known.write_bytes(send_folder(folder, place).to_bytes())


@contextmanager
def mirrored_file(out: str) -> Iterator[Path]:
    """`agentrl.data.storage.mirrored_file` of a URL."""
    place = StoragePath.of(out)
    place.parent.probe()
    file = _mirror(place) / place.name
    file.parent.mkdir(parents=True, exist_ok=True)
    yield file
    place.upload(file)


def _mirror(place: StoragePath) -> Path:
    """Return the local folder of what is written to `place`."""
    return cache_folder() / "mirrors" / hashlib.sha256(place.url.encode()).hexdigest()[:20]


def send_folder(folder: Path, place: StoragePath) -> FolderIndex:
    """Send all files of a folder, and remove files that its former index names and that are gone.

    Raises:
        StorageError: a file could not be sent; then the index says that the folder is incomplete.
    """
    former = read_index(place)
    old = (former.files if former is not None else None) or {}
    files: dict[str, tuple[int, str]] = {}
    paths = {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(_TEMPORARY) and path.name != INDEX
    }
    changed = {name: path for name, path in paths.items() if stored(path) != old.get(name)}
    if former is not None and former.files is not None and not changed and set(old) == set(paths):
        return former
    (place / INDEX).write(FolderIndex(files=None).to_bytes())
    for name, path in paths.items():
        files[name] = (place / name).upload(path) if name in changed else old[name]
    for name in set(old) - set(paths):
        (place / name).delete()
    index = FolderIndex(files=files)
    (place / INDEX).write(index.to_bytes())
    return index
