"""Verified reads of a journal's file, for the journal itself and for other processes that inspect it.

```
events     seq, time (wall clock, informational), fields of `Event`, checksum chained to the previous event; a
           snapshot replaces all events before it, so it is the first one and begins the chain
attempts   number, (group_id, owner, member), checksum, Arrow IPC stream of one trajectory
tasks      group_id -> task_id, and its checksum
facts      name -> value, and its checksum: settings of the run when it began; where the archive ends
archive    number, zlib of JSON rows (group id, step, why dropped, task id), checksum chained to the previous
           row: the groups that ended before the snapshot. No restart reads them. Since format 3
head       one row: `Head`
```
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.buffer.checksums import (
    NOTHING,
    AttemptKey,
    Head,
    attempt_checksum,
    boot_id,
    read_write_count,
    row_checksum,
    toggled,
)
from agentrl.buffer.events import Event, EventKind
from agentrl.errors import CheckpointError

FORMAT = "3"
FORMATS = ("2", FORMAT)
"""Formats that can be read and continued. A snapshot turns a journal of format 2 into one of format 3."""
COLUMNS = "kind, group_id, owner, member, step, version, versions, reason, accuracy"

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors that sqlite3 raises for a damaged file.

UnicodeDecodeError: its error message contains a damaged name.
"""

_UNREACHABLE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,  # a reader may not undo what a writer that died has begun
}
"""Primary codes of errors that do not mean that the content is damaged."""


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """Index entry of a stored trajectory: its number in the table, key, size and checksum."""

    number: int
    key: AttemptKey
    num_bytes: int
    checksum: bytes

    @classmethod
    def of(cls, number: int, key: AttemptKey, data: bytes) -> StoredAttempt:
        """Return the entry for `data`."""
        return cls(number, key, len(data), attempt_checksum(key, data))

    def is_of(self, data: bytes) -> bool:
        """Return whether the entry matches `data`."""
        try:
            return self == StoredAttempt.of(self.number, self.key, data)
        except TypeError:  # damage changed the type of a key
            return False

    @property
    def entry(self) -> bytes:
        """Checksum of the entry without its data."""
        return row_checksum((*self.key, self.num_bytes, self.checksum.hex()))


@dataclass(frozen=True, slots=True)
class ArchivedGroup:
    """A group that ended before the last snapshot.

    step: that consumed it, else -1. dropped_for: "" if it was consumed.
    """

    group_id: int
    step: int
    dropped_for: str
    task_id: str


def archive_checksum(number: int, data: bytes, previous: bytes) -> bytes:
    """Return the checksum of a row of the archive that follows one with checksum `previous`."""
    return row_checksum((number, hashlib.blake2b(data, digest_size=32).hexdigest()), previous)


def archive_position(facts: Mapping[str, str]) -> tuple[int, bytes]:
    """Return number and checksum of the archive's last row."""
    if "archive" not in facts:
        return 0, NOTHING
    number, checksum = facts["archive"].split()
    return int(number), bytes.fromhex(checksum)


def set_of(stored: Iterable[StoredAttempt]) -> bytes | None:
    """Return the order-independent checksum of a set of attempts; None if a record is damaged."""
    checksums = NOTHING
    try:
        for attempt in stored:
            checksums = toggled(checksums, attempt.entry)
    except (AttributeError, TypeError):  # damage changed the type of a value
        return None
    return checksums


def count_path(path: Path) -> Path:
    """Return the path of the file with the write count of the journal at `path`."""
    return path.with_name(f"{path.name}-writes")


def read_answered(path: Path) -> tuple[int, str] | None:
    """Return the number of acknowledged writes to the journal at `path` and their boot id; None if there is
    no record of it.

    Raises:
        CheckpointError: the file with the count is damaged or cannot be read.
    """
    try:
        return read_write_count(count_path(path))
    except ValueError as error:
        raise damaged(path, f"{count_path(path).name}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{count_path(path)} cannot be read: {error.strerror}") from error


def primary_code(error: Exception) -> int:
    """Return SQLite's primary code of an error; SQLITE_ERROR if it is not SQLite's own."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF


def described(error: Exception) -> str:
    """Return sqlite3's description of the damage."""
    return "its tables are malformed" if isinstance(error, UnicodeDecodeError) else str(error)


