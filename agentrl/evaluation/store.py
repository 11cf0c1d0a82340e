"""Finished attempts on disk, each by the key of what produced it: nothing that was finished is ever played again."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from agentrl.data.trajectories import decode, encode, from_ipc, to_ipc
from agentrl.errors import ConfigError
from agentrl.types import SCORED_OUTCOMES, Trajectory

BUSY_S = 60.0
"""A reader may hold up a commit for so long."""

_TABLE = """
    CREATE TABLE IF NOT EXISTS attempts (
        number INTEGER PRIMARY KEY, key TEXT NOT NULL, is_failed INTEGER NOT NULL, trajectory BLOB NOT NULL
    )
"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_key ON attempts (key)"
_ADD = "INSERT INTO attempts (key, is_failed, trajectory) VALUES (?, ?, ?)"
_READ = "SELECT trajectory FROM attempts WHERE key = ? ORDER BY is_failed, number DESC LIMIT 1"


class AttemptStore:
    """The attempts in one SQLite file, in the order in which they were added; each trajectory is an Arrow IPC stream of one.

    Use it as a context manager, `add` and `read` from one thread at a time. Nothing is overwritten: an attempt that failed stays, and gives
    way to the next one of its key.
    """

    def __init__(self, file: Path) -> None:
        """Open the file, or begin one. Other processes may read it, and write once this one has closed it.

        Raises:
            ConfigError: another process writes to it, or it is no such file.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = file.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"another process writes to {str(file)!r}; wait for it, or choose another --out") from None
        self._database = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # Not the write-ahead log: it needs shared memory, which network file systems lack.
            self._database.execute("PRAGMA journal_mode = TRUNCATE")
            self._database.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
            self._database.execute(_TABLE)
            self._database.execute(_INDEX)
            self._finished = {key for (key,) in self._database.execute("SELECT key FROM attempts WHERE NOT is_failed")}
        except sqlite3.DatabaseError as error:
            self._close()
            raise ConfigError(f"{str(file)!r} cannot be read as attempts ({error}); remove it, or choose another --out") from error

    def __enter__(self) -> AttemptStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def has(self, key: str) -> bool:
        """Tell whether an attempt of this key is finished: it has a score, or was generated for one."""
        return key in self._finished

    def add(self, attempts: Sequence[tuple[str, Trajectory]]) -> None:
        """Keep attempts with their keys; all of them are on disk when this returns, or none."""
        rows = [(key, one.outcome not in SCORED_OUTCOMES, to_ipc(encode([one]))) for key, one in attempts]
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(_ADD, rows)
        self._finished |= {key for key, is_failed, _ in rows if not is_failed}

    def read(self, keys: Sequence[str]) -> Iterator[Trajectory | None]:
        """Yield the attempt of each key, in their order: the one that was added last, a finished one if there is any; None for none."""
        for key in keys:
            found = self._database.execute(_READ, (key,)).fetchone()
            yield None if found is None else decode(from_ipc(found[0]))[0]

    def _close(self) -> None:
        self._database.close()
        self._lock.close()
