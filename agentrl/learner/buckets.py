"""Buckets of published weights: how they are cut, gathered on rank 0, and broadcast to the servers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from agentrl.errors import InfrastructureError
from agentrl.learner.model import Policy
from agentrl.learner.sharding import Cut, find_cut
from agentrl.sglang.process_group import Broadcast
from agentrl.sglang.weight_names import Piece
from agentrl.types import SendTimes, TensorSpec


def plan_buckets(specs: Sequence[TensorSpec], *, max_bytes: int) -> list[list[TensorSpec]]:
    """Cut `specs`, in order, into buckets of at most `max_bytes`; a larger tensor gets a bucket of its own.

    A bucket has one dtype, because it is sent as one flat byte buffer that the receiver views in that dtype.
    """
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        fits = buckets and size + spec.num_bytes <= max_bytes and buckets[-1][-1].dtype == spec.dtype
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.num_bytes
    return buckets


DIRECT_BYTES = 2**20
"""Of a rank's part of a weight: from this size on, a copy costs more than a message of its own."""


class BucketGatherer:
    """Gathers buckets of a policy's weights on rank 0, each as one flat buffer of bytes.

    Every rank rounds its parts to the published dtype and sends them to rank 0: large ones and rows of pieces
    (experts) straight to their place, those of small weights in one message. Weights that are sharded over
    several mesh dimensions are gathered one by one, on all ranks.
    """

    def __init__(self, policy: Policy, *, is_first: bool) -> None:
        self._policy = policy
        self._is_first = is_first

    def gather(self, names: Sequence[str]) -> Tensor | None:
        """Return the bytes of the named weights as published, u8[sum of sizes], row-major and unpadded; None
        on all ranks but 0. A collective.
        """
        slots = list(self._slots(names))
        flat = self._empty(sum(slot.num_elements for slot in slots)) if self._is_first else None
        by_group: dict[ProcessGroup, list[_Slot]] = {}
        for slot in slots:
            if slot.cut is not None:
                by_group.setdefault(slot.cut.group, []).append(slot)
        for group, cut in by_group.items():
            # With HSDP, the other copies of the model have nothing to do.
            if 0 not in dist.get_process_group_ranks(group):
                continue
            self._gather_rows(group, [slot for slot in cut if self._is_direct(slot)], flat)
            self._gather_packed(group, [slot for slot in cut if not self._is_direct(slot)], flat)
        rest = {slot.name: slot for slot in slots if slot.cut is None}
        for name, tensor in self._policy.full_tensors(list(rest)):
            if flat is not None:
                rest[name].of(flat).copy_(tensor)
        return None if flat is None else flat.view(torch.uint8)

    def _is_direct(self, slot: _Slot) -> bool:
        """Return whether ranks send their rows straight to their place, without a copy in a message."""
        size = slot.message_length * self._policy.published_dtype.itemsize
        return slot.is_by_rows and (not slot.is_whole or size >= DIRECT_BYTES)

    def _slots(self, names: Sequence[str]) -> Iterator[_Slot]:
        begin = 0
        for name in names:
            piece = self._policy.pieces[name]
            tensor = self._policy.tensors[piece.weight]
            cut, is_whole = find_cut(tensor), piece.shape == tensor.shape
            is_sent = cut is not None and (is_whole or cut.dim == 0)
            yield _Slot(name, piece, is_whole, begin, cut if is_sent else None)
            begin += math.prod(piece.shape)

    def _gather_rows(self, group: ProcessGroup, slots: Sequence[_Slot], flat: Tensor | None) -> None:
        """Gather weights and pieces whose weights are cut by rows, each rank's rows straight to their
        place.
        """
        ranks = dist.get_process_group_ranks(group)
        operations: list[P2POp] = []
        own_of = {weight: self._policy.own_part(weight)[0] for weight in _distinct(slots)}
        for slot in slots:
            own = own_of[slot.piece.weight]
            for owner in slot.owners:
                if flat is None:
                    if owner == group.rank():
                        rows = self._round(slot.own_rows(own, owner))
                        operations.append(P2POp(dist.isend, _bytes(rows), 0, group))
                elif ranks[owner] == 0:
                    slot.rows_in(flat, owner).copy_(slot.own_rows(own, owner))
                else:
                    place = _bytes(slot.rows_in(flat, owner))
                    operations.append(P2POp(dist.irecv, place, ranks[owner], group))
        _exchange(operations)

    def _gather_packed(self, group: ProcessGroup, slots: Sequence[_Slot], flat: Tensor | None) -> None:
        """Gather weights that are cut over one process group, with one message from each rank."""
        if not slots:
            return
        message_length = sum(slot.message_length for slot in slots)
        if flat is None:
            message = self._empty(message_length)
            self._pack(slots, message)
            _exchange([P2POp(dist.isend, _bytes(message), 0, group)])
            return
        messages = self._empty(group.size() * message_length).view(group.size(), message_length)
        receives = []
        for rank, message in zip(dist.get_process_group_ranks(group), messages, strict=True):
            if rank == 0:
                self._pack(slots, message)
            else:
                receives.append(P2POp(dist.irecv, _bytes(message), rank, group))
        _exchange(receives)
        begin = 0
        for slot in slots:
            slot.unpack(messages[:, begin : begin + slot.message_length], flat)
            begin += slot.message_length

    def _pack(self, slots: Sequence[_Slot], message: Tensor) -> None:
        """Round this rank's parts into a message; parts that are shorter than others leave a gap."""
        begin = 0
        for slot in slots:
            own, _ = self._policy.own_part(slot.piece.weight)
            slot.in_message(message[begin : begin + slot.message_length], own.shape).copy_(own)
            begin += slot.message_length

    def _round(self, own: Tensor) -> Tensor:
        return own.to(self._policy.device, self._policy.published_dtype).contiguous()

    def _empty(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=self._policy.published_dtype, device=self._policy.device)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a published weight is in a bucket: from element `begin` on.

    is_whole: the piece is all of its weight. cut: of the weight; None if `full_tensors` gathers it.
    """

    name: str
    piece: Piece
    is_whole: bool
    begin: int
    cut: Cut | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_by_rows(self) -> bool:
        return self.cut is not None and self.cut.dim == 0

    @property
    def owners(self) -> range:
        """Positions in the group of the ranks that have rows of the piece."""
        assert self.cut is not None
        first, size = self.piece.start[0], self.piece.extent[0]
        return range(first // self.cut.chunk, (first + size - 1) // self.cut.chunk + 1)

    def rows_in(self, flat: Tensor, owner: int) -> Tensor:
        """Return the view of the owner's rows in a bucket."""
        first, end = self._rows_of(owner)
        start = self.piece.start[0]
        return self.of(flat).view(self.piece.extent)[first - start : end - start]

    def own_rows(self, own: Tensor, owner: int) -> Tensor:
        """Return the rows of the piece in the owner's part of the weight."""
        assert self.cut is not None
        first, end = self._rows_of(owner)
        begin = owner * self.cut.chunk
        columns = zip(self.piece.start[1:], self.piece.extent[1:], strict=True)
        return own[slice(first - begin, end - begin), *(slice(a, a + size) for a, size in columns)]

    def _rows_of(self, owner: int) -> tuple[int, int]:
        """Return the first row of the weight that the owner has of the piece, and the one after the last."""
        assert self.cut is not None
        first, size, chunk = self.piece.start[0], self.piece.extent[0], self.cut.chunk
        return max(first, owner * chunk), min(first + size, (owner + 1) * chunk)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of a rank's part, of the largest if they differ."""
        assert self.cut is not None
        return (*self.shape[: self.cut.dim], self.cut.chunk, *self.shape[self.cut.dim + 1 :])

    @property
    def message_length(self) -> int:
        """Elements of a rank's part in a message."""
        return math.prod(self.part_shape)

    def of(self, flat: Tensor) -> Tensor:
        """Return this weight's view of a bucket."""
        return flat[self.begin : self.begin + self.num_elements].view(self.shape)

    def in_message(self, message: Tensor, own_shape: Sequence[int]) -> Tensor:
        """Return the view of a part of `own_shape` in this weight's share of a message."""
        assert self.cut is not None
        return message.view(self.part_shape).narrow(self.cut.dim, 0, own_shape[self.cut.dim])

    def unpack(self, messages: Tensor, flat: Tensor) -> None:
        """Copy the parts of all ranks, [ranks, message_length], into the bucket."""
        assert self.cut is not None
        dim, chunk = self.cut.dim, self.cut.chunk
        whole, parts = self.of(flat), messages.unflatten(1, self.part_shape)
        num_full, rest = divmod(self.shape[dim], chunk)
        # One copy for all ranks with a full part, however many there are.
        whole.narrow(dim, 0, num_full * chunk).unflatten(dim, (num_full, chunk)).copy_(
            parts[:num_full].movedim(0, dim)
        )
        if rest:
            whole.narrow(dim, num_full * chunk, rest).copy_(parts[num_full].narrow(dim, 0, rest))


