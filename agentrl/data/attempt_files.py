"""Files of finished trajectories. Who played an attempt writes it; others get a reference and read on demand.

A file is written once, by one rollout actor, before anybody knows of it, and never changes. It holds one
Arrow IPC stream per trajectory (`agentrl.data.trajectories`).

Why files in the run folder, and not Ray's object store: the object store loses an object with the process
that put it there, so each trajectory would be stored twice, there and on disk. A file is in the page cache of
the node that wrote it, and survives every process.
"""

from __future__ import annotations

import errno
import os
import socket
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.data.trajectories import decode, encode, from_ipc, to_ipc
from agentrl.errors import ConfigError, DiskError, JournalError
from agentrl.fast_pickle import pickled_fast
from agentrl.types import Trajectory

FOLDER = "attempts"
"""Folder of these files in the folder of a run."""
_SUFFIX = ".arrows"
_WORDS = ".last_words"
_MARK = ".mark"


@pickled_fast
@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """A stored trajectory: `num_bytes` bytes from `offset` on in the file at `path`.

    checksum: CRC-32 of these bytes.
    """

    path: str
    offset: int
    num_bytes: int
    checksum: int

    def load(self, *, has_messages: bool = True) -> Trajectory:
        """Read the trajectory.

        has_messages: False: without messages and `extra_info`, which take longest.

        Raises:
            DiskError: the file is missing or damaged.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.num_bytes)
        except OSError as error:
            raise DiskError(f"the trajectory in {self.path} cannot be read: {error}") from error
        if len(data) != self.num_bytes or zlib.crc32(data) != self.checksum:
            raise DiskError(
                f"the trajectory at byte {self.offset} of {self.path} does not match its checksum"
            )
        images = Path(self.path).parent.parent / IMAGES  # they are kept when this file is removed
        [trajectory] = decode(from_ipc(data), has_messages=has_messages, images=images)
        return trajectory


class AttemptFiles:
    """Writes trajectories into the folder `attempts` of a run, one file per call."""

    def __init__(self, folder: Path, *, is_synced: bool, mark: str | None = None) -> None:
        """is_synced: flush each file to the disk, so that it survives a power loss and other nodes see it.

        mark: what `create` wrote into the folder; None: not known.
        """
        self._folder = folder
        self._is_synced = is_synced
        self._mark = mark

    @classmethod
    def create(cls, folder: Path, *, is_synced: bool) -> AttemptFiles:
        """Create the folder, with a mark by which other processes find out whether they see the same folder.

        Raises:
            ConfigError: it cannot be written.
        """
        mark = uuid.uuid4().hex
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _MARK).write_text(mark)
            remove_files(str(path) for path in folder.glob(f"*{_WORDS}"))  # of a driver that was killed
        except OSError as error:
            raise ConfigError(f"trainer.run_dir: {folder} cannot be written: {error.strerror}") from error
        return cls(folder, is_synced=is_synced, mark=mark)

    def check_shared(self) -> None:
        """Check that this process sees the folder that the controller created.

        Raises:
            ConfigError: it does not.
        """
        try:
            found = (self._folder / _MARK).read_text()
        except OSError:
            found = None
        if self._mark is not None and found != self._mark:
            raise ConfigError(
                f"trainer.run_dir: this node ({socket.gethostname()}) does not see the run's folder "
                f"{self._folder}, to which rollout actors write trajectories and from which ranks read them; "
                "choose a folder on a file system that all nodes share"
            )

    def last_words_of(self, owner: str) -> Path:
        """Return where a rollout actor leaves which plugin ended it (`agentrl.plugins.last_words`)."""
        return self._folder / f"{owner}{_WORDS}"

    def write(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryRef]:
        """Store the trajectories in a new file and return where each of them is.

        Raises:
            JournalError: nothing was stored; the call can be repeated.
        """
        streams = [to_ipc(encode([trajectory])) for trajectory in trajectories]
        path = self._folder / f"{uuid.uuid4().hex}{_SUFFIX}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("xb", buffering=0) as file:
                for stream in streams:
                    _write_whole(file.fileno(), stream)
                if self._is_synced:
                    os.fsync(file.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _unwritten(path, error) from error
        refs, offset = [], 0
        for stream in streams:
            refs.append(TrajectoryRef(str(path), offset, len(stream), zlib.crc32(stream)))
            offset += len(stream)
        return refs


def _write_whole(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a disk that fills up accepts a part; the next write raises the reason
        left = left[os.write(descriptor, left) :]


def _unwritten(path: Path, error: OSError) -> JournalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalError(
            f"the disk is full: trajectories cannot be written to {path.parent}; free space there to continue"
        )
    return JournalError(f"trajectories cannot be written to {path.parent}: {error.strerror}")


def remove_files(paths: Iterable[str]) -> None:
    """Remove files of trajectories that nobody refers to; it is no error if they are gone already."""
    for path in paths:
        Path(path).unlink(missing_ok=True)


def remove_others(folder: Path, kept: Iterable[str]) -> int:
    """Remove the files in `folder` that are not in `kept`, and return their number.

    Only when no rollout actor is alive: a file whose attempts are about to be added would be removed too.
    """
    others = {str(path) for path in folder.glob(f"*{_SUFFIX}")} - set(kept)
    remove_files(others)
    return len(others)
