"""How a weight is divided over ranks: which box of it each rank holds, for any mesh and placements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # takes a second to import; the controller needs only the names of this module
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Box:
    """The part of `size` at `begin` of a tensor."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that begins at `origin`."""
        return tuple(slice(b - o, b - o + n) for b, n, o in zip(self.begin, self.size, origin, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return the box that both have in common, None if there is none."""
        begin = tuple(max(a, b) for a, b in zip(self.begin, other.begin, strict=True))
        size = tuple(min(e, o) - b for e, o, b in zip(self._end, other._end, begin, strict=True))
        return Box(begin, size) if all(n > 0 for n in size) else None

    @property
    def _end(self) -> Iterator[int]:
        return (b + n for b, n in zip(self.begin, self.size, strict=True))


@dataclass(frozen=True, slots=True)
class Division:
    """One copy of a tensor of `shape`: the ranks that hold it, in the order of their mesh, and their boxes.

    counts: ranks in each dimension of the mesh. cuts: for each dimension of the tensor, the dimensions of the
    mesh that cut it, the outermost first.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    counts: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have parts of one size."""
        return all(box.size == self.boxes[0].size for box in self.boxes)

    def join(self, parts: Tensor, whole: Tensor) -> None:
        """Copy the parts of all ranks, [ranks, elements of a part], into the tensor; `is_even` must hold.

        One copy for all ranks, however many there are.
        """
        part, num_meshes = self.boxes[0].size, len(self.counts)
        from_mesh = parts.reshape(*self.counts, *part)
        order, split = [], []
        for dim, cuts in enumerate(self.cuts):
            order += [*cuts, num_meshes + dim]
            split += [*(self.counts[cut] for cut in cuts), part[dim]]
        whole.view(split).copy_(from_mesh.permute(order))


def divide(tensor: Tensor, rank: int) -> Division | None:
    """Return how the copy of a tensor that `rank` has a part of is divided; None on ranks of other copies.

    A tensor that is not sharded is whole on `rank`.
    """
    from torch.distributed.tensor import DTensor

    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Division(shape, (rank,), (Box((0,) * len(shape), shape),), (), ((),) * len(shape))
    mesh, own = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    places = (mesh.mesh == rank).nonzero().tolist()
    if own is None or not places:
        return None
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if any(own[dim] != places[0][dim] for dim in copies):
        return None
    kept = [dim for dim in range(mesh.ndim) if dim not in copies]
    counts, cuts = tuple(mesh.size(dim) for dim in kept), _cuts(tensor, kept)
    boxes = tuple(_box(shape, counts, cuts, at) for at in product(*map(range, counts)))
    ranks = mesh.mesh[tuple(own[dim] if dim in copies else slice(None) for dim in range(mesh.ndim))]
    return Division(shape, tuple(ranks.flatten().tolist()), boxes, counts, cuts)


def _cuts(tensor: DTensor, kept: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return `Division.cuts`, by the positions of dimensions of the mesh in `kept`."""
    from torch.distributed.tensor import Shard

    first: list[list[int]] = [[] for _ in tensor.shape]
    last: list[list[int]] = [[] for _ in tensor.shape]
    for position, dim in enumerate(kept):
        placement = tensor.placements[dim]
        # A strided shard (FSDP's, of a tensor that was cut before) divides what the others left.
        cut: int = placement.dim  # type: ignore[attr-defined]  # weights are never partial sums
        (first if type(placement) is Shard else last)[cut].append(position)
    return tuple((*one, *reversed(other)) for one, other in zip(first, last, strict=True))


def _box(
    shape: Sequence[int], counts: Sequence[int], cuts: Sequence[Sequence[int]], at: Sequence[int]
) -> Box:
    """Return the box of the rank `at` these coordinates; torch's chunks, of which the last may be empty."""
    begins, sizes = [], []
    for length, dims in zip(shape, cuts, strict=True):
        begin, size = 0, length
        for dim in dims:
            chunk = -(-size // counts[dim])
            skipped = min(size, at[dim] * chunk)
            begin, size = begin + skipped, min(chunk, size - skipped)
        begins.append(begin)
        sizes.append(size)
    return Box(tuple(begins), tuple(sizes))