def _distinct(slots: Sequence[_Slot]) -> list[str]:
    """Return the weights of the slots, each once, in order."""
    return list(dict.fromkeys(slot.piece.weight for slot in slots))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _exchange(operations: list[P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


class BucketSender:
    """Broadcasts buckets from rank 0: while one bucket is sent, the next is gathered.

    At most two buckets are in memory, and what the ranks have sent of one. Other ranks (`group` None) only
    help to gather.
    """

    def __init__(self, gatherer: BucketGatherer, group: ProcessGroup | None) -> None:
        self._gatherer = gatherer
        self._group = group
        self._travelling: Broadcast | None = None
        self._error: InfrastructureError | None = None
        self._gather_s = self._wait_s = 0.0

    def send(self, buckets: Sequence[Sequence[str]]) -> SendTimes:
        """Gather each bucket and broadcast it, in order. A collective.

        After a bucket that did not arrive, the others are gathered but not sent: the other ranks, which do
        not know of the failure, must not wait for this one.

        Raises:
            InfrastructureError: a bucket did not arrive.
        """
        for names in buckets:
            started = time.perf_counter()
            flat = self._gatherer.gather(names)
            self._gather_s += time.perf_counter() - started
            # The previous bucket was sent while this one was gathered; wait for it only now.
            self._settle()
            if flat is not None and self._group is not None and self._error is None:
                self._travelling = Broadcast(flat, self._group)
        self._settle()
        if self._error is not None:
            raise self._error
        return SendTimes(self._gather_s, self._wait_s)

    def _settle(self) -> None:
        travelling, self._travelling = self._travelling, None
        if travelling is None:
            return
        started = time.perf_counter()
        try:
            travelling.wait()
        except InfrastructureError as error:
            self._error = error
        self._wait_s += time.perf_counter() - started
