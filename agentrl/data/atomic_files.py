"""Atomic writing of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ConfigError, DiskError


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; at the end, rename it to `target`.

    It is removed if an exception is raised. Parent folders are created. An existing `target` stays until it
    is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def require_writable_file(path: Path) -> None:
    """Raise ConfigError if no file can be written at `path`; called before the work that is to end there."""
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name a file in it")
    _require_writable_parent(path)


def require_new_folder(folder: Path) -> None:
    """Raise ConfigError unless `folder` is empty, or does not exist and can be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists and is not empty; choose a folder that does not exist")
    _require_writable_parent(folder)


def _require_writable_parent(path: Path) -> None:
    parent = next(place for place in path.absolute().parents if place.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"{str(path)!r} cannot be written: {str(parent)!r} is no folder that may be written"
        )


def sync(path: Path) -> None:
    """Write a file or folder through to the disk: after a power failure it is as it is now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` atomically: a reader or a crash sees either the old file or the new one.

    Raises:
        DiskError: the disk is full or read-only; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DiskError(f"{path} could not be written: {error.strerror}") from error
