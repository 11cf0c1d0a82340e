"""Finished attempts on disk, each by the key of what produced it: nothing that was finished is ever played again.

A store is a folder of parts. One process at a time appends to a part of its own:

    part     frame*
    frame    magic (4 bytes), length of the payload (u32), CRC-32 of the payload (u32), payload
    payload  length of the head (u32), head (JSON: key, is_failed), one trajectory (an Arrow IPC stream, by zlib)

What a process was writing when it was killed is a frame that is cut short: it ends its part, and the next process begins another.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from agentrl.data.trajectories import decode, encode, from_ipc, to_ipc
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.types import SCORED_OUTCOMES, Trajectory

_MAGIC = b"AGRL"
_FRAME = struct.Struct("<4sII")
_HEAD = struct.Struct("<I")
_NAME = "part_{:06d}.attempts"
_LEVEL = 1
"""Of compression: a stream of one short trajectory is mostly its schema."""


@dataclass(frozen=True, slots=True)
class _Place:
    part: Path
    offset: int  # of the payload
    length: int


class AttemptStore:
    """The attempts of a folder. Use it as a context manager; `add` and `read` from one thread at a time.

    An attempt that failed is kept, and given way to by the next one of its key: `has` says only of finished ones that they are there.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder, and read which attempts it holds.

        Raises:
            ConfigError: another process writes to it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"another process writes to {str(folder)!r}; wait for it, or choose another --out") from None
        self._places: dict[str, _Place] = {}
        self._failed: set[str] = set()
        self._part: BinaryIO | None = None
        self.num_cut = 0  # parts whose last frame is cut short
        for part in sorted(folder.glob(_NAME.replace("{:06d}", "*"))):
            self._index(part)

    def __enter__(self) -> AttemptStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._part is not None:
            self._part.close()
        self._lock.close()

    def has(self, key: str) -> bool:
        """Tell whether an attempt of this key is finished: it has a score, or was generated for one."""
        return key in self._places and key not in self._failed

    def add(self, attempts: Sequence[tuple[str, Trajectory]]) -> None:
        """Append attempts with their keys; they are on disk when this returns.

        Raises:
            InfrastructureError: they cannot be written.
        """
        frames = [_frame(key, trajectory) for key, trajectory in attempts]
        try:
            part = self._part or self._begin_part()
            start = part.tell()
            part.write(b"".join(frames))
            part.flush()
            os.fsync(part.fileno())
        except OSError as error:
            raise InfrastructureError(f"cannot keep attempts in {str(self._folder)!r}: {error.strerror or error}") from error
        for (key, trajectory), frame in zip(attempts, frames, strict=True):
            self._note(
                key, trajectory.outcome not in SCORED_OUTCOMES, _Place(Path(part.name), start + _FRAME.size, len(frame) - _FRAME.size)
            )
            start += len(frame)

    def read(self, keys: Sequence[str]) -> Iterator[Trajectory | None]:
        """Yield the attempt of each key, in their order: the one that was added last; None where there is none."""
        opened: dict[Path, BinaryIO] = {}
        try:
            for key in keys:
                place = self._places.get(key)
                yield None if place is None else _read(place, opened)
        finally:
            for file in opened.values():
                file.close()

    def _begin_part(self) -> BinaryIO:
        numbers = [int(part.stem.rpartition("_")[2]) for part in self._folder.glob(_NAME.replace("{:06d}", "*"))]
        self._part = (self._folder / _NAME.format(max(numbers, default=0) + 1)).open("xb")
        return self._part

    def _index(self, part: Path) -> None:
        with part.open("rb") as file:
            while header := file.read(_FRAME.size):
                payload = _payload(file, header)
                if payload is None:
                    self.num_cut += 1
                    return
                key, is_failed, _ = _opened(payload)
                self._note(key, is_failed, _Place(part, file.tell() - len(payload), len(payload)))

    def _note(self, key: str, is_failed: bool, place: _Place) -> None:
        if is_failed and self.has(key):
            return
        self._places[key] = place
        (self._failed.add if is_failed else self._failed.discard)(key)


def _frame(key: str, trajectory: Trajectory) -> bytes:
    head = json.dumps({"key": key, "is_failed": trajectory.outcome not in SCORED_OUTCOMES}).encode()
    payload = _HEAD.pack(len(head)) + head + zlib.compress(to_ipc(encode([trajectory])), _LEVEL)
    return _FRAME.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def _payload(file: BinaryIO, header: bytes) -> bytes | None:
    """Return what a frame holds, None when it is not whole."""
    if len(header) < _FRAME.size:
        return None
    magic, length, checksum = _FRAME.unpack(header)
    payload = file.read(length) if magic == _MAGIC else b""
    return payload if magic == _MAGIC and len(payload) == length and zlib.crc32(payload) == checksum else None


def _opened(payload: bytes) -> tuple[str, bool, bytes]:
    """Return key, whether the attempt failed, and the attempt, compressed."""
    (size,) = _HEAD.unpack_from(payload)
    end = _HEAD.size + size
    head = json.loads(payload[_HEAD.size : end])
    return head["key"], head["is_failed"], payload[end:]


def _read(place: _Place, opened: dict[Path, BinaryIO]) -> Trajectory:
    if place.part not in opened:
        opened[place.part] = place.part.open("rb")
    file = opened[place.part]
    file.seek(place.offset)
    [trajectory] = decode(from_ipc(zlib.decompress(_opened(file.read(place.length))[2])))
    return trajectory
