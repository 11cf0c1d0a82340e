"""Safetensors files that all ranks write together: each rank writes the parts of the weights that it has.

Nothing is gathered. The first rank creates the files at their full length, each rank writes its parts at
their places, and the result has the bytes that safetensors' own `save_file` writes.

Format: 8 bytes with the length of the header, the header as JSON, then the values of all tensors.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from torch import Tensor

from agentrl.learner.division import Box
from agentrl.learner.model import Policy
from agentrl.learner.sharding import copy_of
from agentrl.servers.process_group import tensor_bytes
from agentrl.types import TensorSpec

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Header of a file, and where each tensor begins in the file; num_bytes of the whole file."""

    header: bytes
    begins: Mapping[str, int]
    num_bytes: int

    def create(self, file: Path) -> None:
        """Write the header and reserve the length of the file, in which the values are missing."""
        with file.open("wb") as opened:
            opened.write(self.header)
            opened.truncate(self.num_bytes)
        file.chmod(0o644)  # a server may run under another account


def lay_out(specs: Sequence[TensorSpec]) -> FileLayout:
    """Return the layout of a file with the given tensors of one dtype, as `save_file` orders them."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        begins[spec.name] = end
        described[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(
        header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + end
    )


class PartsWriter:
    """Writes this rank's parts of a policy's weights into files that exist.

    error: the first failure, after which nothing is written. Raising it would leave the other ranks waiting
    in the collectives of merged adapters.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._order = {weight: index for index, weight in enumerate(policy.tensors)}
        self.error: OSError | None = None

    def write(self, file: Path, layout: FileLayout) -> None:
        """Write the parts that belong into one file, and sync it. A collective if weights have adapters."""
        by_weight: dict[str, list[str]] = {}
        for name in layout.begins:
            by_weight.setdefault(self._policy.pieces[name].weight, []).append(name)
        try:
            descriptor = os.open(file, os.O_WRONLY) if self.error is None else None
        except OSError as error:
            descriptor, self.error = None, error
        for weight, names in by_weight.items():
            own, begin = self._policy.own_part(weight)
            if descriptor is not None and self._is_mine(weight):
                try:
                    self._write_parts(descriptor, layout, names, own, begin)
                except OSError as error:
                    self.error = self.error or error
        if descriptor is not None:
            try:
                os.fsync(descriptor)
            except OSError as error:
                self.error = self.error or error
            os.close(descriptor)

    def _is_mine(self, weight: str) -> bool:
        """Return whether this rank writes its part: ranks with copies of one part share the weights."""
        copy, num_copies = copy_of(self._policy.tensors[weight])
        return self._order[weight] % num_copies == copy

    def _write_parts(
        self, descriptor: int, layout: FileLayout, names: Sequence[str], own: Tensor, begin: Sequence[int]
    ) -> None:
        if self.error is not None:
            return
        for name in names:
            piece = self._policy.pieces[name]
            box = Box(piece.start, piece.extent).overlap(Box(tuple(begin), tuple(own.shape)))
            if box is None:
                continue
            data = tensor_bytes(own[box.slices(begin)].to(self._policy.published_dtype))
            inside = [(part.start, part.stop) for part in box.slices(piece.start)]
            done = 0
            for first, length in _runs(inside, piece.extent):
                size = length * self._policy.published_dtype.itemsize
                place = layout.begins[name] + first * self._policy.published_dtype.itemsize
                _write_at(descriptor, data[done : done + size], place)
                done += size


def _runs(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first element, number of elements) of the runs of a box that are contiguous in a tensor of
    `shape`.
    """
    # The box is whole in all dimensions from `inner` + 1 on.
    inner = len(shape) - 1
    while inner > 0 and box[inner] == (0, shape[inner]):
        inner -= 1
    if not shape:
        yield 0, 1
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = (box[inner][1] - box[inner][0]) * strides[inner]
    for outer in product(*(range(first, end) for first, end in box[:inner])):
        offset = sum(index * stride for index, stride in zip(outer, strides[:inner], strict=True))
        yield offset + box[inner][0] * strides[inner], length


def _write_at(descriptor: int, data: memoryview, place: int) -> None:
    while data.nbytes:  # one call writes at most 2 GiB
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written
