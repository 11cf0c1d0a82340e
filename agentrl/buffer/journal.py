"""The journal of a run: every event of its ledger, and the bytes of finished trajectories, in one SQLite file.

```
events     seq, time (of day, for people), and the fields of `Event`: appended, never changed
attempts   (group_id, owner, member) -> Arrow IPC stream of one trajectory: until nothing can ask for it again
tasks      group_id -> task_id
facts      name -> value: what the run was when it began
```

SQLite, because it is in the standard library, appends in a transaction of some ten microseconds, and another process may read while
one writes (`agentrl audit`). What is written survives the death of any process; with `is_synced` that of the machine, too.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from agentrl.buffer.events import Event, Kind
from agentrl.errors import CheckpointError, JournalError

FILE = "ledger.sqlite"
FORMAT = "1"

AttemptKey = tuple[int, str, int]
"""(group_id, owner, member)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, group_id INTEGER NOT NULL, owner TEXT NOT NULL,
    member INTEGER NOT NULL, step INTEGER NOT NULL, version INTEGER NOT NULL, versions TEXT NOT NULL, reason TEXT NOT NULL, accuracy REAL
);
CREATE TABLE IF NOT EXISTS attempts (
    group_id INTEGER, owner TEXT, member INTEGER, data BLOB NOT NULL, PRIMARY KEY (group_id, owner, member)
);
CREATE TABLE IF NOT EXISTS tasks (group_id INTEGER PRIMARY KEY, task_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_COLUMNS = "kind, group_id, owner, member, step, version, versions, reason, accuracy"
_BUSY_S = 10.0
"""How long a write waits for somebody who reads with a lock."""


class Journal:
    """Written by one process; the caller sees to it that one thread at a time uses it."""

    def __init__(self, path: Path | None, *, is_synced: bool = False) -> None:
        """Open or create the file; without one, the journal is in memory and ends with the process.

        Raises:
            JournalError: it cannot be written.
            CheckpointError: it is damaged, or of another format.
        """
        self._path = path
        try:
            self._database = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._database.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            raise self._unwritten(error) from error
        except sqlite3.DatabaseError as error:
            raise CheckpointError(f"the journal {path} is damaged: {error}") from error
        if self.fact("format") is None:
            self.set_fact("format", FORMAT)
        if self.fact("format") != FORMAT:
            raise CheckpointError(f"the journal {path} has format {self.fact('format')}, this version reads {FORMAT}")

    # ------------------------------------------------------------------------------------------------------- write

    def append(self, events: Sequence[Event], attempts: Mapping[AttemptKey, bytes] | None = None) -> None:
        """Keep events and the trajectories that came with them, all or nothing.

        Raises:
            JournalError: nothing was kept.
        """
        now = time.time()
        rows = [
            (now, e.kind, e.group_id, e.owner, e.member, e.step, e.version, json.dumps(e.versions), e.reason, e.accuracy) for e in events
        ]
        data = [(*key, value) for key, value in (attempts or {}).items()]
        self._write(
            (f"INSERT INTO events (time, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows),
            ("INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?)", data),
        )

    def forget(self, group_ids: Iterable[int]) -> None:
        """Let the trajectories of groups go; their events stay.

        Raises:
            JournalError: it could not be written.
        """
        self._write(("DELETE FROM attempts WHERE group_id = ?", [(group_id,) for group_id in group_ids]))

    def forget_plays(self, plays: Iterable[tuple[int, str]]) -> None:
        """Let the trajectories go that owners made of groups: (group, owner) each.

        Raises:
            JournalError: it could not be written.
        """
        self._write(("DELETE FROM attempts WHERE group_id = ? AND owner = ?", list(plays)))

    def forget_others(self, group_id: int, owner: str) -> None:
        """Let the trajectories of a group go that are not of `owner`, if there are any.

        Raises:
            JournalError: it could not be written.
        """
        others = self._database.execute("SELECT 1 FROM attempts WHERE group_id = ? AND owner != ? LIMIT 1", (group_id, owner))
        if others.fetchone() is not None:
            self._write(("DELETE FROM attempts WHERE group_id = ? AND owner != ?", [(group_id, owner)]))

    def name_tasks(self, task_ids: Mapping[int, str]) -> None:
        """Note which task each group attempts.

        Raises:
            JournalError: it could not be written.
        """
        self._write(("INSERT OR IGNORE INTO tasks VALUES (?, ?)", list(task_ids.items())))

    def set_fact(self, name: str, value: str) -> None:
        """Note what holds for the whole run.

        Raises:
            JournalError: it could not be written.
        """
        self._write(("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, value)]))

    def sync(self) -> None:
        """Let what was written survive the death of the machine, too.

        Raises:
            JournalError: the disk refused.
        """
        try:
            self._database.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
        except sqlite3.Error as error:
            raise self._unwritten(error) from error

    def _write(self, *statements: tuple[str, Sequence[Sequence[object]]]) -> None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                self._database.executemany(statement, rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise self._unwritten(error) from error

    def _unwritten(self, error: Exception) -> JournalError:
        return JournalError(f"the journal {self._path} cannot be written: {error}; free space or make it writable, and it goes on")

    # -------------------------------------------------------------------------------------------------------- read

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened yet."""
        return self._database.execute("SELECT 1 FROM events LIMIT 1").fetchone() is None

    def events(self) -> Iterator[Event]:
        """Return all events in the order in which they happened."""
        for _, event in read_events(self._database):
            yield event

    def attempts(self, group_id: int, owner: str) -> dict[int, bytes]:
        """Return what is kept of an owner's attempts: member -> Arrow IPC stream."""
        found = self._database.execute("SELECT member, data FROM attempts WHERE group_id = ? AND owner = ?", (group_id, owner))
        return dict(found.fetchall())

    def members(self, group_id: int, owner: str) -> set[int]:
        """Return of which members an owner's attempts are kept."""
        found = self._database.execute("SELECT member FROM attempts WHERE group_id = ? AND owner = ?", (group_id, owner))
        return {member for (member,) in found}

    @property
    def num_bytes(self) -> int:
        """Size of all trajectories that are kept."""
        return int(self._database.execute("SELECT COALESCE(SUM(LENGTH(data)), 0) FROM attempts").fetchone()[0])

    def fact(self, name: str) -> str | None:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        self._database.close()


def read_events(database: sqlite3.Connection) -> Iterator[tuple[int, Event]]:
    """Return (seq, event) in order."""
    for seq, kind, group_id, owner, member, step, version, versions, reason, accuracy in database.execute(
        f"SELECT seq, {_COLUMNS} FROM events ORDER BY seq"
    ):
        yield seq, Event(Kind(kind), group_id, owner, member, step, version, tuple(json.loads(versions)), reason, accuracy)
