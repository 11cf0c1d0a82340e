"""The trajectories of groups: in the journal, and in a checkpoint. Only those of a batch being assembled are
in memory.

Keeping them all in memory would store them twice and fragment the heap, which would grow for hours
(`agentrl.heap`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from agentrl.buffer.journal import AttemptKey, Journal
from agentrl.buffer.samplers import ReadyGroup
from agentrl.data.trajectories import SCHEMA, from_ipc, scored_rewards, to_ipc
from agentrl.errors import CheckpointError, DataError

STATE_KEY = b"agentrl.buffer"
"""Metadata key of a checkpoint's Arrow stream; its value is the ledger's state as JSON."""
ROUNDING = 1e-12
"""Relative tolerance for equal rewards in a group: 0.1 + 0.2 equals 0.3."""


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

    def is_constant(self, group: ReadyGroup) -> bool:
        """Return whether all trajectories of a ready group have the same reward."""
        rewards = np.concatenate([scored_rewards(row) for row in self.of(group)])
        return math.isclose(rewards.min(), rewards.max(), rel_tol=ROUNDING)

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


def write_state(state: Mapping[str, Any], rows: Sequence[pa.RecordBatch]) -> bytes:
    """Return a checkpoint of the buffer: the ledger's state and the trajectories of its ready groups, as one
    Arrow IPC stream.
    """
    batch = pa.concat_batches(rows) if rows else pa.RecordBatch.from_pylist([], schema=SCHEMA)
    return to_ipc(batch.replace_schema_metadata({**SCHEMA.metadata, STATE_KEY: json.dumps(state).encode()}))


def read_state(data: bytes) -> tuple[dict[str, Any], dict[AttemptKey, pa.RecordBatch]]:
    """Return what `write_state` wrote: the ledger's state, and a row per trajectory.

    Raises:
        CheckpointError: the bytes are not a valid state.
    """
    try:
        batch = from_ipc(data)
    except DataError as error:
        raise CheckpointError(f"the buffer's state cannot be read: {error}") from error
    text = batch.schema.metadata.get(STATE_KEY)
    if text is None:
        raise CheckpointError("the buffer's state contains trajectories but no ledger")
    state = json.loads(text)
    batch = batch.replace_schema_metadata(SCHEMA.metadata)
    owners = {group["group_id"]: group["owner"] for group in state.get("ready", ())}
    places = enumerate(
        zip(batch.column("group_id").to_pylist(), batch.column("member").to_pylist(), strict=True)
    )
    return state, {
        (group_id, owners.get(group_id, ""), member): batch.slice(row, 1)
        for row, (group_id, member) in places
    }
