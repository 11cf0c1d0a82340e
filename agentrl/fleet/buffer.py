"""The replay buffer as the other processes call it: the controller by `Actor`, a rollout actor by
`RemoteBuffer`.

If its process is killed, Ray restarts it, the buffer reads its journal, and Ray retries the calls in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import ray
import trio

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.training_buffer import BufferSettings, TrainingBuffer
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import AttemptFiles, TrajectoryRef
from agentrl.errors import JournalError
from agentrl.types import Lease, Trajectory
from agentrl.workers.actors import Actor, ActorKind, RetryPolicy, Tries
from agentrl.workers.pools import beside_driver

DATA_TIMEOUT_S = 3600.0
"""Reading and tokenizing a large training set takes minutes; this timeout only catches a hang."""
LEASE_WAIT_S = 5.0
"""Duration of one long poll for leases."""
LEASE_TIMEOUT_S = 120.0
"""If the buffer does not answer for this long, the rollout process ends, and its leases go to another
owner.
"""

# A call may take a minute: after a restart, the buffer reads its journal. If there are more rollout actors
# than lease threads, the actors take turns.
BUFFER = ActorKind(
    "BufferActor", "the replay buffer", timeout_s=60.0, num_threads=8, long_polls={"lease": 64, "take": 2}
)


def launch_buffer(
    settings: BufferSettings, folder: str | None, *, is_new: bool, say: Callable[[str], None]
) -> Actor[TrainingBuffer]:
    """Start the replay buffer of a run, with its journal in `folder`; see `TrainingBuffer`.

    While the disk is full, its calls are retried for `buffer.disk_patience_s`.
    """
    options = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": beside_driver()}
    buffer = BUFFER.launch(options, open_buffer, settings, folder, is_new=is_new)
    return buffer.retrying(RetryPolicy((JournalError,), settings.buffer.disk_patience_s, say))


def open_buffer(settings: BufferSettings, folder: str | None, *, is_new: bool) -> TrainingBuffer:
    """Return the buffer, in its process. `is_new`: the journal in `folder` belongs to an abandoned run."""
    # Arrow's own pool keeps, for each of the many threads, what that thread has freed.
    pa.set_memory_pool(pa.system_memory_pool())
    is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
    return TrainingBuffer(
        settings, None if folder is None else Path(folder), is_new=is_new and not is_restarted
    )


class RemoteBuffer:
    """The replay buffer's actor as TaskSource and TrajectorySink, for the leases of `owner`.

    Each `lease` reports the groups that it knows of, so that the buffer returns a group again if an answer
    was lost. Finished trajectories go to files; the buffer gets their facts. If the disk is full, the
    trajectory waits here, and later ones wait behind it.
    """

    def __init__(self, owner: str, buffer: Actor[ReplayBuffer], files: AttemptFiles) -> None:
        self._owner = owner
        self._buffer = buffer.within(LEASE_TIMEOUT_S)
        self._files = files
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
        refs = await self._store(trajectories)
        facts = [AttemptFacts.of(t, ref) for t, ref in zip(trajectories, refs, strict=True)]
        await self._buffer.run_async(ReplayBuffer.add, self._owner, facts)
        for trajectory in trajectories:
            self._account_for(trajectory.group_id, trajectory.member)

    async def _store(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryRef]:
        tries = Tries(self._buffer.retry)
        while True:
            try:
                return await trio.to_thread.run_sync(self._files.write, trajectories)
            except JournalError as error:
                await trio.sleep(tries.pause_s(error))

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
