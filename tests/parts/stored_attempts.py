"""A store of attempts, read beside whoever writes it: also what stands there twice."""

import sqlite3
from contextlib import closing
from pathlib import Path


def stored_keys(file: Path) -> list[str]:
    """Return the keys of all attempts in a store, in the order in which they were kept."""
    if not file.exists():
        return []
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=60)) as database:
        has_table = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'attempts'").fetchone()
        return (
            [key for (key,) in database.execute("SELECT key FROM attempts ORDER BY number")]
            if has_table
            else []
        )
