"""The journal of a run: every event of its ledger and all finished trajectories, in one SQLite file (tables:
`records`).

Why SQLite: it is in the standard library, a transaction takes about ten microseconds, and another process can
read while one writes (`agentrl audit`). Writes survive the death of any process; with `is_synced` they also
survive a power loss.
Where processes cannot share memory by a file (NFS and the like), SQLite's write-ahead log does not work; a
rollback journal is used instead.
Damage is detected: every record has a checksum (`checksums`), which is verified before use.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.buffer.checksums import AttemptKey, Head, WriteCount, row_checksum, toggled
from agentrl.buffer.events import Event
from agentrl.buffer.file_systems import is_shared
from agentrl.buffer.records import (
    COLUMNS,
    FORMAT,
    SQLITE_ERRORS,
    Records,
    StoredAttempt,
    archive_checksum,
    archive_position,
    count_path,
    damaged,
    described,
    primary_code,
    read_answered,
)
from agentrl.buffer.snapshots import Snapshot
from agentrl.errors import CheckpointError, JournalError

FILE = "ledger.sqlite"

_SCHEMA = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, group_id INTEGER NOT NULL, owner TEXT NOT NULL,
    member INTEGER NOT NULL, step INTEGER NOT NULL, version INTEGER NOT NULL, versions TEXT NOT NULL, reason TEXT NOT NULL, accuracy REAL,
    checksum BLOB NOT NULL
);
-- Without an index: which attempts there are is known in memory, where no damage of an index can hide one.
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, owner TEXT NOT NULL, member INTEGER NOT NULL,
    checksum BLOB NOT NULL, data BLOB NOT NULL
);
CREATE TABLE tasks (group_id INTEGER PRIMARY KEY, task_id TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE archive (number INTEGER PRIMARY KEY, data BLOB NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE head (
    num_writes INTEGER NOT NULL, num_events INTEGER NOT NULL, event BLOB NOT NULL, attempts BLOB NOT NULL, checksum BLOB NOT NULL
);
"""  # noqa: E501
_SET_HEAD = "UPDATE head SET num_writes = ?, num_events = ?, event = ?, attempts = ?, checksum = ?"
_SET_FACT = "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)"
_ADD_EVENT = (
    f"INSERT INTO events (seq, time, {COLUMNS}, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_ADD_ARCHIVE = (
    "CREATE TABLE IF NOT EXISTS archive "
    "(number INTEGER PRIMARY KEY, data BLOB NOT NULL, checksum BLOB NOT NULL)"
)
_NO_SHARED_MEMORY = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}
"""Primary codes of SQLite where it cannot share memory by a file.

If the database itself cannot be written, it gives them again without a log.
"""
_BUSY_S = 10.0
"""Seconds that a write waits for a reader's lock."""

Statement = tuple[str, Sequence[Sequence[object]]]


