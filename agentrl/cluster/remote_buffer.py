"""`RemoteBuffer`: the replay buffer as a rollout actor calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import TrajectoryRef
from agentrl.types import Lease, Trajectory

P = ParamSpec("P")
R = TypeVar("R")

LEASE_WAIT_S = 5.0
"""Duration of one long poll for leases."""
LEASE_TIMEOUT_S = 120.0
"""If the buffer does not answer for this long, the rollout process ends, and its leases go to another
owner.
"""


class BufferCalls(Protocol):
    """Calls the replay buffer in its process: `agentrl.cluster.actors.Actor`, or a simulated one."""

    def within(self, timeout_s: float, /) -> BufferCalls:
        """Return the same buffer with another timeout of its calls."""

    async def run_async(
        self, method: Callable[Concatenate[ReplayBuffer, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of the buffer and wait for its result."""


class Store(Protocol):
    """Stores trajectories: `agentrl.cluster.buffer.FileStore`, or a simulated one."""

    async def store(self, trajectories: Sequence[Trajectory], /) -> list[TrajectoryRef]:
        """Store the trajectories and return where each of them is."""


class RemoteBuffer:
    """The replay buffer's actor as TaskSource and TrajectorySink, for the leases of `owner`.

    Each `lease` reports the groups that it knows of, so that the buffer returns a group again if an answer
    was lost. Finished trajectories go to files; the buffer gets their facts. If the disk is full, the
    trajectory waits here, and later ones wait behind it.
    """

    def __init__(self, owner: str, buffer: BufferCalls, store: Store) -> None:
        self._owner = owner
        self._buffer = buffer.within(LEASE_TIMEOUT_S)
        self._store = store
        self._missing: dict[int, set[int]] = {}  # group id -> members neither added nor left out yet

    async def lease(self, limit: int) -> Sequence[Lease]:
        leases = await self._buffer.run_async(
            ReplayBuffer.lease, self._owner, limit, LEASE_WAIT_S, tuple(self._missing)
        )
        for lease in leases:
            self._missing[lease.group_id] = set(range(lease.num_attempts))
        return leases

    async def withdrawn(self) -> Sequence[int]:
        asked = dict(self._missing)
        gone = await self._buffer.run_async(ReplayBuffer.withdrawn, self._owner, tuple(asked))
        # Not those that ended or were leased again since.
        mine = [group_id for group_id in gone if self._missing.get(group_id) is asked[group_id]]
        for group_id in mine:
            del self._missing[group_id]
        return mine

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        refs = await self._store.store(trajectories)
        facts = [AttemptFacts.of(t, ref) for t, ref in zip(trajectories, refs, strict=True)]
        await self._buffer.run_async(ReplayBuffer.add, self._owner, facts)
        for trajectory in trajectories:
            self._account_for(trajectory.group_id, trajectory.member)

    async def drop_group(self, group_id: int, reason: str) -> None:
        await self._buffer.run_async(ReplayBuffer.drop_group, self._owner, group_id, reason)
        self._missing.pop(group_id, None)

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        await self._buffer.run_async(ReplayBuffer.leave_out, self._owner, group_id, member, reason)
        self._account_for(group_id, member)

    def _account_for(self, group_id: int, member: int) -> None:
        missing = self._missing.get(group_id, set())
        missing.discard(member)
        if not missing:
            self._missing.pop(group_id, None)
