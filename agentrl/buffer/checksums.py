"""Checksums that detect damage in a journal: one per record, chained from event to event, and a head for the
whole.

SQLite itself only checks the frames of its log (`-wal`). It silently ignores everything after the first
damaged frame, so later writes would vanish unnoticed. Therefore the number of writes is also kept outside the
database, in a one-line file.
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
"""Checksum before the first event, and of an empty set of attempts."""

AttemptKey = tuple[int, str, int]
"""(group_id, owner, member)."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def row_checksum(row: Sequence[object], previous: bytes = NOTHING) -> bytes:
    """Return the checksum of a record that follows one with checksum `previous`.

    Raises TypeError if a value is bytes.
    """
    return hashlib.blake2b(json.dumps(row).encode(), digest_size=SIZE, key=previous).digest()


def attempt_checksum(key: AttemptKey, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SIZE, key=row_checksum(key)).digest()


def toggled(checksums: bytes, one: bytes) -> bytes:
    """Return the checksum of a set after adding or removing one element (XOR, so the order does not
    matter).
    """
    return (int.from_bytes(checksums) ^ int.from_bytes(one)).to_bytes(SIZE)


@dataclass(frozen=True, slots=True)
class Head:
    """Content of a journal after `num_writes` writes.

    num_events: number of events. event: checksum of the last one. attempts: checksum of the set of stored
        attempts.
    """

    num_writes: int = 0
    num_events: int = 0
    event: bytes = NOTHING
    attempts: bytes = NOTHING

    @property
    def row(self) -> tuple[int, int, bytes, bytes, bytes]:
        """The head as stored: its fields and their checksum."""
        return (self.num_writes, self.num_events, self.event, self.attempts, self._checksum)

    @classmethod
    def of_row(cls, row: Sequence[object]) -> Head | None:
        """Return the head in a database row; None if the row is damaged."""
        num_writes, num_events, event, attempts, checksum = row
        if not (
            isinstance(num_writes, int)
            and isinstance(num_events, int)
            and isinstance(event, bytes)
            and isinstance(attempts, bytes)
        ):
            return None
        head = cls(num_writes, num_events, event, attempts)
        return head if head._checksum == checksum else None

    @property
    def _checksum(self) -> bytes:
        return row_checksum((self.num_writes, self.num_events, self.event.hex(), self.attempts.hex()))


class WriteCount:
    """The number of acknowledged writes to a journal, in a file next to it, with the boot id and a checksum.

    It can be smaller than the journal's own count, because a process can die between the two writes. If it is
    larger, writes were lost.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file; OSError if it cannot be written."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def write(self, num_writes: int) -> None:
        """Record the number of acknowledged writes.

        A disk error is ignored: the number is then too small, which is harmless.
        """
        with suppress(OSError):
            os.pwrite(self._descriptor, count_line(num_writes, boot_id()), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def read_write_count(path: Path) -> tuple[int, str] | None:
    """Return the number of writes and the boot id under which they were made; None if there is no file.

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
    """Return the id of the machine's current boot; "-" if the system has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "-"


def count_line(num_writes: int, boot: str) -> bytes:
    """Return the line that a WriteCount writes."""
    return f"{num_writes:016d} {boot} {row_checksum((num_writes, boot)).hex()}\n".encode()
