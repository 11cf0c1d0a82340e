"""The trajectories of groups: in memory until a batch has taken them, and in the journal, if there is one, until nothing can ask again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from agentrl.buffer.journal import AttemptKey, Journal
from agentrl.buffer.samplers import ReadyGroup
from agentrl.data.trajectories import from_ipc, to_ipc


class Rows:
    """One row (a RecordBatch of one trajectory) per group, owner and member."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._arriving: dict[AttemptKey, bytes] = {}
        self._rows: dict[int, dict[str, dict[int, pa.RecordBatch]]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return sum(row.nbytes for plays in self._rows.values() for rows in plays.values() for row in rows.values())

    def announce(self, key: AttemptKey, row: pa.RecordBatch) -> None:
        """Have a row written with the next events."""
        if self._journal is not None:
            self._arriving[key] = to_ipc(row)

    def arriving(self) -> dict[AttemptKey, bytes]:
        """Return what was announced since the last call."""
        arriving, self._arriving = self._arriving, {}
        return arriving

    def put(self, key: AttemptKey, row: pa.RecordBatch) -> None:
        """Keep a row in memory."""
        group_id, owner, member = key
        self._rows.setdefault(group_id, {}).setdefault(owner, {})[member] = row

    def get(self, group_id: int, owner: str) -> dict[int, pa.RecordBatch]:
        """Return an owner's rows of a group by member, as far as they are kept; those of the journal are in memory from here on."""
        plays = self._rows.get(group_id, {})
        if owner not in plays and self._journal is not None:
            found = {member: from_ipc(data) for member, data in self._journal.attempts(group_id, owner).items()}
            if found:
                self._rows.setdefault(group_id, {})[owner] = found
            return found
        return plays.get(owner, {})

    def of(self, group: ReadyGroup) -> list[pa.RecordBatch]:
        """Return the rows that a ready group is made of, in order of member."""
        rows = self.get(group.group_id, group.owner)
        return [rows[member] for member in group.members]

    def has(self, group: ReadyGroup) -> bool:
        """Whether all rows of the group are kept."""
        return self.get(group.group_id, group.owner).keys() >= set(group.members)

    def keep_only(self, group_id: int, owner: str) -> None:
        """Let what others had of a group go from memory."""
        plays = self._rows.pop(group_id, {})
        if owner in plays:
            self._rows[group_id] = {owner: plays[owner]}

    def forget_play(self, owner: str, group_id: int) -> None:
        """Let what an owner had of a group go, from the journal, too."""
        if self._journal is not None:
            self._journal.forget_play(group_id, owner)
        plays = self._rows.get(group_id, {})
        plays.pop(owner, None)
        if not plays:
            self._rows.pop(group_id, None)

    def leave_memory(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            self._rows.pop(group_id, None)

    def forget(self, group_ids: Sequence[int]) -> None:
        """Let all rows of groups go, from the journal, too."""
        if self._journal is not None and group_ids:
            self._journal.forget(group_ids)
        self.leave_memory(group_ids)

    def clear(self) -> None:
        """Let everything go from memory."""
        self._rows = {}
