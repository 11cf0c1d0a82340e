"""Weights in the safetensors files of a folder, read slice by slice: a rank reads only what it keeps.

Files are read in chunks of bounded size, not mapped into memory: pages of a mapped file count as memory of
each process that touches them, and a mapped file that is cut while it is read kills the process. The kernel
keeps one copy of a file for all processes of a node in either case.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from agentrl.data.weight_files import SINGLE, HeaderEntry, read_entries, weight_files
from agentrl.errors import ConfigError

CHUNK_BYTES = 16 * 2**20
"""Read at a time; larger reads are not faster, and every rank has one such buffer."""

SLOWEST_BYTES_PER_S = 100e6
"""A network disk behind 1 Gbit/s; ranks that read more slowly count as stuck."""

_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. begin: where its bytes start in the file."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_stored(folder: Path, *, single: str = SINGLE) -> Mapping[str, StoredTensor]:
    """Return the tensors of a folder by name, from the files' headers; empty if it has no safetensors.

    Raises:
        ConfigError: a file is missing, cut or damaged, or has a dtype that is not known here.
    """
    return {
        name: _stored(file, entry)
        for file in weight_files(folder, single=single)
        for name, entry in read_entries(file).items()
    }


def reading_s(folder: Path) -> float:
    """Return how long reading all safetensors of a folder once may take."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / SLOWEST_BYTES_PER_S


def _stored(file: Path, entry: HeaderEntry) -> StoredTensor:
    if entry.dtype not in _DTYPES:
        raise ConfigError(f"{file} has a tensor of dtype {entry.dtype}; known: {', '.join(_DTYPES)}")
    found = StoredTensor(file, entry.begin, entry.shape, _DTYPES[entry.dtype])
    if entry.end - entry.begin != found.num_bytes:
        raise ConfigError(
            f"{file} is damaged: a tensor of shape {list(entry.shape)} has {entry.end - entry.begin:,} of "
            f"{found.num_bytes:,} bytes; copy it again"
        )
    return found


class SliceReader(AbstractContextManager["SliceReader"]):
    """Reads slices of stored tensors into tensors of any dtype and device; keeps one chunk in memory."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._closing = ExitStack()
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._bytes = self._buffer.numpy().data

    def read(self, stored: StoredTensor, shape: Sequence[int], start: Sequence[int], out: Tensor) -> None:
        """Fill `out` with the slice at `start`, of the shape of `out`, of a stored tensor seen as `shape`.

        Raises:
            ConfigError: the file has become unreadable or shorter.
        """
        if not shape:
            shape, start, out = (1,), (0,), out.view(1)
        self._read(stored, 0, tuple(shape), tuple(start), out)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()

    def _read(
        self, stored: StoredTensor, first: int, shape: tuple[int, ...], start: tuple[int, ...], out: Tensor
    ) -> None:
        """Read from the part of `stored` that begins at element `first` and has `shape`."""
        inner = math.prod(shape[1:])
        first += start[0] * inner
        rows = CHUNK_BYTES // max(1, inner * stored.dtype.itemsize)
        if tuple(out.shape[1:]) == shape[1:] and out.is_contiguous():
            flat = out.view(-1)
            step = CHUNK_BYTES // stored.dtype.itemsize
            for at in range(0, len(flat), step):
                part = flat[at : at + step]
                part.copy_(self._elements(stored, first + at, len(part)))
        elif len(shape) == 2 and rows > 0:
            # Of a matrix that is sharded by columns, whole rows are read: many small reads take longer.
            for at in range(0, len(out), rows):
                some = out[at : at + rows]
                whole = self._elements(stored, first + at * inner, len(some) * inner).view(len(some), inner)
                some.copy_(whole[:, start[1] : start[1] + out.shape[1]])
        else:
            for at, one in enumerate(out):
                self._read(stored, first + at * inner, shape[1:], start[1:], one)

    def _elements(self, stored: StoredTensor, first: int, count: int) -> Tensor:
        """Return `count` elements in order of the file, valid until the next call."""
        size, done = count * stored.dtype.itemsize, 0
        begin = stored.begin + first * stored.dtype.itemsize
        try:
            file = self._file(stored.file)
            while done < size:
                got = os.preadv(file, [self._bytes[done:size]], begin + done)
                if got == 0:
                    raise ConfigError(f"{stored.file} was cut while it was read; copy it again")
                done += got
        except OSError as error:
            raise ConfigError(f"{stored.file} cannot be read: {error.strerror}") from error
        return self._buffer[:size].view(stored.dtype)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
            self._closing.callback(os.close, self._files[path])
        return self._files[path]