class Journal:
    """The journal. One process writes it. It is not thread-safe: the caller must serialize all calls.

    facts: about the whole run, by name; read only (see `set_fact`).
    """

    def __init__(self, path: Path | None, *, is_synced: bool = False) -> None:
        """Open or create the file at `path`. None: keep the journal in memory, for the life of the process.

        Raises:
            JournalError: the journal cannot be written.
            CheckpointError: the journal is damaged, has lost writes, or has another format. Events are
                verified when they are read.
        """
        self._path = path
        self._head = Head()
        self._stored: dict[int, dict[str, dict[int, StoredAttempt]]] = {}  # group -> owner -> member
        self._next_number = 1
        self._count: WriteCount | None = None
        answered = None if path is None else read_answered(path)
        is_there = path is not None and path.is_file() and path.stat().st_size > 0
        try:
            self._database, self._has_log = _opened(path)
            unsynced = "NORMAL" if self._has_log else "OFF"  # neither waits for the disk at each transaction
            self._database.execute(f"PRAGMA synchronous = {'FULL' if is_synced else unsynced}")
        except SQLITE_ERRORS as error:
            raise self._unwritten(error) from error
        self._records = Records(self._database, path)
        try:
            self._begin(answered, is_there=is_there)
        except (CheckpointError, JournalError):
            self.close()
            raise

    def _begin(self, answered: tuple[int, str] | None, *, is_there: bool) -> None:
        if not self._records.is_new:
            self._open(answered)
        elif is_there and answered is not None:
            raise damaged(self._path, "its tables are missing")
        else:
            self._create()
        self.facts = self._records.facts()
        if self._path is not None:
            try:
                self._count = WriteCount(count_path(self._path))
            except OSError as error:
                raise self._unwritten(error) from error
            self._count.write(self._head.num_writes)

    def _create(self) -> None:
        tables = [(statement, [()]) for statement in _SCHEMA.strip().split(";")]
        fact = ("format", FORMAT)
        self._write(
            *tables,
            (_SET_FACT, [(*fact, row_checksum(fact))]),
            ("INSERT INTO head VALUES (?, ?, ?, ?, ?)", [self._head.row]),
        )

    def _open(self, answered: tuple[int, str] | None) -> None:
        self._records.check_format()
        head = self._head = self._records.head()
        self._records.check_writes(head, answered)
        for attempt in self._records.attempts(head):
            self._next_number = max(self._next_number, attempt.number + 1)
            self._keep(attempt)

    # -------------------------------------------------------------------------------------------------- write

    def append(self, events: Sequence[Event], attempts: Mapping[AttemptKey, bytes] | None = None) -> None:
        """Store events and their trajectories atomically.

        Raises:
            JournalError: nothing was stored.
        """
        now, head, rows = time.time(), self._head, []
        for event in events:
            row = _row(head.num_events + 1, now, event)
            head = replace(head, num_events=head.num_events + 1, event=row_checksum(row, head.event))
            rows.append((*row, head.event))
        arrived = [
            StoredAttempt.of(self._next_number + i, key, data)
            for i, (key, data) in enumerate((attempts or {}).items())
        ]
        replaced = [old for new in arrived if (old := self._find(new.key)) is not None]
        self._write(
            (_ADD_EVENT, rows),
            ("DELETE FROM attempts WHERE number = ?", [(old.number,) for old in replaced]),
            (
                "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (new.number, *new.key, new.checksum, data)
                    for new, data in zip(arrived, (attempts or {}).values(), strict=True)
                ],
            ),
            head=_with_toggled(head, [*replaced, *arrived]),
        )
        self._next_number += len(arrived)
        for attempt in arrived:
            self._keep(attempt)

    def replace_events(self, snapshot: Snapshot) -> None:
        """Replace all events by a snapshot, and move the groups that have ended to the archive.

        Raises:
            JournalError: nothing has changed.
            CheckpointError: a task's id is damaged.
        """
        head = self._head
        row = _row(head.num_events + 1, time.time(), snapshot.event)
        head = replace(head, num_events=head.num_events + 1, event=row_checksum(row))
        facts = {"format": FORMAT}
        archived = []
        if snapshot.ended:
            tasks = self._records.tasks()
            groups = [(*group, tasks.get(group[0], "?")) for group in snapshot.ended]
            number, previous = archive_position(self.facts)
            data = zlib.compress(json.dumps(groups, separators=(",", ":")).encode(), 1)
            checksum = archive_checksum(number + 1, data, previous)
            archived = [(number + 1, data, checksum)]
            facts["archive"] = f"{number + 1} {checksum.hex()}"
        self._write(
            (_ADD_ARCHIVE, [()]),
            ("INSERT INTO archive VALUES (?, ?, ?)", archived),
            (_SET_FACT, [(*fact, row_checksum(fact)) for fact in facts.items()]),
            ("DELETE FROM events", [()]),  # without a condition: SQLite frees whole pages
            (_ADD_EVENT, [(*row, head.event)]),
            ("DELETE FROM tasks WHERE group_id = ?", [group[:1] for group in snapshot.ended]),
            head=head,
        )
        self.facts |= facts

    def forget(self, group_ids: Iterable[int]) -> None:
        """Delete the trajectories of groups. Their events stay.

        Raises:
            JournalError: it could not be written.
        """
        self._forget(
            [(group_id, owner) for group_id in group_ids for owner in self._stored.get(group_id, ())]
        )

    def forget_plays(self, plays: Iterable[tuple[int, str]]) -> None:
        """Delete the trajectories of the given (group id, owner) pairs.

        Raises:
            JournalError: it could not be written.
        """
        self._forget(
            [(group_id, owner) for group_id, owner in plays if owner in self._stored.get(group_id, ())]
        )

    def forget_others(self, group_id: int, owner: str) -> None:
        """Delete the trajectories of a group that came from owners other than `owner`.

        Raises:
            JournalError: it could not be written.
        """
        self._forget([(group_id, other) for other in self._stored.get(group_id, ()) if other != owner])

    def _forget(self, plays: Sequence[tuple[int, str]]) -> None:
        gone = [attempt for group_id, owner in plays for attempt in self._stored[group_id][owner].values()]
        if not gone:
            return
        numbers = [(attempt.number,) for attempt in gone]
        self._write(("DELETE FROM attempts WHERE number = ?", numbers), head=_with_toggled(self._head, gone))
        for group_id, owner in plays:
            del self._stored[group_id][owner]
            if not self._stored[group_id]:
                del self._stored[group_id]

    def name_tasks(self, task_ids: Mapping[int, str]) -> None:
        """Store the task id of each group.

        Raises:
            JournalError: it could not be written.
        """
        self._write(
            (
                "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)",
                [(*row, row_checksum(row)) for row in task_ids.items()],
            )
        )

    def set_fact(self, name: str, value: str) -> None:
        """Store a fact about the whole run.

        Raises:
            JournalError: it could not be written.
        """
        self._write((_SET_FACT, [(name, value, row_checksum((name, value)))]))
        self.facts[name] = value

    def sync(self) -> None:
        """Flush all writes to the disk, so that they survive a power loss.

        Raises:
            JournalError: the disk reported an error.
        """
        try:
            self._database.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
            if not self._has_log and self._path is not None:
                sync_file(self._path)
        except (sqlite3.Error, OSError) as error:
            raise self._unwritten(error) from error

    def _write(self, *statements: Statement, head: Head | None = None) -> None:
        """Execute the statements in one transaction.

        `head`: the journal's new head; None: the head does not change.
        """
        if head is not None:
            head = replace(head, num_writes=head.num_writes + 1)
            statements = (*statements, (_SET_HEAD, [head.row]))
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                for row in rows:
                    self._database.execute(statement, row)
            self._database.execute("COMMIT")
        except SQLITE_ERRORS as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise self._unwritten(error) from error
        if head is not None:
            self._head = head
            if self._count is not None:
                self._count.write(head.num_writes)

    def _unwritten(self, error: Exception) -> JournalError | CheckpointError:
        code = primary_code(error)
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or isinstance(error, UnicodeDecodeError):
            return damaged(self._path, described(error))
        if self._path is None:
            return JournalError(f"the journal in memory cannot be written: {error}")
        if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC:
            return JournalError(
                f"the disk is full: the journal {self._path} cannot be written; free space in "
                f"{self._path.parent} to continue"
            )
        return JournalError(
            f"the journal {self._path} cannot be written: {error}; free space or make it writable to continue"
        )

    # --------------------------------------------------------------------------------------------------- read

    @property
    def is_empty(self) -> bool:
        """Whether the journal has no events."""
        return self._head.num_events == 0

    @property
    def num_events(self) -> int:
        """Number of events that were ever written; the number of the last one."""
        return self._head.num_events

    def events(self) -> Iterator[Event]:
        """Yield what `numbered_events` yields, without the numbers."""
        for _, event in self.numbered_events():
            yield event

    def numbered_events(self) -> Iterator[tuple[int, Event]]:
        """Yield the last snapshot and all events since, or all events, in order and with their numbers.

        Raises:
            CheckpointError: an event is damaged or missing.
        """
        yield from self._records.events(self._head)

    def read(self, keys: Iterable[AttemptKey]) -> list[bytes]:
        """Return what is stored of each of these attempts.

        Raises:
            CheckpointError: one of them is damaged.
        """
        return self._records.data_of_all(
            [self._stored[group_id][owner][member] for group_id, owner, member in keys]
        )

    def attempts(self, group_id: int, owner: str) -> dict[int, bytes]:
        """Return what is stored of a group's attempts from one owner: member -> data (see `read`)."""
        members = self._stored.get(group_id, {}).get(owner, {})
        return dict(zip(members, self._records.data_of_all(list(members.values())), strict=True))

    def plays(self) -> list[tuple[int, str]]:
        """Return the (group id, owner) pairs of which attempts are stored."""
        return [(group_id, owner) for group_id, owners in self._stored.items() for owner in owners]

    def members(self, group_id: int, owner: str) -> set[int]:
        """Return the members whose trajectories from `owner` are stored."""
        return set(self._stored.get(group_id, {}).get(owner, ()))

    @property
    def num_bytes(self) -> int:
        """Size of all stored trajectories."""
        return sum(
            attempt.num_bytes
            for plays in self._stored.values()
            for play in plays.values()
            for attempt in play.values()
        )

    def close(self) -> None:
        self._database.close()
        if self._count is not None:
            self._count.close()
            self._count = None

    def _find(self, key: AttemptKey) -> StoredAttempt | None:
        group_id, owner, member = key
        return self._stored.get(group_id, {}).get(owner, {}).get(member)

    def _keep(self, attempt: StoredAttempt) -> None:
        group_id, owner, member = attempt.key
        self._stored.setdefault(group_id, {}).setdefault(owner, {})[member] = attempt


