"""Keeps a run alive on a full or read-only disk: failed writes are reported once, counted and retried."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from agentrl.errors import InfrastructureError
from agentrl.tracking.seals import last_checksum, sealed_line

_FULL, _FORBIDDEN = "free some space there", "make it writable"
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _FORBIDDEN),
}


class AppendedFile:
    """An append-only file of lines.

    Lines that the disk refuses stay in memory and are written first next time. A last line that a crash cut
    off is removed when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._pending = b""
        self._checksum: int | None = None  # of the last line, pending ones included; None: not read yet
        self._may_be_torn = True

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def append(self, lines: bytes) -> None:
        """Append `lines`. Raises OSError if some of them could not be written; they stay pending."""
        self._pending += lines
        self.flush()

    def append_records(self, *lines: bytes) -> None:
        """Append lines of JSON with their checksums (`agentrl.tracking.seals`).

        Raises:
            OSError: as `append`.
            CheckpointError: the lines that are there already are damaged.
        """
        if self._checksum is None:
            self._checksum = last_checksum(self.path)
        sealed = b""
        for line in lines:
            own, self._checksum = sealed_line(line, self._checksum)
            sealed += own
        self.append(sealed)

    def flush(self) -> None:
        """Write pending lines. Raises OSError if some of them could not be written; they stay pending."""
        if self._file is None:
            if self._may_be_torn:
                _remove_torn_line(self.path)
                self._may_be_torn = False
            self._file = self.path.open("ab", buffering=0)
        while self._pending:  # a disk that fills up accepts a part; the next write raises the reason
            self._pending = self._pending[self._file.write(self._pending) :]

    def fileno(self) -> int:
        assert self._file is not None, "nothing was appended"
        return self._file.fileno()

    def close(self) -> None:
        """Close the file, even with pending lines; `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self._pending:  # the file may be rewritten before it is opened again
            self._checksum = None


def _remove_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


class UnwrittenFiles:
    """Reports failed writes, once per kind of file until it can be written again, and counts all of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._failing: set[str] = set()
        self._num_failed = 0

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Call `write` and return whether it succeeded.

        Args:
            what: kind of file, for messages: `metrics.jsonl`, `trajectories`.
        """
        try:
            write()
        except (OSError, InfrastructureError) as error:
            self.count(what, error)
            return False
        self.clear(what)
        return True

    def clear(self, what: str) -> None:
        """Record a successful write of this kind; report it if the last one failed."""
        if what in self._failing:
            self._failing.remove(what)
            self._say(f"{what}: written again")

    def count(
        self, what: str, error: Exception, *, then: str = "the run continues and retries at its next step"
    ) -> None:
        """Count a write that failed with `error`; report it, and what happens `then`, if it is the first of
        its kind.
        """
        self._num_failed += 1
        if what not in self._failing:
            self._failing.add(what)
            self._say(f"{what}: {reason(error)}; {then}")

    def take_count(self) -> int:
        """Return how many writes failed since the last call."""
        num_failed, self._num_failed = self._num_failed, 0
        return num_failed


def reason(error: Exception) -> str:
    """Return in one line what failed, where, and a cure.

    The cure is found by the system's error text, because an error from another process has lost its errno.
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    cures = [cure for number, cure in _CURES.items() if os.strerror(number) in text and cure not in text]
    return "; ".join([text, *cures[:1]])