def damaged(path: Path | None, what: str) -> CheckpointError:
    """Return the error for damage `what`; it says how to recover."""
    return CheckpointError(
        f"the journal {path} is damaged: {what}. Move {path}* away to continue from the newest "
        "checkpoint, which has its own copy of the buffer; `agentrl audit` on the run's folder "
        "lists the intact records"
    )


class Records:
    """Reads and verifies records through an open connection. `path` names the journal in errors.

    Every method raises CheckpointError if a record is damaged.
    """

    def __init__(self, database: sqlite3.Connection, path: Path | None) -> None:
        self._database = database
        self._path = path

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Records]:
        """Open a read-only snapshot of the journal at `path`. Its run may continue to write.

        Raises:
            CheckpointError: the journal is damaged, has another format, or lacks acknowledged writes.
        """
        # Read the count before the journal: a write in between only makes the journal longer than the count.
        answered = read_answered(path)
        try:
            database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        except sqlite3.Error as error:
            raise CheckpointError(f"the journal {path} cannot be read: {error}") from error
        try:
            records = cls(database, path)
            records.begin()
            records.check_format()
            records.check_writes(records.head(), answered)
            yield records
        finally:
            database.close()

    def begin(self) -> None:
        """Begin a read transaction: all further reads see one snapshot, whatever is written meanwhile."""
        list(self._rows("BEGIN"))

    @property
    def is_new(self) -> bool:
        """Whether the database has no tables yet."""
        return not list(self._rows("SELECT 1 FROM sqlite_master LIMIT 1"))

    def check_format(self) -> None:
        """Raise CheckpointError unless the journal has the format of this version."""
        formats = [value for name, value in self._rows("SELECT name, value FROM facts") if name == "format"]
        if len(formats) != 1 or formats[0] not in FORMATS:
            raise CheckpointError(
                f"the journal {self._path} has format {formats[0] if formats else None}, this "
                f"version reads {' and '.join(FORMATS)}: continue with the version that started the run, or "
                f"move {self._path}* away to continue from the newest checkpoint"
            )

    def check_writes(self, head: Head, answered: tuple[int, str] | None) -> None:
        """Raise CheckpointError if the journal lacks acknowledged writes.

        This is not checked after a reboot: with `buffer.journal_sync=process`, a power loss legitimately
        loses writes that were not on the disk yet.
        """
        if answered is not None and head.num_writes < answered[0] and answered[1] == boot_id():
            raise damaged(
                self._path,
                f"its last {answered[0] - head.num_writes} of {answered[0]} writes are lost (a "
                f"damaged {self._path}-wal); events 1 to {head.num_events} are intact",
            )

    def head(self) -> Head:
        """Return the journal's head."""
        rows = list(self._rows("SELECT num_writes, num_events, event, attempts, checksum FROM head"))
        head = Head.of_row(rows[0]) if len(rows) == 1 else None
        if head is None:
            raise damaged(self._path, "its head does not match its checksum")
        return head

    def events(self, head: Head | None = None) -> Iterator[tuple[int, Event]]:
        """Yield (seq, event) in order.

        Verifies the checksum of each event, and the whole chain against the head.
        """
        head = self.head() if head is None else head
        chain = _Chain(self._path, head)
        for *row, found in self._rows(
            f"SELECT seq, time, {COLUMNS}, checksum FROM events ORDER BY seq", left=chain.left
        ):
            yield chain.follow(row, found)
        chain.end()

    def attempts(self, head: Head | None = None) -> list[StoredAttempt]:
        """Return the entries of all stored attempts, verified against the head without reading their data."""
        head = self.head() if head is None else head
        stored = self.stored()
        if set_of(stored) != head.attempts:
            for attempt in stored:
                self.data_of(attempt)  # raises an error that names the damaged attempt
            raise damaged(
                self._path,
                "the stored attempts do not match the journal: one is missing, or one was not "
                f"deleted; the {len(stored)} stored attempts are intact",
            )
        return stored

    def stored(self) -> list[StoredAttempt]:
        """Return the entries of all stored attempts without verification."""
        rows = self._rows("SELECT number, group_id, owner, member, LENGTH(data), checksum FROM attempts")
        return [
            StoredAttempt(number, (group_id, owner, member), *others)
            for number, group_id, owner, member, *others in rows
        ]

    def data_of(self, attempt: StoredAttempt) -> bytes:
        """Return what is stored of an attempt, verified against its checksum."""
        return self.data_of_all([attempt])[0]

    def data_of_all(self, attempts: Sequence[StoredAttempt]) -> list[bytes]:
        """Return what is stored of each attempt, verified against its checksum.

        It is one query, because a thread that begins or ends one may wait for the interpreter's lock.
        """
        found = dict(
            self._rows(
                "SELECT number, data FROM attempts WHERE number IN (SELECT value FROM json_each(?))",
                json.dumps([attempt.number for attempt in attempts]),
            )
        )
        return [self._verified(attempt, found.get(attempt.number)) for attempt in attempts]

    def _verified(self, attempt: StoredAttempt, data: object) -> bytes:
        if not isinstance(data, bytes) or not attempt.is_of(data):
            group_id, owner, member = attempt.key
            raise damaged(
                self._path,
                f"the attempt of group {group_id}, member {member}, by {owner!r} does not match its checksum",
            )
        return data

    def tasks(self) -> dict[int, str]:
        """Return the task id of each group: group id -> task id."""
        return dict(self._checked("task of group", "SELECT group_id, task_id, checksum FROM tasks"))

    def ended(self) -> Iterator[ArchivedGroup]:
        """Yield the groups that ended before the snapshot, in the order of snapshots."""
        position = archive_position(self.facts())
        number, previous = 0, NOTHING
        if position[0]:
            for number, data, checksum in self._rows(
                "SELECT number, data, checksum FROM archive ORDER BY number"
            ):
                if not isinstance(data, bytes) or archive_checksum(number, data, previous) != checksum:
                    raise damaged(self._path, f"row {number} of the archive does not match its checksum")
                previous = checksum
                yield from (ArchivedGroup(*row) for row in json.loads(zlib.decompress(data)))
        if (number, previous) != position:
            raise damaged(
                self._path, f"its archive should end with row {position[0]}, but ends with {number}"
            )

    def facts(self) -> dict[str, str]:
        return dict(self._checked("fact", "SELECT name, value, checksum FROM facts"))

    def _checked(self, what: str, query: str) -> Iterator[tuple[Any, Any]]:
        for name, value, checksum in self._rows(query):
            if not _matches((name, value), checksum):
                raise damaged(self._path, f"the {what} {name!r} does not match its checksum")
            yield name, value

    def _rows(
        self, query: str, *values: object, left: Callable[[], str] = lambda: ""
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query.

        If SQLite fails midway, `left()` adds to the error what is still readable.
        """
        try:
            yield from self._database.execute(query, values)
        except SQLITE_ERRORS as error:
            if primary_code(error) in _UNREACHABLE:
                raise CheckpointError(f"the journal {self._path} cannot be read: {error}") from error
            raise damaged(self._path, f"{described(error)}{left()}") from error


def _matches(row: Sequence[object], checksum: object, previous: bytes = NOTHING) -> bool:
    try:
        return row_checksum(row, previous) == checksum
    except TypeError:  # damage turned a value into bytes
        return False


class _Chain:
    """Verifies the chained checksums of events that are read in order."""

    def __init__(self, path: Path | None, head: Head) -> None:
        self._path = path
        self._head = head
        self._first, self._last = 1, 0
        self._checksum = NOTHING

    def follow(self, row: Sequence[Any], checksum: Any) -> tuple[int, Event]:
        seq, _, kind, group_id, owner, member, step, version, versions, reason, accuracy = row
        if kind == EventKind.SNAPSHOT.value and not self._last and isinstance(seq, int):
            self._first, self._last = seq, seq - 1
        if seq != self._last + 1 or not _matches(row, checksum, self._checksum):
            raise damaged(
                self._path,
                f"event {self._last + 1} of {self._head.num_events} does not match its checksum{self.left()}",
            )
        self._last, self._checksum = seq, checksum
        return seq, Event(
            EventKind(kind),
            group_id,
            owner,
            member,
            step,
            version,
            tuple(json.loads(versions)),
            reason,
            accuracy,
        )

    def end(self) -> None:
        """Raise CheckpointError unless the last event read is the last one according to the head."""
        if (self._last, self._checksum) != (self._head.num_events, self._head.event):
            raise damaged(
                self._path,
                f"it should end with event {self._head.num_events}, but ends with {self._last}{self.left()}",
            )

    def left(self) -> str:
        """Return which events are readable, as the end of an error message."""
        return f"; events {self._first} to {self._last} are intact" if self._last >= self._first else ""
