"""Buckets of published weights: how they are cut, gathered on rank 0, and broadcast to the servers."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from agentrl.errors import InfrastructureError
from agentrl.learner.division import Box, Division, divide
from agentrl.learner.model import Policy
from agentrl.learner.sharding import mesh_of
from agentrl.servers.process_group import Broadcast
from agentrl.servers.weight_names import Piece, is_contiguous
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
    """Gathers buckets of a policy's weights on one rank, each as one flat buffer of bytes.

    Every rank rounds its parts to the published dtype and sends them: large ones straight to their place, if
    they are contiguous there, the others of a bucket in messages. Over how many dimensions of a mesh a weight
    is sharded makes no difference. Creating a gatherer is a collective.
    """

    def __init__(self, policy: Policy, *, rank: int) -> None:
        self._policy = policy
        self._rank = rank
        self._divisions: dict[Hashable, Division | None] = {}
        self._shares: dict[Hashable, list[_Share]] = {}
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Not every rank has something to send, but nccl connects only in a call of all ranks.
            dist.all_reduce(torch.zeros(1, device=policy.device))

    def gather(self, names: Sequence[str], *, to: int = 0) -> Tensor | None:
        """Return the bytes of the named weights as published, u8[sum of sizes], row-major and unpadded; None
        on all ranks but `to`. A collective.
        """
        plan = self._plan(names, to)
        if self._rank != to:
            self._send(plan, to)
            return None
        flat = self._empty(sum(math.prod(self._policy.pieces[name].shape) for name in names))
        self._receive(plan, flat)
        return flat.view(torch.uint8)

    def _plan(self, names: Sequence[str], to: int) -> _Plan:
        """Return what this rank sends of a bucket, or on rank `to` what all ranks send."""
        plan = _Plan()
        for slot in self._slots(names, to):
            if slot.is_joint(self._direct_elements):
                plan.joint.setdefault(slot.division.ranks, []).append(slot)
                continue
            for share in self._shares_of(slot):
                if share.rank != self._rank and self._rank != to:
                    continue
                if slot.is_direct(share.box, self._direct_elements):
                    plan.direct.append((slot, share))
                else:
                    plan.loose.setdefault(share.rank, []).append((slot, share.box))
        return plan

    @property
    def _direct_elements(self) -> int:
        return DIRECT_BYTES // self._policy.published_dtype.itemsize

    def _slots(self, names: Sequence[str], to: int) -> Iterator[_Slot]:
        """Yield the place of each weight of which this rank and rank `to` have parts of the same copy."""
        begin = 0
        own_of: dict[str, Tensor] = {}
        for name in names:
            piece = self._policy.pieces[name]
            division = self._division(piece.weight, to)
            # With HSDP, ranks with another copy of the model have nothing to do.
            if division is not None and self._rank in division.ranks:
                if piece.weight not in own_of:
                    own_of[piece.weight] = self._policy.own_part(piece.weight)[0]
                own_box = division.boxes[division.ranks.index(self._rank)]
                yield _Slot(piece, begin, division, own_of[piece.weight], own_box)
            begin += math.prod(piece.shape)

    def _division(self, weight: str, to: int) -> Division | None:
        """Return how a weight is divided; weights with one layout share the result."""
        tensor = self._policy.tensors[weight]
        layout = (tuple(tensor.shape), mesh_of(tensor), getattr(tensor, "placements", None), to)
        if layout not in self._divisions:
            self._divisions[layout] = divide(tensor, to)
        return self._divisions[layout]

    def _shares_of(self, slot: _Slot) -> list[_Share]:
        """Return the parts of a piece by the ranks that have them; equal pieces of equal weights share it."""
        key = (id(slot.division), slot.piece.start, slot.piece.extent)
        if key not in self._shares:
            ranks = zip(slot.division.ranks, slot.division.boxes, strict=True)
            found = ((rank, slot.box.overlap(box)) for rank, box in ranks)
            self._shares[key] = [_Share(rank, box) for rank, box in found if box is not None]
        return self._shares[key]

    def _send(self, plan: _Plan, to: int) -> None:
        messages = [self._rounded(slot.own_part(share.box)) for slot, share in plan.direct]
        messages += [self._joined([slot.own for slot in slots]) for slots in plan.joint.values()]
        messages += [
            self._joined([slot.own_part(box) for slot, box in parts]) for parts in plan.loose.values()
        ]
        _exchange([P2POp(dist.isend, _bytes(message), to) for message in messages])

    def _receive(self, plan: _Plan, flat: Tensor) -> None:
        """Receive what `_send` of the other ranks sends, in the same order from each of them."""
        receives: list[P2POp] = []

        def receive(message: Tensor, rank: int) -> None:
            receives.append(P2POp(dist.irecv, _bytes(message), rank))

        for slot, share in plan.direct:
            place = slot.place(flat, share.box)
            if share.rank == self._rank:
                place.copy_(slot.own_part(share.box))
            else:
                receive(place, share.rank)
        joint: list[tuple[list[_Slot], Tensor]] = []
        for ranks, slots in plan.joint.items():
            length = sum(slot.own.numel() for slot in slots)
            joint.append((slots, self._empty(len(ranks) * length).view(len(ranks), length)))
            for rank, message in zip(ranks, joint[-1][1], strict=True):
                if rank == self._rank:
                    _join([slot.own for slot in slots], message)
                else:
                    receive(message, rank)
        loose: list[tuple[list[tuple[_Slot, Box]], Tensor]] = []
        for rank, parts in plan.loose.items():
            if rank == self._rank:
                for slot, box in parts:
                    slot.place(flat, box).copy_(slot.own_part(box))
            else:
                loose.append((parts, self._empty(sum(box.num_elements for _, box in parts))))
                receive(loose[-1][1], rank)
        _exchange(receives)
        for slots, messages in joint:
            lengths = [slot.own.numel() for slot in slots]
            for slot, own in zip(slots, messages.split(lengths, dim=1), strict=True):
                slot.division.join(own, slot.place(flat, slot.box))
        for parts, message in loose:
            lengths = [box.num_elements for _, box in parts]
            for (slot, box), part in zip(parts, message.split(lengths), strict=True):
                slot.place(flat, box).copy_(part.view(box.size))

    def _rounded(self, own: Tensor) -> Tensor:
        return own.to(self._policy.device, self._policy.published_dtype).contiguous()

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Round parts into one message."""
        message = self._empty(sum(part.numel() for part in parts))
        _join(parts, message)
        return message

    def _empty(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=self._policy.published_dtype, device=self._policy.device)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a published weight is in a bucket: from element `begin` on; and what this rank has of it.

    own: this rank's part of the weight, which is `own_box` of it.
    """

    piece: Piece
    begin: int
    division: Division
    own: Tensor
    own_box: Box

    @property
    def box(self) -> Box:
        """What the piece is of its weight."""
        return Box(self.piece.start, self.piece.extent)

    def is_joint(self, direct_elements: int) -> bool:
        """Return whether the parts of all ranks are sent and unpacked as one block."""
        is_whole = self.piece.extent == self.division.shape
        return (
            is_whole and self.division.is_even and not self.is_direct(self.division.boxes[0], direct_elements)
        )

    def is_direct(self, box: Box, direct_elements: int) -> bool:
        """Return whether a part is sent straight to its place, without a copy in a message."""
        return box.num_elements >= direct_elements and is_contiguous(box.size, self.piece.extent)

    def own_part(self, box: Box) -> Tensor:
        """Return a part of the weight that this rank has."""
        return self.own[box.slices(self.own_box.begin)]

    def place(self, flat: Tensor, box: Box) -> Tensor:
        """Return the view of a part of the weight in a bucket."""
        whole = flat[self.begin : self.begin + self.box.num_elements].view(self.piece.extent)
        return whole[box.slices(self.piece.start)]


@dataclass(frozen=True, slots=True)
class _Share:
    """A part of a weight that one rank sends."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the parts of a bucket are sent.

    direct: by themselves. joint: parts of one size, by the ranks that have them; a message from each of them.
    loose: other parts, by the rank that has them; a message from each.
    """

    direct: list[tuple[_Slot, _Share]] = field(default_factory=list)
    joint: dict[tuple[int, ...], list[_Slot]] = field(default_factory=dict)
    loose: dict[int, list[tuple[_Slot, Box]]] = field(default_factory=dict)


def _join(parts: Sequence[Tensor], message: Tensor) -> None:
    """Round parts into a message, one behind the other."""
    for part, place in zip(parts, message.split([part.numel() for part in parts]), strict=True):
        place.view(part.shape).copy_(part)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _exchange(operations: list[P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def choose_sources(num_sources: int, num_ranks: int) -> tuple[int, ...]:
    """Return the ranks that send buckets: the first of each of `num_sources` equal runs of ranks.

    Neighboring ranks are on one node, so the sources are spread over the nodes.
    """
    return tuple(index * num_ranks // num_sources for index in range(num_sources))


class BucketSender:
    """Broadcasts buckets from their sources: while one bucket is sent, the next ones are gathered.

    Source i has every n-th bucket from the i-th on. A source has at most two buckets in memory, and what the
    ranks have sent of one.

    group: of this rank and the servers; None on ranks that are no source, which only help to gather.
    """

    def __init__(
        self, gatherer: BucketGatherer, group: ProcessGroup | None, *, sources: Sequence[int] = (0,)
    ) -> None:
        self._gatherer = gatherer
        self._group = group
        self._sources = tuple(sources)
        self._travelling: Broadcast | None = None
        self._error: InfrastructureError | None = None
        self._gather_s = self._wait_s = 0.0

    def send(self, buckets: Sequence[Sequence[str]]) -> SendTimes:
        """Gather each bucket and broadcast it, in order. A collective.

        After a bucket of this rank that did not arrive, the others are gathered but not sent: the other
        ranks, which do not know of the failure, must not wait for this one.

        Raises:
            InfrastructureError: a bucket of this rank did not arrive.
        """
        for index, names in enumerate(buckets):
            started = time.perf_counter()
            flat = self._gatherer.gather(names, to=self._sources[index % len(self._sources)])
            self._gather_s += time.perf_counter() - started
            if flat is None:
                continue
            # The previous bucket of this rank was sent while others were gathered; wait for it only now.
            self._settle()
            if self._group is not None and self._error is None:
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
