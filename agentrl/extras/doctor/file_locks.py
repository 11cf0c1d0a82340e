"""Tries a folder's file locks, and SQLite's write-ahead log, between two processes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

ANSWER_S = 10.0
_TRY_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("taken")
except BlockingIOError:
    print("held")
"""
_COUNT_ROWS = """
import sqlite3, sys
print(sqlite3.connect(sys.argv[1], timeout=5).execute("SELECT count(*) FROM rows").fetchone()[0])
"""


@dataclass(frozen=True, slots=True)
class LockReport:
    """lock_problem, database_problem: None if locks work, and SQLite with them. has_log: SQLite keeps a
    write-ahead log, which another process reads.
    """

    lock_problem: str | None
    database_problem: str | None = None
    has_log: bool = False


def try_locks(folder: Path) -> LockReport:
    """Lock a file and write a database in `folder`, while another process tries to lock it and reads."""
    with tempfile.TemporaryDirectory(prefix=".agentrl-doctor-", dir=folder) as place:
        problem = _find_lock_problem(Path(place) / "lock")
        if problem is not None:
            return LockReport(problem)
        try:
            return LockReport(None, has_log=_keeps_log(Path(place) / "rows.sqlite"))
        except sqlite3.Error as error:
            return LockReport(None, f"SQLite cannot write: {error}")


def _find_lock_problem(file: Path) -> str | None:
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"files cannot be locked ({os.strerror(error.errno or 0)})"
        answer = _ask_other(_TRY_LOCK, file)
    return None if answer == "held" else f"a lock does not keep another process out ({answer})"


def _keeps_log(file: Path) -> bool:
    with closing(sqlite3.connect(file, timeout=5.0, isolation_level=None)) as database:
        [mode] = database.execute("PRAGMA journal_mode = WAL").fetchone()
        database.execute("CREATE TABLE rows (number INTEGER)")
        database.execute("INSERT INTO rows VALUES (1)")
        return mode == "wal" and _ask_other(_COUNT_ROWS, file) == "1"


def _ask_other(program: str, file: Path) -> str:
    """Return what another process prints; else how it ended."""
    command = [sys.executable, "-I", "-S", "-c", program, str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_S:g} s"
    return done.stdout.strip() or (done.stderr.strip().splitlines() or ["no answer"])[-1]
