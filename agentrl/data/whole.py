"""Atomic writing of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; at the end, rename it to `target`.

    It is removed if an exception is raised. Parent folders are created. An existing `target` stays until it
    is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
