"""Storage of finished attempts on disk, keyed by their producer, so that none is played twice."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from agentrl.data.trajectories import decode, encode, from_ipc, to_ipc
from agentrl.errors import ConfigError
from agentrl.types import SCORED_OUTCOMES, Trajectory

BUSY_S = 60.0
"""Maximum seconds that a commit waits for a reader."""

_TABLE = """
    CREATE TABLE IF NOT EXISTS attempts (
        number INTEGER PRIMARY KEY, key TEXT NOT NULL, is_failed INTEGER NOT NULL, trajectory BLOB NOT NULL
    )
"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_key ON attempts (key)"
_ADD = "INSERT INTO attempts (key, is_failed, trajectory) VALUES (?, ?, ?)"
_READ = "SELECT trajectory FROM attempts WHERE key = ? ORDER BY is_failed, number DESC LIMIT 1"


class AttemptStore(AbstractContextManager["AttemptStore"]):
    """Attempts in one SQLite file, in the order in which they were added.

    Each trajectory is an Arrow IPC stream with one row. Use the store as a context manager, and call `add`
    and `read` from one thread at a time. Nothing is overwritten: a failed attempt stays, and later attempts
    with its key take precedence.
    """

    def __init__(self, file: Path) -> None:
        """Open or create the file.

        Other processes may read it; they may write only after this store is closed.

        Raises:
            ConfigError: another process writes to the file, or the file is not a store.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = file.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"another process writes to {str(file)!r}; wait for it, or choose another --out"
            ) from None
        self._database = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # The write-ahead log needs shared memory, which network file systems lack.
            self._database.execute("PRAGMA journal_mode = TRUNCATE")
            self._database.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
            self._database.execute(_TABLE)
            self._database.execute(_INDEX)
            self._finished = {
                key for (key,) in self._database.execute("SELECT key FROM attempts WHERE NOT is_failed")
            }
        except sqlite3.DatabaseError as error:
            self._close()
            raise ConfigError(
                f"{str(file)!r} cannot be read as attempts ({error}); remove it, or choose another --out"
            ) from error

    def __exit__(self, *_: object) -> None:
        self._close()

    def has(self, key: str) -> bool:
        """Return whether the attempt with this key is finished: scored, or generated without scoring."""
        return key in self._finished

    def add(self, attempts: Sequence[tuple[str, Trajectory]]) -> None:
        """Store attempts with their keys, atomically: when this returns, all are on disk."""
        rows = [(key, one.outcome not in SCORED_OUTCOMES, to_ipc(encode([one]))) for key, one in attempts]
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(_ADD, rows)
        self._finished |= {key for key, is_failed, _ in rows if not is_failed}

    def read(self, keys: Sequence[str]) -> Iterator[Trajectory | None]:
        """Yield the latest attempt of each key, in order of `keys`; finished ones first.

        Returns None if there is no attempt.
        """
        for key in keys:
            found = self._database.execute(_READ, (key,)).fetchone()
            yield None if found is None else decode(from_ipc(found[0]))[0]

    def _close(self) -> None:
        self._database.close()
        self._lock.close()
