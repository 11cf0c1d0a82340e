"""How damage of a journal is found: a checksum per row, chained from event to event, and a head that says what there has to be.

SQLite itself checks only the frames of its log (`-wal`), and ends silently at the first that is damaged: what was written after it is
gone, as if it had never been. So the number of writes is also kept outside of the database, in a file of one line.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SIZE = 16
"""Bytes of a checksum."""
NOTHING = bytes(SIZE)
"""Checksum before the first event, and of no attempts."""

AttemptKey = tuple[int, str, int]
"""(group_id, owner, member)."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def row_checksum(row: Sequence[object], previous: bytes = NOTHING) -> bytes:
    """Return the checksum of a row behind one with the checksum `previous`; raise TypeError where a value is bytes."""
    return hashlib.blake2b(json.dumps(row).encode(), digest_size=SIZE, key=previous).digest()


def attempt_checksum(key: AttemptKey, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SIZE, key=row_checksum(key)).digest()


def toggled(checksums: bytes, one: bytes) -> bytes:
    """Return the checksum of a set with one member more, or one less."""
    return (int.from_bytes(checksums) ^ int.from_bytes(one)).to_bytes(SIZE)


@dataclass(frozen=True, slots=True)
class Head:
    """What a journal holds after `num_writes` writes: the last event with its checksum, and the checksum of all attempts together."""

    num_writes: int = 0
    num_events: int = 0
    event: bytes = NOTHING
    attempts: bytes = NOTHING

    @property
    def row(self) -> tuple[int, int, bytes, bytes, bytes]:
        """The head as it is stored: its fields and their own checksum."""
        return (self.num_writes, self.num_events, self.event, self.attempts, self._checksum)

    @classmethod
    def of_row(cls, row: Sequence[object]) -> Head | None:
        """Return the head in a row; None if the row is damaged."""
        num_writes, num_events, event, attempts, checksum = row
        if not (isinstance(num_writes, int) and isinstance(num_events, int) and isinstance(event, bytes) and isinstance(attempts, bytes)):
            return None
        head = cls(num_writes, num_events, event, attempts)
        return head if head._checksum == checksum else None

    @property
    def _checksum(self) -> bytes:
        return row_checksum((self.num_writes, self.num_events, self.event.hex(), self.attempts.hex()))


class WriteCount:
    """Number of writes to a journal that were answered, in a file beside it, with the boot of the machine and a checksum.

    It may be less than what the journal holds, for a process may die between the two. It is more where writes were lost.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file; OSError if it cannot be written."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def write(self, num_writes: int) -> None:
        """Note that so many writes were answered. A refusal of the disk is no harm: the number is then smaller than it could be."""
        with suppress(OSError):
            os.pwrite(self._descriptor, count_line(num_writes, boot_id()), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def read_write_count(path: Path) -> tuple[int, str] | None:
    """Return the number of writes and the boot of the machine that made them; None without the file.

    Raises:
        ValueError: the file is damaged.
        OSError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if not data:  # its writer died before the first line
        return None
    try:
        number, boot, _ = data.decode("ascii").split(" ")
        is_whole = count_line(int(number), boot) == data
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ValueError("its line does not match its checksum")
    return int(number), boot


@functools.cache
def boot_id() -> str:
    """Return what is another after each start of the machine; "-" where the system does not say it."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "-"


def count_line(num_writes: int, boot: str) -> bytes:
    """Return the content of the file of a WriteCount."""
    return f"{num_writes:016d} {boot} {row_checksum((num_writes, boot)).hex()}\n".encode()
