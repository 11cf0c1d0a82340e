"""What leaves a rollout process: finished trajectories, and word of what will not come, in the order in which it was known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from agentrl.rollout.scopes import Scope
from agentrl.types import Trajectory

MAX_SHIPMENT = 64
"""Trajectories in one `add`; those that finish while one is under way travel together."""


class TrajectorySink(Protocol):
    """Where trajectories go: the replay buffer."""

    async def add(self, trajectories: Sequence[Trajectory]) -> None: ...

    async def drop_group(self, group_id: int, reason: str) -> None: ...

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        """Note that a member will not come: its group is complete with the others."""


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """Says that nothing more of a group will come."""

    group_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Says that one member of a group will not come, and that the group goes on without it."""

    group_id: int
    member: int
    reason: str


Shipment = Trajectory | DroppedGroup | LeftOut


async def ship(receive: trio.MemoryReceiveChannel[Shipment], sink: TrajectorySink, scopes: Scope) -> None:
    """Consumes what came of members and groups, in order; unblocked by each; produces calls of the sink."""
    async for first in receive:
        waiting = [first]
        while len(waiting) < MAX_SHIPMENT:
            try:
                waiting.append(receive.receive_nowait())
            except trio.WouldBlock:
                break
        dropped = {item.group_id: item.reason for item in waiting if isinstance(item, DroppedGroup)}
        # What became of siblings just before their group was dropped need not travel.
        kept = [item for item in waiting if item.group_id not in dropped]
        finished = [item for item in kept if isinstance(item, Trajectory)]
        with scopes.open(f"ship {len(waiting)} trajectories, or word of what will not come"):
            if finished:
                await sink.add(finished)
            for item in kept:
                if isinstance(item, LeftOut):
                    await sink.leave_out(item.group_id, item.member, item.reason)
            for group_id, reason in dropped.items():
                await sink.drop_group(group_id, reason)
