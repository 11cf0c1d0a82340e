"""The original rows of a data set, from a file, a folder, or a data set of the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.data.files import SUFFIXES, RawRow, open_rows
from agentrl.data.row_place import RowPlace
from agentrl.data.storage import local_path
from agentrl.errors import DataError

SPLITS = ("train", "validation", "valid", "val", "dev", "test")
DESCRIPTIONS = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})
"""Files that published folders contain besides their data."""

_SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]{16})?$")


@dataclass(frozen=True, slots=True)
class OriginalSource:
    """Location of original files: a file, a folder, a URL of either, or a name on the hub (owner/name).

    Attributes:
        subset: folder name of one part of the data set; None: all of it.
        split: only this split; None: all.
        revision: on the hub, see `fetch_dataset`.
    """

    name: str | Path
    subset: str | None = None
    split: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class DataFile:
    path: Path
    split: str


@dataclass(frozen=True, slots=True)
class Original:
    """A row as its authors wrote it, with its location, and its index in the split (from 0)."""

    raw: RawRow
    place: RowPlace
    split: str
    index: int


def open_originals(source: OriginalSource) -> list[DataFile]:
    """Return the data files of a source, ordered by name.

    Raises:
        DataError: there is no such file, folder, data set, subset or split, or it contains no data.
    """
    name, path = str(source.name), local_path(str(source.name))
    root = path if path.exists() else _local_path(source)
    if source.subset is not None and not (root / source.subset).is_dir():
        raise DataError(f"{name!r} has no subset (folder) {source.subset!r}")
    root = root / (source.subset or "")
    files = [DataFile(root, split_of(root))] if root.is_file() else _files_in(root)
    if not files:
        raise DataError(f"{name!r} has no data: no {', '.join(SUFFIXES)} file")
    if source.split is None:
        return files
    chosen = [file for file in files if file.split == source.split]
    if not chosen:
        raise DataError(
            f"{name!r} has no split {source.split!r}; it has "
            f"{', '.join(dict.fromkeys(file.split for file in files))}"
        )
    return chosen


def split_of(path: Path, root: Path | None = None) -> str:
    """Return the split of a file.

    It is the file's own name or that of a folder below `root`, if it is one of SPLITS; else the file's own
    name.
    """
    name = _SHARD.sub("", path.stem)
    parents = [part.removeprefix("partial-") for part in path.relative_to(root).parts[:-1]] if root else []
    return next((part for part in (name, *reversed(parents)) if part in SPLITS), name)


def read_originals(files: Sequence[DataFile]) -> Iterator[Original]:
    """Yield the rows of all files.

    Raises:
        DataError: a file cannot be read; the message names file and line.
    """
    counts: dict[str, int] = {}
    for file in files:
        for raw, place in _rows(file):
            index = counts.get(file.split, 0)
            counts[file.split] = index + 1
            yield Original(raw, place, file.split, index)


def _local_path(source: OriginalSource) -> Path:
    # Imported here: the hub client would take half of every command's start-up time
    from agentrl.data.hub import fetch_dataset

    return fetch_dataset(str(source.name), subset=source.subset, revision=source.revision)


def _files_in(root: Path) -> list[DataFile]:
    if not root.is_dir():
        return []  # the hub had no files to download
    # If the folder itself contains data, subfolders are ignored: they may contain anything.
    paths = _data_files(root.iterdir()) or _data_files(root.rglob("*"))
    return [DataFile(path, split_of(path, root)) for path in paths]


def _data_files(entries: Iterator[Path]) -> list[Path]:
    return sorted(
        path
        for path in entries
        if path.suffix in SUFFIXES and path.name not in DESCRIPTIONS and path.is_file()
    )


def _rows(file: DataFile) -> Iterator[tuple[RawRow, RowPlace]]:
    path = str(file.path)
    rows = open_rows(path)
    for index, raw in enumerate(rows.rows(len(rows))):
        yield raw, RowPlace(path, file.split, index, rows.line(index))
