"""Turns errors of the file system into one line that names the file."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
_CURES = {
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "check who may read and write it",
    errno.EPERM: "check who may read and write it",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of this path is a file; choose another",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "a link leads back to itself",
}
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


def refused_path(error: BaseException) -> str | None:
    """Return one line about the path that the system refused; None if the error is of another kind."""
    leaves = list(_leaves(error))
    if len(leaves) != 1 or not isinstance(leaves[0], OSError):
        return None
    refused = leaves[0]
    if refused.filename is None or refused.errno not in _CURES:
        return None
    path = refused.filename2 or refused.filename
    return (
        f"{os.fsdecode(path)!r}: {os.strerror(refused.errno)}; {_CURES[refused.errno]} (--debug shows where)"
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
