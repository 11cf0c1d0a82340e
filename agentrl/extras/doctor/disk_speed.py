"""How fast a folder's disk takes files."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from agentrl.errors import DiskError

PIECE = 4 << 20
MAX_PIECES = 64
WRITE_S = 2.0
"""A slow disk gets fewer pieces."""
NUM_SYNCS = 15
SMALL = b"x" * 4096


class SyncedFile(FileIO):
    """An unbuffered file that can be synced."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")

    def sync(self) -> None:
        """Return when the disk has all that was written."""
        os.fsync(self.fileno())


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """bytes_per_s: of a large file, synced at its end. sync_s: median of small writes with a sync."""

    bytes_per_s: float
    sync_s: float


def measure_disk(folder: Path, open_file: Callable[[Path], SyncedFile] = SyncedFile) -> DiskSpeed:
    """Write a large file for some two seconds, then small pieces; the files are removed.

    Raises:
        DiskError: a write failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".agentrl-doctor-", dir=folder) as place:
            return DiskSpeed(
                _rate(Path(place) / "large", open_file), _sync_s(Path(place) / "small", open_file)
            )
    except OSError as error:
        raise DiskError(f"{folder} cannot be written: {error.strerror}") from error


def _rate(path: Path, open_file: Callable[[Path], SyncedFile]) -> float:
    piece = os.urandom(PIECE)  # some disks compress
    with open_file(path) as file:
        start, num_bytes = time.monotonic(), 0
        for _ in range(MAX_PIECES):
            num_bytes += file.write(piece)
            if time.monotonic() - start > WRITE_S:
                break
        file.sync()
        return num_bytes / max(time.monotonic() - start, 1e-9)


def _sync_s(path: Path, open_file: Callable[[Path], SyncedFile]) -> float:
    with open_file(path) as file:
        times: list[float] = []
        while len(times) < NUM_SYNCS and sum(times) < WRITE_S:
            start = time.monotonic()
            file.write(SMALL)
            file.sync()
            times.append(time.monotonic() - start)
        return statistics.median(times)
