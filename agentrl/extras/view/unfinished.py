"""Attempts of an evaluation that has not ended: copied from its SQLite store into Parquet files of our own.

Each attempt is copied once, however often the page is updated. The copies are removed when the process ends.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pyarrow as pa

from agentrl.data.trajectories import from_ipc, write_parquet

_AT_ONCE = 512
_BUSY_S = 2.0
_READ = "SELECT number, trajectory FROM attempts WHERE number > ? ORDER BY number LIMIT ?"


class CopiedStore:
    """The copies of one store. Thread-safe. A failed try and the one that replaced it are both there."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-view-")
        self._last = 0
        self._files: list[Path] = []
        self._lock = threading.Lock()

    def files(self) -> list[Path]:
        """Copy what was added, and return all copies, the oldest first.

        A store that is locked or damaged adds nothing this time.
        """
        with self._lock:
            try:
                # immutable is not set: a writer's lock is respected
                with closing(
                    sqlite3.connect(f"file:{self._store}?mode=ro", uri=True, timeout=_BUSY_S)
                ) as store:
                    while rows := store.execute(_READ, (self._last, _AT_ONCE)).fetchall():
                        self._write([from_ipc(data) for _, data in rows])
                        self._last = rows[-1][0]
            except sqlite3.Error:
                pass
            return list(self._files)

    def _write(self, batches: list[pa.RecordBatch]) -> None:
        path = Path(self._folder.name) / f"part_{len(self._files) + 1:06d}.parquet"
        write_parquet(path, pa.concat_batches(batches))
        self._files.append(path)


_STORES: dict[Path, CopiedStore] = {}


def copied(store: Path) -> CopiedStore:
    """Return the copies of a store, the same ones for the life of this process."""
    place = store.resolve()
    if place not in _STORES:
        _STORES[place] = CopiedStore(store)
    return _STORES[place]
