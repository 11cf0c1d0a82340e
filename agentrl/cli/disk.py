"""Turns a disk-full error into one line that names the folder."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
LITTLE_BYTES = 1 << 20
"""A file system with less free space counts as full: the file that did not fit may already be removed."""


def full_disk(error: BaseException, words: Sequence[str]) -> str | None:
    """Return one line about the full disk that caused `error`; None if the cause is something else.

    An OSError of a write names no file. Then the line names the candidate folders whose file systems are
    full.

    Args:
        error: an OSError, or an exception group or chain that contains one.
        words: arguments of the command line.
    """
    found = next((leaf for leaf in _leaves(error) if isinstance(leaf, OSError) and leaf.errno in FULL), None)
    if found is None:
        return None
    places = (
        [Path(str(found.filename))]
        if found.filename
        else [place for place in _places(words) if _is_full(place)]
    )
    where = f" of {', '.join(repr(str(place)) for place in places)}" if places else ""
    return (
        f"disk full: no space is left on the file system{where}; free space there, or choose another folder"
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
        if error.__cause__ is not None:
            yield from _leaves(error.__cause__)


def _places(words: Sequence[str]) -> Iterator[Path]:
    """Yield folders that a command may write to: those in its arguments, working and temporary ones."""
    for word in words:
        path = Path(word.rpartition("=")[2]).expanduser()
        if path.is_absolute() or path.parent != Path():
            yield next(place for place in (path, *path.absolute().parents) if place.is_dir())
    yield from (Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm"))


def _is_full(place: Path) -> bool:
    return place.is_dir() and shutil.disk_usage(place).free < LITTLE_BYTES
