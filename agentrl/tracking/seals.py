"""Checksums within the text files of a run, by which readers find bytes and lines that changed or are gone.

A line of `metrics.jsonl`, `alarms.jsonl` and `versions.jsonl` ends with the CRC-32 of itself and of the line
before; a JSON document has a key `checksum`, and `config.yaml` a comment. Files of earlier versions have none
of them, and are read as they are.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError

CHECKSUM = "checksum"
LINE_FILES = ("metrics.jsonl", "alarms.jsonl", "versions.jsonl")
"""Files of a run whose lines have checksums; at its end, `result.json` has that of each last line."""
_COMMENT = "# CRC-32 of the lines below: "
_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}\n$')


def sealed_line(line: bytes, previous: int) -> tuple[bytes, int]:
    """Return a line of JSON, an object that is not empty, with its checksum, and that checksum.

    previous: checksum of the line before; 0 for the first.
    """
    body = line.rstrip(b"\n")
    checksum = zlib.crc32(body, previous)
    return body[:-1] + b',"crc":"%08x"}\n' % checksum, checksum


def checked_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file whose checksums are right, without a last line that a crash cut off.

    Raises:
        CheckpointError: a line does not match its checksum, or a line before it is missing.
    """
    previous = 0
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        previous = check_line(line + b"\n", previous, f"{path}, line {number}")
        yield line


def check_line(line: bytes, previous: int, where: str) -> int:
    """Return the checksum of a line, 0 if it has none. previous: that of the line before.

    Raises:
        CheckpointError: the line was changed, or a line before it is missing.
    """
    found = _SEAL.search(line)
    if found is None:
        if previous:  # all lines after one with a checksum have one
            raise CheckpointError(f"{where} is damaged: it has no checksum; move the file away to continue")
        return 0
    checksum = zlib.crc32(line[: found.start()] + b"}", previous)
    if checksum != int(found[1], 16):
        raise CheckpointError(
            f"{where} is damaged: it, or a line before it, was changed or removed; move the file away to "
            "continue"
        )
    return checksum


def last_checksum(path: Path) -> int:
    """Return the checksum of a file's last whole line, 0 if there is none, for the next line.

    Raises:
        CheckpointError: as `checked_lines`.
    """
    last = [*checked_lines(path)][-1:] if path.exists() else []
    found = _SEAL.search(last[0] + b"\n") if last else None
    return 0 if found is None else int(found[1], 16)


def sealed_text(text: str) -> str:
    """Return a text whose first line is a comment with the checksum of the others."""
    return f"{_COMMENT}{zlib.crc32(text.encode()):08x}\n{text}"


def check_text(path: Path) -> None:
    """Check a file of `sealed_text`, if it is one.

    Raises:
        CheckpointError: its text was changed.
    """
    content = path.read_bytes() if path.is_file() else b""
    first, _, rest = content.partition(b"\n")
    mark = _COMMENT.encode()
    is_wrong = first.startswith(mark) and first.removeprefix(mark) != b"%08x" % zlib.crc32(rest)
    if is_wrong or mark in rest:  # a line above the first one
        raise CheckpointError(
            f"{path} was changed after the run wrote it; remove the line of its checksum if that is meant"
        )


def sealed_document(fields: Mapping[str, Any]) -> str:
    """Return a JSON object as text, with a checksum."""
    return json.dumps({**fields, CHECKSUM: _checksum(fields)}, indent=1)


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, without its checksum.

    Raises:
        CheckpointError: it cannot be read, is no object, or does not match its checksum.
    """
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is damaged: it contains a {type(fields).__name__}, not an object")
    check_document(fields, str(path))
    return {name: value for name, value in fields.items() if name != CHECKSUM}


def check_document(fields: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if the fields of a JSON object have a checksum that they do not match."""
    if fields.get(CHECKSUM, _checksum(fields)) != _checksum(fields):
        raise CheckpointError(f"{where} is damaged: it does not match its checksum")


def _checksum(fields: Mapping[str, Any]) -> str:
    own = {name: value for name, value in fields.items() if name != CHECKSUM}
    return f"{zlib.crc32(json.dumps(own, sort_keys=True).encode()):08x}"
