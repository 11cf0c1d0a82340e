"""The trajectories of groups. They are stored in the journal; only those of a batch being assembled are in
memory.

Keeping them all in memory would store them twice and fragment the heap, which would grow for hours
(`agentrl.heap`).
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from agentrl.buffer.journal import AttemptKey, Journal
from agentrl.buffer.samplers import ReadyGroup
from agentrl.data.trajectories import from_ipc, to_ipc


class Rows:
    """Stored trajectories, each a RecordBatch of one row, by group, owner and member."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._arriving: dict[AttemptKey, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all stored trajectories, as Arrow IPC streams."""
        return self._journal.num_bytes

    def announce(self, key: AttemptKey, row: pa.RecordBatch) -> None:
        """Remember a trajectory, to be written together with the next events."""
        self._arriving[key] = to_ipc(row)

    def arriving(self) -> dict[AttemptKey, bytes]:
        """Return and clear the trajectories announced since the last call."""
        arriving, self._arriving = self._arriving, {}
        return arriving

    def of(self, group: ReadyGroup) -> list[pa.RecordBatch]:
        """Return the trajectories of a ready group, ordered by member."""
        found = self._journal.attempts(group.group_id, group.owner)
        return [from_ipc(found[member]) for member in group.members]

    def has(self, group: ReadyGroup) -> bool:
        """Return whether all trajectories of the group are stored."""
        return self._journal.members(group.group_id, group.owner) >= set(group.members)

    def forget_others(self, group: ReadyGroup) -> None:
        """Delete the trajectories of a ready group that came from other owners."""
        self._journal.forget_others(group.group_id, group.owner)

    def forget_plays(self, plays: Collection[tuple[str, int]]) -> None:
        """Delete the trajectories of the given (owner, group id) pairs."""
        if plays:
            self._journal.forget_plays((group_id, owner) for owner, group_id in plays)

    def forget(self, group_ids: Collection[int]) -> None:
        """Delete all trajectories of the given groups."""
        if group_ids:
            self._journal.forget(group_ids)
