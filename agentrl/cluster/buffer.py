"""The replay buffer's process, as the controller calls it. Rollout actors call it by `RemoteBuffer`.

If its process is killed, Ray restarts it, the buffer reads its journal, and Ray retries the calls in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import ray
import trio

from agentrl.buffer.training_buffer import BufferSettings, TrainingBuffer
from agentrl.cluster.actors import Actor, ActorKind, RetryPolicy, Tries
from agentrl.cluster.pools import beside_driver
from agentrl.data.attempt_files import AttemptFiles, TrajectoryRef
from agentrl.errors import JournalError
from agentrl.types import Trajectory

DATA_TIMEOUT_S = 3600.0
"""Reading and tokenizing a large training set takes minutes; this timeout only catches a hang."""

# A call may take a minute: after a restart, the buffer reads its journal. If there are more rollout actors
# than lease threads, the actors take turns.
MAX_LEASES = 64
BUFFER = ActorKind(
    "BufferActor",
    "the replay buffer",
    timeout_s=60.0,
    num_threads=8,
    long_polls={"lease": MAX_LEASES, "take": 2},
)


def launch_buffer(
    settings: BufferSettings,
    folder: str | None,
    *,
    is_new: bool,
    say: Callable[[str], None],
    num_leasing: int = MAX_LEASES,
) -> Actor[TrainingBuffer]:
    """Start the replay buffer of a run, with its journal in `folder`; see `TrainingBuffer`.

    While the disk is full, its calls are retried for `buffer.disk_patience_s`.

    num_leasing: rollout actors that wait for leases. Each has two threads, one for an actor that it replaces:
        the stack of each thread grows for hours, until the deepest call has run on it.
    """
    leases = min(MAX_LEASES, 2 * num_leasing)
    kind = replace(BUFFER, long_polls={**BUFFER.long_polls, "lease": leases})
    options = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": beside_driver()}
    buffer = kind.launch(options, open_buffer, settings, folder, is_new=is_new)
    return buffer.retrying(RetryPolicy((JournalError,), settings.buffer.disk_patience_s, say))


def open_buffer(settings: BufferSettings, folder: str | None, *, is_new: bool) -> TrainingBuffer:
    """Return the buffer, in its process. `is_new`: the journal in `folder` belongs to an abandoned run."""
    # Arrow's own pool keeps, for each of the many threads, what that thread has freed.
    pa.set_memory_pool(pa.system_memory_pool())
    is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
    return TrainingBuffer(
        settings, None if folder is None else Path(folder), is_new=is_new and not is_restarted
    )


class FileStore:
    """Writes trajectories to files, in a thread: `agentrl.cluster.remote_buffer.Store`."""

    def __init__(self, files: AttemptFiles, retry: RetryPolicy) -> None:
        """retry: what to do while the disk is full."""
        self._files = files
        self._retry = retry

    async def store(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryRef]:
        """Store the trajectories and return where each of them is.

        Raises:
            JournalError: the disk was full for too long.
        """
        tries = Tries(self._retry)
        while True:
            try:
                return await trio.to_thread.run_sync(self._files.write, trajectories)
            except JournalError as error:
                await trio.sleep(tries.pause_s(error))
