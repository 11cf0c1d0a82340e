"""Shipments from a rollout process: finished trajectories, dropped groups and left-out members, in order of
occurrence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio

from agentrl.rollout.scopes import Scope
from agentrl.types import Trajectory

T = TypeVar("T")

MAX_SHIPMENT = 64
"""Maximal number of items per batch. Items that arrive while a call is in flight are shipped together."""


class TrajectorySink(Protocol):
    """The destination of trajectories, such as the replay buffer."""

    async def add(self, trajectories: Sequence[Trajectory]) -> None: ...

    async def drop_group(self, group_id: int, reason: str) -> None: ...

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        """Record that a member will not arrive; its group completes without it."""


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """The group is dropped: no more of its trajectories will arrive."""

    group_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One member of a group will not arrive; the group continues without it."""

    group_id: int
    member: int
    reason: str


Shipment = Trajectory | DroppedGroup | LeftOut


async def ship(receive: trio.MemoryReceiveChannel[Shipment], sink: TrajectorySink, scopes: Scope) -> None:
    """Consumes shipments in order; unblocked by each; calls the sink, in batches."""
    async for waiting in in_batches(receive, most=MAX_SHIPMENT):
        dropped = {item.group_id: item.reason for item in waiting if isinstance(item, DroppedGroup)}
        # Members of a group that is dropped in the same batch need not be shipped.
        kept = [item for item in waiting if item.group_id not in dropped]
        finished = [item for item in kept if isinstance(item, Trajectory)]
        with scopes.open(f"ship {len(waiting)} trajectories, or report members without one"):
            if finished:
                await sink.add(finished)
            for item in kept:
                if isinstance(item, LeftOut):
                    await sink.leave_out(item.group_id, item.member, item.reason)
            for group_id, reason in dropped.items():
                await sink.drop_group(group_id, reason)


async def in_batches(
    receive: trio.MemoryReceiveChannel[T], *, most: int | None = None
) -> AsyncIterator[list[T]]:
    """Wait for an item, and yield it with all others that have arrived, at most `most` together."""
    async for first in receive:
        batch = [first]
        while most is None or len(batch) < most:
            try:
                batch.append(receive.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                break
        yield batch
