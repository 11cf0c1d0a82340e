"""Dataset files with random access to rows: Parquet decoded by row group, JSON lines read by byte offset."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.config.storage_urls import is_url
from agentrl.data.atomic_files import appearing_whole
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import decode_json
from agentrl.data.storage import local_file
from agentrl.errors import DataError
from agentrl.plugins.sources import absence

CACHE_BYTES = 256 * 2**20
"""Decoded row groups cached per Parquet file. The row group in use is kept even if it alone is larger."""
STREAM_ROWS = 256
"""Rows converted to Python objects at once when a whole file is read."""
SUFFIXES = (".parquet", ".jsonl", ".json")

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
    """Open a `.parquet`, `.jsonl` or `.json` file. A URL is fetched first.

    Raises:
        DataError: the file does not exist, cannot be read, or has another suffix.
        ConfigError, StorageError: see `local_file`.
    """
    if is_url(path):
        path = str(local_file(path))
    file = Path(path)
    if not file.is_file():
        raise DataError(f"dataset file {path!r} {absence(file, SUFFIXES)}")
    if file.suffix == ".parquet":
        return ParquetRows(path)
    if file.suffix in SUFFIXES:
        whole = _whole_json(file)
        return JsonRows(path) if whole is None else WholeJson(path, whole)
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
        [row] = read_batch(table.slice(index - int(self._starts[group]), 1), self.path, index)
        return row

    def rows(self, limit: int) -> Iterator[RawRow]:
        read = 0
        # A separate handle: the iteration may be suspended while another thread reads single rows.
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=STREAM_ROWS):
                yield from read_batch(batch.slice(0, limit - read), self.path, read)
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


def read_batch(batch: pa.RecordBatch | pa.Table, path: str, start: int) -> list[RawRow]:
    """Return the rows of a batch of the file `path`, which begins at its row `start`.

    A Parquet column has a single struct type: a key of any row is null in all other rows. These nulls are
    left out, at any depth. Nulls of lists, of maps and of whole columns are values, and stay.

    Raises:
        DataError: Python cannot represent a value; the message names row and column.
    """
    columns: dict[str, list[Any]] = {}
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        take = _without_filling(values.type)
        try:
            items = values.to_pylist()
        except (ValueError, OverflowError) as error:  # such as nanoseconds, or text that is not UTF-8
            raise _unreadable(values, path, start, name) from error
        columns[name] = items if take is None else [None if item is None else take(item) for item in items]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _unreadable(values: pa.Array | pa.ChunkedArray, path: str, start: int, name: str) -> DataError:
    for index, value in enumerate(values):
        try:
            value.as_py()
        except (ValueError, OverflowError) as error:
            return RowPlace(path, "", start + index).error(name, f"cannot be read: {error}")
    raise AssertionError("every value can be read by itself")


def _without_filling(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return the function that leaves out nulls of structs in a value of this type, and makes dictionaries of
    maps. None: it contains neither.
    """
    if pa.types.is_dictionary(kind):
        return _without_filling(kind.value_type)
    if pa.types.is_struct(kind):
        fields = {field.name: _without_filling(field.type) for field in kind}
        return lambda value: {
            name: item if (take := fields[name]) is None else take(item)
            for name, item in value.items()
            if item is not None
        }
    if pa.types.is_map(kind):
        of_item = _in_container(_without_filling(kind.item_type))
        return lambda value: {key: of_item(item) for key, item in value}
    if not hasattr(kind, "value_type") or (taken := _without_filling(kind.value_type)) is None:
        return None
    of_value = _in_container(taken)
    return lambda value: [of_value(item) for item in value]


def _in_container(take: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return lambda item: item if item is None or take is None else take(item)


def _whole_json(path: Path) -> list[Any] | None:
    """Return the rows of a file that is one JSON value, a list or a single object; None if it has one object
    per line.

    Raises:
        DataError: it begins like a list, but is not valid JSON.
    """
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        if isinstance(decode_json(first), dict):
            return None
    except ValueError:
        pass  # its first line alone is no value
    try:
        value = decode_json(path.read_bytes())
    except ValueError as error:
        if first.lstrip().startswith(b"["):
            raise DataError(f"{path}: not valid JSON: {error}") from error
        return None
    return value if isinstance(value, list) else [value]


class WholeJson:
    """Rows of a file that is one JSON value. All are in memory."""

    def __init__(self, path: str, rows: list[Any]) -> None:
        self.path = path
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> RawRow:
        row = self._rows[index]
        if not isinstance(row, dict):
            place = RowPlace(self.path, "", index)
            raise DataError(f"{place}: must be a JSON object, is {type(row).__name__}")
        return row

    def rows(self, limit: int) -> Iterator[RawRow]:
        return (self.row(index) for index in range(min(limit, len(self))))

    def line(self, index: int) -> int | None:
        return None


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
            row = decode_json(text)
        except ValueError as error:
            # A first line that is no whole object may be of a file that has an object over several lines.
            is_whole = index > 0 or text.rstrip().endswith(b"}")
            hint = "" if is_whole else "; write one object per line, or one array"
            raise DataError(f"{self.path}: line {self.line(index)}: not valid JSON: {error}{hint}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.path}: line {self.line(index)}: must be one JSON object per line, is "
                f"{type(row).__name__}"
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
