"""The replay buffer: the dataset's cursor, the ledger, and the trajectories of its groups in Arrow memory.

Rollout actors lease groups and add finished trajectories; the learner's controller takes batches and says when a publish
happened. Nobody is pushed: a producer that runs ahead waits in `lease`, a learner that runs ahead waits in `take`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.ledger import NO_VARIANCE, Ledger, ReadyGroup
from agentrl.data.accuracy import accuracies
from agentrl.data.trajectories import SCHEMA, from_ipc, min_versions, reward_sums, to_ipc
from agentrl.errors import CheckpointError, DataError
from agentrl.types import BufferCounts, Lease, Task

STATE_KEY = b"agentrl.buffer"
"""Where `state` keeps the ledger's JSON: in the metadata of the Arrow stream of its ready groups."""

ROUNDING = 1e-12
"""Rewards of a group are equal up to this share of the largest: 0.1 + 0.2 earns no more than 0.3."""

T = TypeVar("T")


class TaskSequence(Protocol):
    """What is needed of a Dataset: any position, from any thread."""

    def task(self, position: int) -> Task: ...


class ReplayBuffer:
    """Safe to use from any number of threads; every method but `lease` and `take` returns at once."""

    def __init__(
        self,
        tasks: TaskSequence,
        *,
        groups_per_step: int,
        max_staleness: int,
        group_size: int,
        total_groups: int | None = None,
        has_greedy: bool = False,
        drop_constant_groups: bool = False,
        waits_for_stragglers: bool = False,
        curriculum: Curriculum | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty; the arguments are those of `Ledger`, `clock` returns seconds.

        has_greedy: a group is complete with one greedy attempt more, its last member; the bound on staleness holds for it as well.
        drop_constant_groups: a group whose attempts all earned the same, the greedy one included, is dropped when it is complete, and
            another leased.
        """
        self._tasks = tasks
        self._drop_constant_groups = drop_constant_groups
        self._group_size = group_size
        self._has_greedy = has_greedy
        self._ledger = Ledger(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            group_size=group_size + has_greedy,
            total_groups=total_groups,
            waits_for_stragglers=waits_for_stragglers,
            curriculum=curriculum,
        )
        self._curriculum = curriculum
        self._members: dict[int, dict[int, pa.RecordBatch]] = {}  # of leased and ready groups: member -> one row
        self._changed = threading.Condition()
        self._released: set[str] = set()
        self._is_closed = False
        self._clock = clock
        self._last_add = clock()
        self._waited_s = {"lease": 0.0, "take": 0.0}
        self._last_lags: Counter[int] = Counter()

    # ------------------------------------------------------------------------------------------------ rollout side

    def lease(self, owner: str, limit: int, timeout_s: float) -> list[Lease]:
        """Wait until the bound on staleness admits a group, then lease up to `limit` to `owner`.

        Returns [] after `timeout_s` seconds, or at once when the buffer is closed or `owner` was released.
        """
        with self._changed:
            self._wait("lease", lambda: (owner in self._released or self._ledger.can_lease()) or None, timeout_s)
            group_ids: list[int] = []
            while not self._is_closed and owner not in self._released and len(group_ids) < limit and self._ledger.can_lease():
                group_ids.append(self._ledger.lease(owner))
            version = self._ledger.version
        # Outside of the lock: reading a row may decode a whole row group.
        return [Lease(group_id, self._tasks.task(group_id), self._group_size, version, self._has_greedy) for group_id in group_ids]

    def add(self, owner: str, data: bytes) -> None:
        """Keep finished trajectories (an Arrow IPC stream of `agentrl.data.trajectories`).

        A member that comes twice, or of a group that `owner` does not hold (any more), is discarded and counted.

        Raises:
            DataError: the bytes are no trajectories.
        """
        batch = from_ipc(data)
        group_ids, members = batch.column("group_id").to_pylist(), batch.column("member").to_pylist()
        counts = self._curriculum is not None and self._curriculum.uses_results
        columns = (group_ids, members, min_versions(batch).tolist(), accuracies(batch) if counts else [None] * batch.num_rows)
        with self._changed:
            self._last_add = self._clock()
            for row, (group_id, member, version, accuracy) in enumerate(zip(*columns, strict=True)):
                admission = self._ledger.add_member(owner, group_id, member, version, accuracy)
                if admission in ("waiting", "ready"):
                    self._members.setdefault(group_id, {})[member] = batch.slice(row, 1)
                if admission == "ready" and self._drop_constant_groups and self._is_constant(group_id):
                    self._ledger.drop_ready(group_id, NO_VARIANCE)
                    self._forget([group_id])
            self._changed.notify_all()

    def drop_group(self, owner: str, group_id: int, reason: str) -> None:
        """End a group that `owner` cannot finish; the bound admits another in its place."""
        with self._changed:
            if self._ledger.drop(owner, group_id, reason):
                self._members.pop(group_id, None)
            self._changed.notify_all()

    def release(self, owner: str) -> int:
        """Queue the groups of a dead owner for others and return how many; call it only when the owner is surely dead.

        The name never leases again: a long poll that its process left behind would take the very groups that come free here.
        """
        with self._changed:
            self._released.add(owner)
            released = self._ledger.release(owner)
            self._forget(released)
            self._changed.notify_all()
        return len(released)

    # ------------------------------------------------------------------------------------------------ learner side

    def take(self, num_groups: int, timeout_s: float) -> bytes | None:
        """Wait for `num_groups` complete groups within the bound and consume them, oldest lease first.

        Returns an Arrow IPC stream, the rows of a group together and in order of member; None after `timeout_s` seconds,
        or at once when the buffer is closed.
        """
        with self._changed:
            groups = self._wait("take", lambda: self._take(num_groups), timeout_s)
            if groups is None:
                return None
            self._last_lags = Counter(self._ledger.lag(group) for group in groups)
            rows = [row for group in groups for row in self._rows(group.group_id)]
            self._forget([group.group_id for group in groups])
        return to_ipc(pa.concat_batches(rows))

    def reject(self, num_groups: int, reason: str) -> None:
        """Drop the groups that `take` gave last: nothing was learned from them, and others are leased in their place."""
        with self._changed:
            self._ledger.reject(num_groups, reason)
            self._changed.notify_all()

    def tasks(self, group_ids: Sequence[int]) -> list[Task]:
        """Return the tasks that groups attempt."""
        return [self._tasks.task(group_id) for group_id in group_ids]

    def advance(self, version: int) -> None:
        """Note that the servers serve `version`, which learned from every batch taken so far.

        Groups that it makes too old are dropped at once, and their places are leased anew.
        """
        with self._changed:
            self._ledger.advance(version)
            self._forget(self._ledger.drop_stale())
            self._changed.notify_all()

    def _take(self, num_groups: int) -> list[ReadyGroup] | None:
        stale = self._ledger.drop_stale()
        if stale:
            self._forget(stale)
            self._changed.notify_all()  # they made room for other leases
        return self._ledger.take(num_groups)

    # ---------------------------------------------------------------------------------------------------- account

    def counts(self) -> BufferCounts:
        with self._changed:
            return self._ledger.counts()

    def stats(self) -> dict[str, float]:
        """Return numbers for metrics: groups by state, seconds waited in all since the start, lags of the last batch."""
        with self._changed:
            counts = self._ledger.counts()
            lags = self._last_lags
            memory = sum(row.nbytes for rows in self._members.values() for row in rows.values())
            lag_sum = sum(lag * count for lag, count in lags.items())
            stats: dict[str, float] = {
                "drawn": float(counts.drawn),
                "ready": float(counts.ready),
                "leased": float(counts.leased),
                "queued": float(counts.queued),
                "consumed": float(counts.consumed),
                "stored_bytes": memory,
                "lease_wait_s": self._waited_s["lease"],
                "take_wait_s": self._waited_s["take"],
                "since_last_add_s": self._clock() - self._last_add,
                "batch_lag_max": max(lags, default=0),
                "batch_lag_mean": lag_sum / max(1, lags.total()),
            }
        stats |= {f"batch_lag_{lag}": count for lag, count in sorted(lags.items())}
        stats |= {f"dropped_{reason}": count for reason, count in counts.dropped.items()}
        return stats | {f"discarded_{reason}": count for reason, count in counts.discarded.items()}

    def curriculum(self) -> dict[str, float]:
        """Return the metrics of the curriculum, those of the step up to the last publish; none where there is no curriculum."""
        with self._changed:
            return {} if self._curriculum is None else self._curriculum.metrics()

    def close(self) -> None:
        """End all waiting: from here on `lease` returns [] and `take` None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> bytes:
        """Return cursor, ledger and ready groups as one Arrow IPC stream; leased groups are saved as places in the data."""
        with self._changed:
            state = self._ledger.state()
            rows = [row for group in state["ready"] for row in self._rows(group["group_id"])]
        batch = pa.concat_batches(rows) if rows else pa.RecordBatch.from_pylist([], schema=SCHEMA)
        return to_ipc(batch.replace_schema_metadata({**SCHEMA.metadata, STATE_KEY: json.dumps(state).encode()}))

    def restore(self, data: bytes, version: int | None = None) -> None:
        """Become what `state` described; its weights are served as `version`, None: as the one it was saved with.

        Raises:
            CheckpointError: the bytes are no such state.
        """
        try:
            batch = from_ipc(data)
        except DataError as error:
            raise CheckpointError(f"the buffer's state cannot be read: {error}") from error
        text = batch.schema.metadata.get(STATE_KEY)
        if text is None:
            raise CheckpointError("the buffer's state holds trajectories but no ledger")
        state = json.loads(text)
        batch = batch.replace_schema_metadata(SCHEMA.metadata)
        keys = zip(batch.column("group_id").to_pylist(), batch.column("member").to_pylist(), strict=True)
        with self._changed:
            self._ledger.restore(state, version=state["version"] if version is None else version)
            self._members = {}
            for row, (group_id, member) in enumerate(keys):
                self._members.setdefault(group_id, {})[member] = batch.slice(row, 1)
            self._forget(self._ledger.drop_stale())
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------- under the lock only

    def _wait(self, what: str, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        start = self._clock()
        result: T | None = None

        def is_over() -> bool:
            nonlocal result
            result = None if self._is_closed else attempt()
            return self._is_closed or result is not None

        self._changed.wait_for(is_over, timeout_s)
        self._waited_s[what] += self._clock() - start
        return result

    def _is_constant(self, group_id: int) -> bool:
        rewards = np.concatenate([reward_sums(row) for row in self._members[group_id].values()])
        return bool(np.ptp(rewards) <= ROUNDING * np.abs(rewards).max())

    def _rows(self, group_id: int) -> list[pa.RecordBatch]:
        return [row for _, row in sorted(self._members[group_id].items())]

    def _forget(self, group_ids: list[int]) -> None:
        for group_id in group_ids:
            self._members.pop(group_id, None)
