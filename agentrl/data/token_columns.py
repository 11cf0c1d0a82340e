"""Columns with a number per action token: who computed them keeps them in a file, others get a reference.

A learning step moves them between ranks (a critic's values, the KL to a reference): the rank that learns from
a trajectory is not the one that assessed it. They are files in the run folder for the reasons of
`agentrl.data.attempt_files`, but live only as long as the step.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import DiskError
from agentrl.fast_pickle import pickled_fast

FOLDER = "columns"
"""Folder of these files in the folder of a run."""
_DTYPE = np.dtype("<f4")

Floats = NDArray[np.floating]


@pickled_fast
@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """`count` numbers in float32, from the number `start` on in the file at `path`."""

    path: str
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def part(self, start: int, count: int) -> StoredNumbers:
        """Return a reference to `count` of them."""
        return StoredNumbers(self.path, self.start + start, count)

    def load(self) -> NDArray[np.float32]:
        """Read the numbers, f32[count].

        Raises:
            DiskError: the file is missing or too short.
        """
        try:
            found = np.fromfile(
                self.path, _DTYPE, count=self.count, offset=self.start * _DTYPE.itemsize
            ).astype(np.float32, copy=False)
        except OSError as error:
            raise DiskError(f"numbers per token in {self.path} cannot be read: {error}") from error
        if len(found) != self.count:
            raise DiskError(f"{self.path} ends before the numbers per token that it should contain")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class HeldNumbers:
    """Numbers in memory, f32[count], where all ranks are in one process."""

    values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: int, count: int) -> HeldNumbers:
        return HeldNumbers(self.values[start : start + count])

    def load(self) -> NDArray[np.float32]:
        return self.values


Numbers = StoredNumbers | HeldNumbers


@pickled_fast
@dataclass(frozen=True, slots=True, eq=False)
class TokenColumn:
    """A number for each of `size` action tokens, in the order of positions.

    pieces: pairs (index of the first token, numbers), which cover all tokens. There are several if the sample
    was split over microbatches.
    """

    size: int
    pieces: tuple[tuple[int, Numbers], ...]

    @classmethod
    def held(cls, values: Floats) -> TokenColumn:
        """Return a column in memory, f[size]."""
        return cls(len(values), ((0, HeldNumbers(np.asarray(values, np.float32))),))

    def load(self) -> NDArray[np.float32]:
        """Return the column, f32[size].

        Raises:
            DiskError: a file is missing or too short.
        """
        column = np.empty(self.size, np.float32)
        for first, numbers in self.pieces:
            column[first : first + len(numbers)] = numbers.load()
        return column


def keep(columns: Sequence[Floats], folder: str | None) -> list[Numbers]:
    """Store the columns, f[.] each, in one new file in `folder`, and return where each of them is.

    folder: None: keep them in memory.

    Raises:
        DiskError: the file cannot be written.
    """
    if folder is None:
        return [HeldNumbers(np.asarray(column, np.float32)) for column in columns]
    path = Path(folder) / f"{uuid.uuid4().hex}.f32"
    try:
        with path.open("xb") as file:  # closed before anybody knows of it, so that other nodes see all of it
            for column in columns:
                file.write(np.ascontiguousarray(column, _DTYPE).data)
    except OSError as error:
        raise DiskError(
            f"numbers per token cannot be written to {folder}: {error.strerror}; free space there"
        ) from error
    ends = np.cumsum([len(column) for column in columns]).tolist()
    return [
        StoredNumbers(str(path), end - len(column), len(column))
        for end, column in zip(ends, columns, strict=True)
    ]


@contextmanager
def column_folder(folder: Path) -> Iterator[str]:
    """Yield the folder, empty; it is removed at the end of the block.

    Raises:
        DiskError: it cannot be created.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of a step that a crash interrupted
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DiskError(f"{folder} cannot be created: {error.strerror}") from error
    try:
        yield str(folder.resolve())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
