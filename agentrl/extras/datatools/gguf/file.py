"""`GGUFFile`: metadata and tensors of a GGUF file, with every defect reported in one line."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

from agentrl.errors import ConfigError

T = TypeVar("T")

_MAGIC = b"GGUF"
_BLOCK_ELEMENTS = 4 * 2**20
"""Elements that are dequantised at once: 16 MiB of float32, and a few times as much while it is computed."""


class GGUFFile:
    """Metadata and tensors of one file. The tensors stay on disk until they are read."""

    def __init__(self, path: Path) -> None:
        """Read the metadata and the list of tensors.

        Raises:
            ConfigError: there is no such file, or it is not a whole GGUF file, or only one part of several.
        """
        self.path = path
        _check_magic(path)
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ConfigError(f"{path} is damaged or not complete: {_first_line(error)}") from error
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if (self.optional("split.count", int) or 1) > 1:
            raise ConfigError(f"{path} is one part of several; join them first (llama-gguf-split --merge)")

    def required(self, key: str, kind: type[T]) -> T:
        """Return the metadata `key`; raises ConfigError if it is missing or not of type `kind`."""
        value = self.optional(key, kind)
        if value is None:
            raise ConfigError(f"{self.path} has no {key}")
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """Return the metadata `key`, or None; raises ConfigError if it is not of type `kind`.

        Floats are stored in 32 bits: the shortest decimal number that is stored the same is returned.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if type(value) is not kind:
            raise ConfigError(f"{self.path}: {key} must be of type {kind.__name__}: {reprlib.repr(value)}")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # type: ignore[return-value]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost dimension first; raises ConfigError if it is missing."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path} has no tensor {name}")
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def read(self, name: str, rows: NDArray[np.int64] | None = None) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor in blocks of whole rows, dequantised.

        Args:
            rows: the row of the file for each row of the result; None: as in the file.

        Raises:
            ConfigError: the quantization is unknown, or a value is not finite.
        """
        tensor = self.tensors[name]
        num_rows = len(tensor.data)
        rows_per_block = max(1, _BLOCK_ELEMENTS * num_rows // tensor.n_elements)
        for start in range(0, num_rows, rows_per_block):
            chosen = slice(start, start + rows_per_block)
            try:
                block = dequantize(tensor.data[chosen if rows is None else rows[chosen]], tensor.tensor_type)
            except NotImplementedError as error:
                raise ConfigError(f"{self.path}: {name}: {_first_line(error)}") from error
            if not np.isfinite(block).all():
                raise ConfigError(f"{self.path} is damaged: {name} has values that are not finite")
            yield np.array(
                block, dtype=np.float32
            )  # a copy: blocks that need no computation are the file itself


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise ConfigError(f"{path} is not a GGUF file: it begins with {magic!r} instead of {_MAGIC!r}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
