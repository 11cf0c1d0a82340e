"""Dataset files with random access to rows: Parquet decoded by row group, JSON lines read by byte offset."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.config.storage_urls import is_url
from agentrl.data.atomic_files import appearing_whole
from agentrl.data.fetched import fetched_file
from agentrl.errors import DataError
from agentrl.plugins.sources import nearest

CACHE_BYTES = 256 * 2**20
"""Decoded row groups cached per Parquet file. The row group in use is kept even if it alone is larger."""
STREAM_ROWS = 256
"""Rows converted to Python objects at once when a whole file is read."""

RawRow = dict[str, Any]
T = TypeVar("T")


class RowFile(Protocol):
    """A file of rows. `line` is the row's line number in a text file, else None. Thread-safe."""

    path: str

    def __len__(self) -> int: ...
    def row(self, index: int) -> RawRow: ...
    def rows(self, limit: int) -> Iterator[RawRow]: ...
    def line(self, index: int) -> int | None: ...


def open_rows(path: str) -> RowFile:
    """Open a `.parquet`, `.jsonl` or `.json` (JSON lines) file. A URL is fetched first.

    Raises:
        DataError: the file does not exist, cannot be read, or has another suffix.
        ConfigError, StorageError: see `fetched_file`.
    """
    if is_url(path):
        path = str(fetched_file(path))
    file = Path(path)
    if not file.is_file():
        raise DataError(f"dataset file {path!r} does not exist{nearest(file)}")
    if file.suffix == ".parquet":
        return ParquetRows(path)
    if file.suffix in (".jsonl", ".json"):
        return JsonRows(path)
    raise DataError(f"dataset file {path!r}: unknown suffix {file.suffix!r}; use .parquet or .jsonl")


class ParquetRows:
    """Rows of a Parquet file, with an LRU cache of at most CACHE_BYTES of decoded row groups."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"dataset file {path!r} cannot be read as Parquet: {error}") from error
        meta = self._file.metadata
        sizes = [meta.row_group(index).num_rows for index in range(meta.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> RawRow:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:
            table = self._row_group(group)
        return table.slice(index - int(self._starts[group]), 1).to_pylist()[0]

    def rows(self, limit: int) -> Iterator[RawRow]:
        read = 0
        # A separate handle: the iteration may be suspended while another thread reads single rows.
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=STREAM_ROWS):
                yield from batch.slice(0, limit - read).to_pylist()
                read += batch.num_rows
                if read >= limit:
                    return

    def line(self, index: int) -> int | None:
        return None

    def _row_group(self, group: int) -> pa.Table:
        if group not in self._cache:
            self._cache[group] = self._file.read_row_group(group)
        self._cache.move_to_end(group)
        while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return self._cache[group]


class JsonRows:
    """Rows of a file with one JSON object per line. Empty lines are skipped."""

    def __init__(self, path: str) -> None:
        self.path = path
        starts, sizes, lines = [], [], []
        offset = 0
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    starts.append(offset)
                    sizes.append(len(text))
                    lines.append(number)
                offset += len(text)
        self._starts, self._sizes, self._lines = (
            np.array(values, dtype=np.int64) for values in (starts, sizes, lines)
        )
        self._file = open(path, "rb")  # noqa: SIM115 - stays open for reads by offset

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> RawRow:
        # pread does not use the shared file position, so threads need no lock.
        text = os.pread(self._file.fileno(), int(self._sizes[index]), int(self._starts[index]))
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{self.path}: line {self.line(index)}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            kind = "a JSON array" if isinstance(row, list) else type(row).__name__
            raise DataError(
                f"{self.path}: line {self.line(index)}: must be one JSON object per line, is {kind}"
            )
        return row

    def rows(self, limit: int) -> Iterator[RawRow]:
        return (self.row(index) for index in range(min(limit, len(self))))

    def line(self, index: int) -> int | None:
        return int(self._lines[index])


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> int:
    """Stream `rows` into a Parquet file, which is written atomically; return the number of rows."""
    written = 0
    with (
        appearing_whole(Path(path)) as partial,
        pq.ParquetWriter(partial, schema, compression="zstd") as writer,
    ):
        for chunk in batches(rows, 4096):
            writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema=schema))
            written += len(chunk)
    return written


def file_ids(paths: Sequence[str]) -> list[str]:
    """Return a short id for each file: its stem, with its index in the list if the stem is not unique."""
    stems = [Path(path).stem for path in paths]
    return [stem if stems.count(stem) == 1 else f"{stem}#{index}" for index, stem in enumerate(stems)]


def batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield `size` items at a time, in order; the last batch may be smaller."""
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch
