"""Safe reading of torch.distributed.checkpoint files: nothing in a checkpoint can execute code.

DCP itself reads `.metadata` with `pickle.load`, and everything that is not a tensor with
`torch.load(weights_only=False)`. Both execute code that the file names. Here the first is restricted to DCP's
own classes, and the second to tensors and plain values.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from agentrl.errors import CheckpointError

METADATA = ".metadata"

_KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): serialization._get_layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (metadata.__name__, kind.__name__): kind
        for kind in (
            *(
                metadata.Metadata,
                metadata.MetadataIndex,
                metadata.StorageMeta,
                metadata.TensorProperties,
                metadata._MEM_FORMAT_ENCODING,
            ),
            *(metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata.BytesStorageMetadata),
        )
    },
    # The checkpoint's own path in its metadata, never opened. Python 3.13 writes another module name.
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
}
"""Everything that a learner checkpoint's metadata contain, besides dtypes."""

_BUILT = tuple(kind for kind in _KNOWN.values() if isinstance(kind, type) and kind is not PurePosixPath)

_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, struct.error, ArithmeticError, LookupError, AssertionError),
    *(AttributeError, TypeError, ValueError, MemoryError, RuntimeError),
)
"""What an unpickler raises on bytes that are not a pickle."""


class _MetadataUnpickler(pickle._Unpickler):
    """Builds only objects of the classes above.

    Based on Python's unpickler, because the C one lets a file set attributes of a class.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which does not belong in a checkpoint"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it asks for an object that is not in it")

    def load_build(self) -> None:
        # BUILD sets an object's attributes. Applied to one of the allowed classes itself, it could replace
        # its methods.
        subject = self.stack[-2]  # type: ignore[attr-defined]  # not in typeshed
        if not isinstance(subject, _BUILT):
            raise pickle.UnpicklingError(f"it changes {type(subject).__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[attr-defined, dict-item]  # noqa: RUF012


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of the DCP files in `folder`.

    Raises:
        CheckpointError: they are missing, damaged, or contain something that does not belong to a checkpoint.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    problem = _problem(found)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}")
    return found  # type: ignore[no-any-return]


def _problem(found: object) -> str | None:
    if not isinstance(found, Metadata):
        return f"it contains a {type(found).__name__} instead of metadata"
    if not isinstance(found.state_dict_metadata, dict) or not isinstance(found.storage_data, dict):
        return "its tables are missing"
    for entry in found.state_dict_metadata.values():
        if not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            return f"it describes a {type(entry).__name__}, which is neither a tensor nor bytes"
    for index, place in found.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            return "its table of places is of other types"
        if (
            not isinstance(place.relative_path, str)
            or os.path.basename(place.relative_path) != place.relative_path
        ):
            return f"{index.fqn} should be in {place.relative_path!r}, which is not a file of the folder"
    return None


class PlainReader(FileSystemReader):
    """Reads DCP files, with the metadata restricted to known classes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._failed: CheckpointError | None = None

    # DCP inspects the signature: without `rank` it requests no other file.
    def read_metadata(self) -> Metadata:  # type: ignore[override]
        try:
            found = read_metadata(self._folder)
        except CheckpointError as error:
            # Raised by set_up_storage_reader: DCP would print a traceback of an exception raised here.
            self._failed, found = error, Metadata({}, storage_data={})
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._failed is not None:
            raise self._failed
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)


class PlainPlanner(DefaultLoadPlanner):
    """Loads only tensors and plain values, no objects of other classes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        try:
            set_element(self.original_state_dict, path, torch.load(value, weights_only=True))
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{read_item.dest_index.fqn} is damaged: it contains more than numbers, text and tensors"
            ) from error
