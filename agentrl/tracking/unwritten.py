"""A disk that is full, read-only or gone does not end a run: what could not be written is said once, counted, and tried again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from agentrl.errors import InfrastructureError

_FULL, _FORBIDDEN = "free some space there", "make it writable"
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _FORBIDDEN),
}


class AppendedFile:
    """A file of whole lines in order. What the disk does not take stays in memory, and is written before what comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._pending = b""

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def append(self, lines: bytes) -> None:
        """Write `lines` at the end; raise OSError when some of it has to wait."""
        self._pending += lines
        self.flush()

    def flush(self) -> None:
        """Write what waits, if anything does; raise OSError when some of it has to wait on."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        while self._pending:  # a disk that fills up takes a part; the next write says why
            self._pending = self._pending[self._file.write(self._pending) :]

    def fileno(self) -> int:
        assert self._file is not None, "nothing was appended"
        return self._file.fileno()

    def close(self) -> None:
        """Let go of the file, written or not; `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class UnwrittenFiles:
    """Says what could not be written, once for each kind of file until it is written again, and counts every attempt that failed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._failing: set[str] = set()
        self._num_failed = 0

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Call `write` and return whether the disk took it.

        Args:
            what: kind of file, for people: `metrics.jsonl`, `trajectories`.
        """
        try:
            write()
        except (OSError, InfrastructureError) as error:
            self.count(what, error)
            return False
        self.clear(what)
        return True

    def clear(self, what: str) -> None:
        """Note that the disk took such a file, and say so if it did not before."""
        if what in self._failing:
            self._failing.remove(what)
            self._say(f"{what}: written again")

    def count(self, what: str, error: Exception) -> None:
        """Say and count an attempt that failed with `error`."""
        self._num_failed += 1
        if what not in self._failing:
            self._failing.add(what)
            self._say(f"{what}: {reason(error)}; the run goes on, and tries again at its next step")

    def take_count(self) -> int:
        """Return how many attempts failed since the last call."""
        num_failed, self._num_failed = self._num_failed, 0
        return num_failed


def reason(error: Exception) -> str:
    """Return in one line what the disk refused, where, and what would help.

    What would help is told by the system's words: an error from another process has lost its number.
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    cures = [cure for number, cure in _CURES.items() if os.strerror(number) in text and cure not in text]
    return "; ".join([text, *cures[:1]])
