"""The index of a folder that agentrl wrote as a whole: names, sizes and hashes of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel, ValidationError

from agentrl.data.atomic_files import write_atomically
from agentrl.errors import CheckpointError, StorageError

INDEX = "agentrl_files.json"
"""File in a folder that agentrl sent, written last: names, sizes and hashes of all others."""


class FolderIndex(BaseModel):
    """The content of INDEX. files: path -> (bytes, sha256); None while the folder is being sent."""

    files: dict[str, tuple[int, str]] | None

    def to_bytes(self) -> bytes:
        return json.dumps(self.model_dump(), indent=1).encode()


def index_folder(folder: Path) -> None:
    """Write the index of a folder: `check_folder` finds what changes afterwards."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != INDEX)
    files = {str(path.relative_to(folder)): stored(path) for path in paths}
    write_atomically(folder / INDEX, FolderIndex(files=files).to_bytes().decode())


def check_folder(folder: Path, names: Collection[str] | None = None) -> None:
    """Compare a folder with its index, if it has one. names: only these files; None: all.

    Raises:
        CheckpointError: a file is missing or was changed, or the index is damaged.
    """
    path = folder / INDEX
    if not path.is_file():
        return
    try:
        files = FolderIndex.model_validate_json(path.read_bytes()).files or {}
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged") from error
    for name, expected in files.items():
        if names is None or name in names:
            file = below(folder, name)
            if not file.is_file() or stored(file) != expected:
                raise CheckpointError(f"{file} is missing or was changed since it was written")


def stored(path: Path) -> tuple[int, str]:
    """Return size and sha256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def below(folder: Path, name: str) -> Path:
    """Return the path of a file of `folder`, whose name comes from storage.

    Raises:
        StorageError: the name leads out of the folder.
    """
    if problem := problem_of_name(name):
        raise StorageError(f"{problem} below {folder}")
    path = folder / name
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise StorageError(f"{path} leads out of {folder}, over a link")
    return path


def problem_of_name(name: str) -> str | None:
    """Return what is wrong with the name of a file that comes from storage; None: nothing."""
    parts = name.split("/")
    is_bad = any(part in ("", ".", "..") or len(part.encode(errors="replace")) > 255 for part in parts)
    if is_bad or not name.isprintable() or len(name) > 1024:
        return f"{name[:100]!r} is not the name of a file"
    return None
