"""What wandb wrote offline: its files are LevelDB's log format with a protobuf message per record."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32_768
HEADER = 7
WHOLE, FIRST, LAST = 1, 2, 4


def records(file: Path) -> Iterator[Record]:
    """Yield all records of a `.wandb` file."""
    data, position, parts = file.read_bytes(), HEADER, []
    while position + HEADER <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER:  # padding: a record's header is never divided
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            return
        parts.append(data[position + HEADER : position + HEADER + length])
        position += HEADER + length
        if kind in (WHOLE, LAST):
            yield Record.FromString(b"".join(parts))
            parts = []


def logged(folder: Path) -> list[dict]:
    """Return every row that the runs in `folder` logged, without wandb's own columns."""
    return [
        {
            name: json.loads(item.value_json)
            for item in record.history.item
            if not (name := item.key or "/".join(item.nested_key)).startswith("_")
        }
        for record in _all(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def alerts(folder: Path) -> list[tuple[str, str]]:
    """Return title and text of every alert."""
    return [
        (record.alert.title, record.alert.text)
        for record in _all(folder)
        if record.WhichOneof("record_type") == "alert"
    ]


def _all(folder: Path) -> Iterator[Record]:
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        yield from records(file)
