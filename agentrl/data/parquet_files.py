"""Parquet files of a run, written so that readers find every changed byte.

Pages have checksums, which Parquet knows. The footer (schema, places of columns) and the headers of pages
have none there. So a seal lies between the last column and the footer, where no reader of Parquet looks: 8
bytes that mark it, the CRC-32 of all before it, and that of the footer. Files without a seal are read as they
are.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.data.atomic_files import appearing_whole
from agentrl.errors import DataError

_MARK = b"agentrl\x01"
_SEAL = struct.Struct("<8sII")
_END = struct.Struct("<I4s")
"""Size of the footer, and Parquet's mark at the end of a file."""
_CHUNK_BYTES = 1 << 24
_UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, MemoryError, OverflowError)
"""What pyarrow, and who decodes its tables, raise for damage in a file without checksums."""


@contextmanager
def writing_parquet(path: Path, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    """Yield a writer of a file that appears sealed and whole at `path`, or not at all.

    options: of `pyarrow.parquet.ParquetWriter`.
    """
    with appearing_whole(path) as partial:
        with pq.ParquetWriter(partial, schema, write_page_checksum=True, **options) as writer:
            yield writer
        _seal(partial)


def write_table(table: pa.Table, path: Path, **options: Any) -> None:
    """Write a table as `writing_parquet` does."""
    with writing_parquet(path, table.schema, **options) as writer:
        writer.write_table(table)


def _seal(path: Path) -> None:
    with path.open("r+b") as file:
        start, footer = _footer(file)
        checksum = _checksum(file, start)
        file.seek(start)
        file.write(_SEAL.pack(_MARK, checksum, zlib.crc32(footer)) + footer)
        file.write(_END.pack(len(footer), b"PAR1"))


@contextmanager
def reading_parquet(path: str | Path, what: str) -> Iterator[None]:
    """Turn every error of reading a file within the block into a DataError of one line that names it.

    A file that does not exist is left to the caller. what: the file should be, for the message.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(
            f"{path} cannot be read as {what}: {' '.join(reason.split())[:200] or type(error).__name__}"
        ) from error


def open_parquet(path: str | Path, what: str, **options: Any) -> pq.ParquetFile:
    """Open a file whose footer is as it was written; its pages are verified when they are read, within
    `reading_parquet`.

    options: of `pyarrow.parquet.ParquetFile`.

    Raises:
        DataError: it is damaged, or something else.
        FileNotFoundError: there is no such file.
    """
    with reading_parquet(path, what):
        check_seal(path, whole=False)
        return pq.ParquetFile(path, page_checksum_verification=True, **options)


def read_table(path: str | Path, what: str, **options: Any) -> pa.Table:
    """Read a file, all of whose bytes are as they were written.

    options: of `pyarrow.parquet.read_table`.

    Raises:
        DataError: it is damaged, or something else.
        FileNotFoundError: there is no such file.
    """
    with reading_parquet(path, what):
        check_seal(path, whole=True)
        table = pq.read_table(path, page_checksum_verification=True, **options)
        table.validate(full=True)  # texts of a file without checksums may be no Unicode
        return table


def check_seal(path: str | Path, *, whole: bool) -> None:
    """Compare a file with its seal, if it has one. whole: read all bytes, not only the footer.

    Raises:
        ValueError: it was changed, or is no Parquet file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        start, footer = _footer(file)
        file.seek(max(0, start - _SEAL.size))
        found = file.read(_SEAL.size)
        if len(found) < _SEAL.size or not found.startswith(_MARK):
            return
        _, body_checksum, footer_checksum = _SEAL.unpack(found)
        if zlib.crc32(footer) != footer_checksum:
            raise ValueError("its footer does not match its checksum")
        if whole and _checksum(file, start - _SEAL.size) != body_checksum:
            raise ValueError("its content does not match its checksum")


def _footer(file: IO[bytes]) -> tuple[int, bytes]:
    """Return where the footer of a Parquet file begins, and the footer; ValueError if there is none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size))
    end = file.read()
    length, mark = _END.unpack(end) if len(end) == _END.size else (0, b"")
    start = size - _END.size - length
    if mark != b"PAR1" or start < 4:
        raise ValueError("it is no whole Parquet file")
    file.seek(start)
    return start, file.read(length)


def _checksum(file: IO[bytes], size: int) -> int:
    """Return the CRC-32 of the first `size` bytes."""
    checksum = 0
    file.seek(0)
    while size > 0 and (chunk := file.read(min(_CHUNK_BYTES, size))):
        checksum = zlib.crc32(chunk, checksum)
        size -= len(chunk)
    return checksum