def _opened(path: Path | None) -> tuple[sqlite3.Connection, bool]:
    """Return a connection to the database, and whether it writes by a write-ahead log.

    Raises:
        sqlite3.Error: the file cannot be opened or written.
    """
    if path is None:
        return _connected(":memory:"), True
    if not is_shared(path):
        database = _connected(path)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("BEGIN IMMEDIATE")  # the first use of the memory that it shares with readers
            database.execute("ROLLBACK")
            if database.execute("PRAGMA journal_mode").fetchone() == ("wal",):
                return database, True
        except sqlite3.OperationalError as error:
            if primary_code(error) not in _NO_SHARED_MEMORY:
                raise
        database.close()
    database = _connected(path)
    # Only an exclusive user can read a log without shared memory. Then there is none, and others may read.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = TRUNCATE")
    database.execute("PRAGMA locking_mode = NORMAL")
    database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()  # lets the lock go
    return database, False


def _connected(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def sync_file(path: Path) -> None:
    """Wait until the content of `path` is on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _row(seq: int, now: float, event: Event) -> tuple[object, ...]:
    accuracy = None if event.accuracy is None else float(event.accuracy)
    numbers = (event.group_id, event.owner, event.member, event.step, event.version)
    return (seq, now, event.kind.value, *numbers, json.dumps(event.versions), event.reason, accuracy)


def _with_toggled(head: Head, attempts: Iterable[StoredAttempt]) -> Head:
    """Return the head after adding the `attempts` that are not stored and removing those that are."""
    for attempt in attempts:
        head = replace(head, attempts=toggled(head.attempts, attempt.entry))
    return head
