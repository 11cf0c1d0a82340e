"""The safetensors files of a model's folder, and what their headers say; no weight is read here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 10**8
"""Of a file, as in the safetensors library: more is not a header."""

_LENGTH_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor as a header describes it. begin, end: of its bytes in the file. dtype: F32, BF16, ..."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, entry: Mapping[str, Any], start: int) -> HeaderEntry:
        """Read one entry of a header. start: where the weights begin in the file."""
        begin, end = entry["data_offsets"]
        if begin < 0 or end < begin:
            raise ValueError(f"a tensor at the bytes {begin} to {end}")
        return cls(str(entry["dtype"]), tuple(entry["shape"]), start + begin, start + end)


def weight_files(folder: Path, *, single: str = SINGLE) -> list[Path]:
    """Return the safetensors files of a model; none if the folder has neither `single` nor an index.

    Raises:
        ConfigError: the index cannot be read, or names files that are not there.
    """
    if (folder / single).is_file():
        return [folder / single]
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read: {error!r}") from error
    if strange:
        raise ConfigError(f"{index} names {strange[0]!r}, which is not a file of its folder")
    lost = [name for name in names if not (folder / name).is_file()]
    if lost:
        raise ConfigError(
            f"{folder} lacks {len(lost)} of the {len(names)} files that {INDEX} names: {', '.join(lost[:8])}"
        )
    return [folder / name for name in names]


def read_entries(file: Path) -> dict[str, HeaderEntry]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ConfigError: the file is missing, cut or damaged.
    """
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            text = opened.read(length) if length <= min(size, MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if len(text) < length:
        raise ConfigError(
            f"{file} is cut, or is no safetensors file: its header should have {length:,} bytes, and the "
            f"file has {size:,}; copy it again"
        )
    start = _LENGTH_BYTES + length
    try:
        header = json.loads(text)
        found = {name: HeaderEntry.of(entry, start) for name, entry in header.items() if name != _METADATA}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is damaged: its header cannot be read ({error!r}); copy it again"
        ) from error
    needed = max((entry.end for entry in found.values()), default=start)
    if size < needed:
        raise ConfigError(f"{file} is cut: it has {size:,} of {needed:,} bytes; copy it again")
    return found


_ANY_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Weights under names of their own, or pickled: transformers may find them."""


def check_weights(folder: Path) -> None:
    """Raise if a model's folder has no weights, or lacks a part of them, by the sizes and headers of its
    files.

    Raises:
        ConfigError: a file is missing, cut or damaged.
    """
    files = weight_files(folder)
    if not files and not any(True for form in _ANY_WEIGHTS for _ in folder.glob(form)):
        raise ConfigError("it has no weights: there is no *.safetensors in it")
    for file in files:
        read_entries(file)
