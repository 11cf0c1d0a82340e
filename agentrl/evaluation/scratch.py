"""Temporary folders of evaluations. Those of killed evaluations are removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "agentrl-eval-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder, and remove it afterwards. Folders of killed evaluations are removed first.

    The process holds a lock on its folder. The system releases it when the process ends, however it ends.
    """
    for abandoned in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_unlocked(abandoned)
    # Under a hidden name until it is locked: another evaluation that starts now would remove it.
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    lock = os.open(hidden, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(lock)


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder unless a living process has locked it, or another user owns it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
