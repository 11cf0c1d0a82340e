"""The trajectories of groups: in the journal until nothing can ask for them again, and in memory while a batch is made of them.

A buffer that kept them in memory would hold them twice, and grow for hours: pieces of ever other sizes come and go (`agentrl.heap`).
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from agentrl.buffer.journal import AttemptKey, Journal
from agentrl.buffer.samplers import ReadyGroup
from agentrl.data.trajectories import from_ipc, to_ipc


class Rows:
    """One row (a RecordBatch of one trajectory) per group, owner and member."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._arriving: dict[AttemptKey, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all rows, as they are written."""
        return self._journal.num_bytes

    def announce(self, key: AttemptKey, row: pa.RecordBatch) -> None:
        """Have a row written with the next events."""
        self._arriving[key] = to_ipc(row)

    def arriving(self) -> dict[AttemptKey, bytes]:
        """Return what was announced since the last call."""
        arriving, self._arriving = self._arriving, {}
        return arriving

    def of(self, group: ReadyGroup) -> list[pa.RecordBatch]:
        """Return the rows that a ready group is made of, in order of member."""
        found = self._journal.attempts(group.group_id, group.owner)
        return [from_ipc(found[member]) for member in group.members]

    def has(self, group: ReadyGroup) -> bool:
        """Whether all rows of the group are kept."""
        return self._journal.members(group.group_id, group.owner) >= set(group.members)

    def forget_others(self, group: ReadyGroup) -> None:
        """Let what others had of a ready group go."""
        self._journal.forget_others(group.group_id, group.owner)

    def forget_plays(self, plays: Collection[tuple[str, int]]) -> None:
        """Let what owners had of groups go: (owner, group) each."""
        if plays:
            self._journal.forget_plays((group_id, owner) for owner, group_id in plays)

    def forget(self, group_ids: Collection[int]) -> None:
        """Let all rows of groups go."""
        if group_ids:
            self._journal.forget(group_ids)
