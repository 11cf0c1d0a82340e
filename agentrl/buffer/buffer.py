"""The replay buffer: the dataset's cursor, the ledger, and the journal that has both of them and the groups' trajectories.

Rollout actors lease groups and add finished trajectories; the learner's controller takes batches and says when a publish
happened. Nobody is pushed: a producer that runs ahead waits in `lease`, a learner that runs ahead waits in `take`.

Everything is written down before it takes effect: a buffer that reads it again goes on where the other one died, and
a call that was made and not answered may be made again.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import Journal
from agentrl.buffer.ledger import NO_VARIANCE, Admission, Ledger
from agentrl.buffer.lineage import Lineage
from agentrl.buffer.rows import Rows
from agentrl.buffer.samplers import ReadyGroup
from agentrl.data.accuracy import accuracies, scored_rewards
from agentrl.data.trajectories import SCHEMA, from_ipc, sampled_versions, to_ipc
from agentrl.errors import CheckpointError, DataError
from agentrl.types import BufferCounts, HeldLease, Lease, Task

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
        sampler: str = "fifo",
        oversample: float = 1.0,
        lease_timeout_s: float = math.inf,
        duplicate_after_s: float = math.inf,
        curriculum: Curriculum | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start as the journal says, or empty; the arguments are those of `Ledger`, `clock` returns seconds.

        has_greedy: a group is complete with one greedy attempt more, its last member; the bound on staleness holds for it as well.
        drop_constant_groups: a group whose attempts all earned the same, the greedy one included, is dropped when it is complete, and
            another leased.
        lease_timeout_s: a group that an owner has had for so long is leased to another.
        duplicate_after_s: a group that an owner has had for so long goes to another, too, that would have nothing to do; the first counts.
        journal: None: one in memory, which ends with the process.

        Raises:
            CheckpointError: the journal is of other data.
        """
        self._tasks = tasks
        self._drop_constant_groups = drop_constant_groups
        self._group_size = group_size
        self._has_greedy = has_greedy
        self._lease_timeout_s = lease_timeout_s
        self._duplicate_after_s = duplicate_after_s
        self._journal = Journal(None) if journal is None else journal
        self._rows = Rows(self._journal)
        self._ledger = Ledger(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            group_size=group_size + has_greedy,
            total_groups=total_groups,
            waits_for_stragglers=waits_for_stragglers,
            sampler=sampler,
            oversample=oversample,
            curriculum=curriculum,
            record=self._record,
        )
        self._curriculum = curriculum
        self._changed = threading.Condition()
        self._is_closed = False
        self._clock = clock
        self._waited_s = {"lease": 0.0, "take": 0.0}
        self._last_lags: Counter[int] = Counter()
        self._read()
        self._last_add = clock()

    # ------------------------------------------------------------------------------------------------ rollout side

    def lease(self, owner: str, limit: int, timeout_s: float, held: Collection[int] | None = None) -> list[Lease]:
        """Wait until the bound on staleness admits a group, then lease up to `limit` to `owner`.

        Returns [] after `timeout_s` seconds, or at once when the buffer is closed or `owner` was released. `held`: the groups that the
        owner knows of; others of its own are given again, for an answer was lost. None: it knows of all.
        """
        with self._changed:
            lost = [] if held is None else [group_id for group_id in self._ledger.held_by(owner) if group_id not in held]
            group_ids = lost if lost else self._lease(owner, limit, timeout_s)
            version = self._ledger.version
        # Outside of the lock: reading a row may decode a whole row group.
        leases = [Lease(group_id, self._tasks.task(group_id), self._group_size, version, self._has_greedy) for group_id in group_ids]
        if leases:
            with self._changed:
                self._journal.name_tasks({lease.group_id: lease.task.task_id for lease in leases})
        return leases

    def _lease(self, owner: str, limit: int, timeout_s: float) -> list[int]:
        group_ids: list[int] = []

        def attempt() -> bool | None:
            if self._ledger.is_released(owner):
                return True
            now = self._clock()
            self._rows.forget_plays(self._ledger.expire(older_than=now - self._lease_timeout_s))
            while len(group_ids) < limit and self._ledger.can_lease():
                group_ids.append(self._ledger.lease(owner, now))
            if not group_ids:
                copied = self._ledger.lease_copy(owner, older_than=now - self._duplicate_after_s, now=now)
                group_ids.extend([] if copied is None else [copied])
            return True if group_ids else None

        self._wait("lease", attempt, timeout_s)
        return group_ids

    def withdrawn(self, owner: str, held: Collection[int]) -> list[int]:
        """Return which of the groups `held`, by what `owner` knows, it does not hold: another was quicker, or the lease has ended."""
        with self._changed:
            return sorted(set(held).difference(self._ledger.held_by(owner)))

    def add(self, owner: str, data: bytes) -> None:
        """Keep finished trajectories (an Arrow IPC stream of `agentrl.data.trajectories`).

        A member that comes twice, or of a group that `owner` does not hold (any more), is discarded and counted.

        Raises:
            DataError: the bytes are no trajectories.
            JournalError: not all of them could be written; the call may be made again.
        """
        batch = from_ipc(data)
        group_ids, members = batch.column("group_id").to_pylist(), batch.column("member").to_pylist()
        counts = self._curriculum is not None and self._curriculum.uses_results
        columns = (group_ids, members, sampled_versions(batch), accuracies(batch) if counts else [None] * batch.num_rows)
        with self._changed:
            self._last_add = self._clock()
            for row, (group_id, member, versions, accuracy) in enumerate(zip(*columns, strict=True)):
                self._rows.announce((group_id, owner, member), batch.slice(row, 1))
                self._look_at(group_id, self._ledger.add_member(owner, group_id, member, versions, accuracy))
            self._changed.notify_all()

    def leave_out(self, owner: str, group_id: int, member: int, reason: str) -> None:
        """Note that a member of a group that `owner` holds will not come: the group is complete with the others."""
        with self._changed:
            self._look_at(group_id, self._ledger.leave_out(owner, group_id, member, reason))
            self._changed.notify_all()

    def _look_at(self, group_id: int, admission: Admission) -> None:
        """Drop a group that became ready and teaches nothing; forget what others had of it."""
        if admission != "ready":
            return
        group = self._ledger.ready_group(group_id)
        self._rows.forget_others(group)
        if self._drop_constant_groups and self._is_constant(group):
            self._ledger.drop_ready(group_id, NO_VARIANCE)
            self._rows.forget([group_id])

    def drop_group(self, owner: str, group_id: int, reason: str) -> None:
        """End a group that `owner` cannot finish; the bound admits another in its place."""
        with self._changed:
            if self._ledger.drop(owner, group_id, reason):
                self._rows.forget_plays([(owner, group_id)])
            self._changed.notify_all()

    def release(self, owner: str) -> int:
        """Queue the groups of a dead owner for others and return how many; call it only when the owner is surely dead.

        The name never leases again: a long poll that its process left behind would take the very groups that come free here.
        """
        with self._changed:
            released = self._ledger.release(owner)
            self._rows.forget_plays([(owner, group_id) for group_id in released])
            self._changed.notify_all()
        return len(released)

    # ------------------------------------------------------------------------------------------------ learner side

    def take(self, num_groups: int, timeout_s: float, step: int | None = None) -> bytes | None:
        """Wait for `num_groups` complete groups within the bound and consume them for `step` (None: the next), in the sampler's order.

        Returns an Arrow IPC stream, the rows of a group together and in order of member; None after `timeout_s` seconds,
        or at once when the buffer is closed. The batch of a step that was taken and not published is given again.
        """
        with self._changed:
            groups = self._wait("take", lambda: self._take(num_groups, step), timeout_s)
            if groups is None:
                return None
            self._last_lags = Counter(self._ledger.lag(group) for group in groups)
            rows = [row for group in groups for row in self._rows.of(group)]
        return to_ipc(pa.concat_batches(rows))

    def reject(self, step: int, reason: str) -> None:
        """Drop the groups that `take` gave for `step`: nothing was learned from them, and others are leased in their place."""
        with self._changed:
            self._rows.forget(self._ledger.reject(step, reason))
            self._changed.notify_all()

    def tasks(self, group_ids: Sequence[int]) -> list[Task]:
        """Return the tasks that groups attempt."""
        return [self._tasks.task(group_id) for group_id in group_ids]

    def advance(self, version: int, step: int | None = None) -> None:
        """Note that the servers serve `version`, which learned from every batch up to `step` (None: the last one taken).

        Groups that it makes too old are dropped at once, and their places are leased anew. To say it again changes nothing.
        """
        with self._changed:
            if version != self._ledger.version:
                self._ledger.advance(version, step)
            self._let_go()
            self._rows.forget(self._ledger.drop_stale())
            self._changed.notify_all()

    def settle(self, step: int) -> None:
        """Note that a checkpoint of `step` is complete: what was learned up to it will not be undone."""
        with self._changed:
            settled = [group for own, batch in self._ledger.batches().items() if own <= step for group in batch]
            self._ledger.settle(step)
            self._rows.forget(settled)

    def roll_back(self, step: int) -> None:
        """Undo the batches after `step`, whose weights are restored and published next.

        Their groups are ready again, or where their tokens are too far from those weights, their tasks are queued again.

        Raises:
            CheckpointError: they are settled.
        """
        with self._changed:
            self._rows.forget(self._ledger.roll_back(step, is_kept=self._rows.has))
            self._changed.notify_all()

    def lineage(self) -> Lineage:
        """Return which versions there were, so that lag can be told."""
        with self._changed:
            return self._ledger.lineage.copy()

    def _take(self, num_groups: int, step: int | None) -> list[ReadyGroup] | None:
        stale = self._ledger.drop_stale()
        if stale:
            self._rows.forget(stale)
            self._changed.notify_all()  # they made room for other leases
        return self._ledger.take(num_groups, step)

    def _let_go(self) -> None:
        """Forget the trajectories of the batch just published, but for those that could be learned from again after a roll-back.

        The latter are those that would be within the bound at the newest checkpoint.
        """
        ledger = self._ledger
        restored = ledger.lineage.copy()
        restored.roll_back(ledger.settled)
        self._rows.forget(
            [g.group_id for g in ledger.batch(ledger.step) if any(restored.lag(v) > ledger.max_staleness for v in g.versions)]
        )

    # ---------------------------------------------------------------------------------------------------- account

    def counts(self) -> BufferCounts:
        with self._changed:
            return self._ledger.counts()

    def stats(self) -> dict[str, float]:
        """Return numbers for metrics: groups by state, seconds waited in all since the start, lags of the last batch."""
        with self._changed:
            counts = self._ledger.counts()
            lags = self._last_lags
            num_bytes = self._rows.num_bytes
            lag_sum = sum(lag * count for lag, count in lags.items())
            stats: dict[str, float] = {
                "drawn": float(counts.drawn),
                "ready": float(counts.ready),
                "leased": float(counts.leased),
                "queued": float(counts.queued),
                "consumed": float(counts.consumed),
                "stored_bytes": float(num_bytes),
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

    def leases(self) -> list[HeldLease]:
        """Return who holds which group for how long, the oldest first."""
        with self._changed:
            return self._ledger.held_leases(self._clock())

    def close(self) -> None:
        """End all waiting: from here on `lease` returns [] and `take` None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> bytes:
        """Return cursor, ledger and ready groups as one Arrow IPC stream; leased groups are saved as places in the data."""
        with self._changed:
            self._journal.sync()  # what the checkpoint learned from must not be ready again after a power loss
            state = self._ledger.state()
            rows = [row for group in state["ready"] for row in self._rows.of(self._ledger.ready_group(group["group_id"]))]
        batch = pa.concat_batches(rows) if rows else pa.RecordBatch.from_pylist([], schema=SCHEMA)
        return to_ipc(batch.replace_schema_metadata({**SCHEMA.metadata, STATE_KEY: json.dumps(state).encode()}))

    def restore(self, data: bytes) -> None:
        """Become what `state` described, with its weights restored: a publish of them follows.

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
        owners = {group["group_id"]: group["owner"] for group in state.get("ready", ())}
        with self._changed:
            for row, (group_id, member) in enumerate(keys):
                self._rows.announce((group_id, owners.get(group_id, ""), member), batch.slice(row, 1))
            self._ledger.restore(state)
            self._changed.notify_all()

    def resume(self, step: int, state: bytes | None) -> None:
        """Go on after `step`, whose weights are restored and published next, with nobody left of those who held leases.

        The journal says what there was; where it cannot (it is empty, or forgot what is to be undone), `state` of the checkpoint does.

        Raises:
            CheckpointError: neither can.
        """
        if self._journal.is_empty or step < self._ledger.settled:
            if state is not None:
                self.restore(state)
            elif step > 0 or not self._journal.is_empty:
                raise CheckpointError(
                    f"nothing is known of the replay buffer as it was after step {step}: its journal goes back to "
                    f"step {self._ledger.settled} only, and no checkpoint has its state; start anew with trainer.resume_mode=disable"
                )
            return
        for owner in self._ledger.owners():
            self.release(owner)
        self.roll_back(step)

    def _read(self) -> None:
        """Apply what the journal says."""
        for event in self._journal.events():
            self._ledger.apply(event)
        self._ledger.touch(self._clock())
        for group in self._ledger.ready_groups():  # the last life may have ended between a group's last member and this look
            self._look_at(group.group_id, "ready")

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

    def _record(self, events: Sequence[Event]) -> None:
        """Write events, with the trajectories that come with them."""
        arriving = self._rows.arriving()
        is_kept = events[0].kind in (EventKind.ADDED, EventKind.IMPORTED)  # what comes late, or twice, is not
        self._journal.append(events, arriving if is_kept else {})

    def _is_constant(self, group: ReadyGroup) -> bool:
        rewards = np.concatenate([scored_rewards(row) for row in self._rows.of(group)])
        return bool(np.ptp(rewards) <= ROUNDING * np.abs(rewards).max())
