"""The replay buffer: the dataset's cursor, the ledger, and the journal that persists both with the facts of
finished attempts. Their trajectories are in files, which the buffer never reads.

Rollout actors lease groups and add finished trajectories. The controller takes batches and reports publishes.
Both sides pull: a producer that runs ahead waits in `lease`, a learner that runs ahead waits in `take`.

Every change is journaled before it takes effect. A restarted buffer replays the journal and continues where
the last one stopped. Callers can retry a call whose answer was lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from agentrl.buffer.audit import Audit
from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import Journal
from agentrl.buffer.ledger import FILES_LOST, NO_VARIANCE, STALE, Admission, Ledger, LedgerRules
from agentrl.buffer.lineage import Lineage
from agentrl.buffer.rows import Rows
from agentrl.buffer.samplers import ReadyGroup
from agentrl.buffer.snapshots import take_snapshot
from agentrl.data.attempt_facts import AttemptFacts, ConversationCredit
from agentrl.errors import CheckpointError
from agentrl.types import BufferCounts, HeldLease, Lease, Task

MAX_EVENTS = 100_000
"""Without checkpoints, a publish takes a snapshot after so many events: a restart reads them in seconds."""
MIN_WAIT_S = 0.01
"""Of a lease that waits for a moment: at the moment itself nothing is due yet."""


class TaskSequence(Protocol):
    """A dataset that returns the task at any position. Must be thread-safe."""

    def task(self, position: int) -> Task: ...


class ReplayBuffer:
    """The replay buffer. It is thread-safe; only `lease` and `take` block.

    `_lock` guards the ledger, the rows and the journal. Each change wakes only those whom it may unblock
    (`_wake`): a finished trajectory moves no bound, so it wakes no waiting lease.
    """

    def __init__(
        self,
        tasks: TaskSequence,
        rules: LedgerRules,
        folder: Path,
        *,
        has_greedy: bool = False,
        drop_constant_groups: bool = False,
        conversation_credit: ConversationCredit = "attempt",
        lease_timeout_s: float = math.inf,
        duplicate_after_s: float = math.inf,
        curriculum: Curriculum | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start from the journal's state, or empty.

        Args:
            rules: `group_size` without the greedy attempt.
            folder: of the trajectories' files (`agentrl.data.attempt_files`).
            has_greedy: each group has one more member, a greedy attempt. The staleness bound covers it too.
            drop_constant_groups: drop a complete group if all its rewards are equal, including the greedy
                one; another group is leased instead.
            conversation_credit: whether these are the rewards of attempts, or of their conversations.
            lease_timeout_s: a lease older than this expires, and its group is leased to another owner, for
                twice as long.
            duplicate_after_s: a group held longer than this is also leased to an owner that would otherwise
                be idle; the first complete copy wins.
            journal: None keeps the journal in memory, for the life of the process.
            clock: returns monotonic seconds.

        Raises:
            CheckpointError: the journal belongs to other data.
        """
        self._tasks = tasks
        self._drop_constant_groups = drop_constant_groups
        self._conversation_credit = conversation_credit
        self._group_size = rules.group_size
        self._has_greedy = has_greedy
        self._lease_timeout_s = lease_timeout_s
        self._duplicate_after_s = duplicate_after_s
        self._journal = Journal(None) if journal is None else journal
        self._rows = Rows(self._journal, folder)
        rules = replace(rules, group_size=rules.group_size + has_greedy)
        self._ledger = Ledger(rules, curriculum=curriculum, record=self._record)
        self._groups = self._ledger.groups  # read here, changed by the ledger
        self._curriculum = curriculum
        self._lock = threading.RLock()
        self._leasable = threading.Condition(self._lock)
        self._takeable = threading.Condition(self._lock)
        self._wanted: list[int] = []  # groups that each waiting take needs
        self._is_closed = False
        self._clock = clock
        self._waited_s = {"lease": 0.0, "take": 0.0}
        self._last_lags: Counter[int] = Counter()
        self._audit = Audit()  # of the same events, by other code
        self._last_snapshot = 0  # number of its event
        self._read()
        self._last_add = clock()

    # ------------------------------------------------------------------------------------------- rollout side

    def lease(
        self, owner: str, limit: int, timeout_s: float, held: Collection[int] | None = None
    ) -> list[Lease]:
        """Wait until the staleness bound admits a group, then lease up to `limit` groups to `owner`.

        Returns [] after `timeout_s` seconds, or at once if the buffer is closed or `owner` was released.

        `held`: the groups that the owner knows it holds. Groups leased to it that are missing from `held` are
        returned again, because the answer that leased them was lost. None: the owner knows all its groups.
        """
        if limit < 1:
            raise ValueError(f"limit={limit}: lease at least 1 group")
        with self._changing(), self._counted("lease"):
            try:
                group_ids = [] if held is None else [g for g in self._groups.held_by(owner) if g not in held]
                group_ids = group_ids or self._wait_for_leases(owner, limit, time.monotonic() + timeout_s)
            finally:
                self._wake()  # those who were not woken because this call was, and left room
            version = self._groups.version
        # Outside the lock: reading one dataset row may decode a whole Parquet row group.
        leases = [
            Lease(group_id, self._tasks.task(group_id), self._group_size, version, self._has_greedy)
            for group_id in group_ids
        ]
        if leases:
            with self._lock:
                self._journal.name_tasks({lease.group_id: lease.task.task_id for lease in leases})
        return leases

    def _wait_for_leases(self, owner: str, limit: int, deadline: float) -> list[int]:
        """Return up to `limit` groups leased to `owner`, or [] when the wait is over."""
        group_ids: list[int] = []
        while not (self._is_closed or owner in self._groups.released):
            now = self._clock()
            self._rows.forget_plays(self._ledger.expire(now=now, timeout_s=self._lease_timeout_s))
            while len(group_ids) < limit and self._ledger.can_lease():
                group_ids.append(self._ledger.lease(owner, now))
            if not group_ids:
                copied = self._ledger.lease_copy(owner, older_than=now - self._duplicate_after_s, now=now)
                group_ids.extend([] if copied is None else [copied])
            if group_ids or not self._wait(self._leasable, deadline, self._due_s(owner, now)):
                break
        return group_ids

    def _due_s(self, owner: str, now: float) -> float:
        """Return for how many seconds no lease can expire, and `owner` can copy no group.

        A group that is leased while it waits is due no sooner than one that is leased `now`.
        """
        ledger = self._ledger
        due = min(ledger.next_expiry(self._lease_timeout_s), now + self._lease_timeout_s)
        if not math.isinf(self._duplicate_after_s):
            due = min(due, min(ledger.next_copy(owner), now) + self._duplicate_after_s)
        return max(MIN_WAIT_S, due - now)

    def withdrawn(self, owner: str, held: Collection[int]) -> list[int]:
        """Return the groups in `held` that `owner` no longer holds.

        Another owner finished the group first, or the lease has ended.
        """
        with self._lock:
            return sorted(set(held).difference(self._groups.held_by(owner)))

    def add(self, owner: str, attempts: Sequence[AttemptFacts]) -> None:
        """Store the facts of finished attempts, whose trajectories are in files of this run.

        A duplicate member is discarded and counted, and so is a member of a group that `owner` does not hold;
        their files are removed.

        Raises:
            JournalError: some of them could not be written; the call can be retried.
        """
        counts = self._curriculum is not None and self._curriculum.uses_results
        with self._changing():
            self._last_add = self._clock()
            try:
                for attempt in attempts:
                    group_id, member = attempt.group_id, attempt.member
                    self._rows.announce((group_id, owner, member), attempt)
                    versions = tuple(version for version, _ in attempt.versions)
                    accuracy = attempt.accuracy if counts else None
                    admission = self._ledger.add_member(owner, group_id, member, versions, accuracy)
                    self._look_at(group_id, admission)
            finally:  # members before one that could not be written have arrived
                self._wake()

    def leave_out(self, owner: str, group_id: int, member: int, reason: str) -> None:
        """Record that a member of a group that `owner` holds will not arrive.

        The group completes without it.
        """
        with self._changing():
            self._look_at(group_id, self._ledger.leave_out(owner, group_id, member, reason))
            self._wake()

    def _look_at(self, group_id: int, admission: Admission) -> None:
        """If the group just became ready, forget its copies from other owners; drop it if its rewards are
        constant, or if it is too stale.
        """
        if admission != "ready":
            return
        group = self._groups.ready[group_id]
        self._rows.forget_others(group)
        if self._drop_constant_groups and self._rows.is_constant(group, self._conversation_credit):
            self._ledger.drop_ready(group_id, NO_VARIANCE)
        elif self._ledger.is_stale(group):
            self._ledger.drop_ready(group_id, STALE)
        else:
            return
        self._rows.forget([group_id])

    def drop_group(self, owner: str, group_id: int, reason: str) -> None:
        """Drop a group that `owner` cannot finish. The staleness bound then admits another group.

        The ledger queues the group again instead if it keeps its place in the order of batches (see
        `Ledger.drop`).
        """
        with self._changing():
            if self._ledger.drop(owner, group_id, reason):
                self._rows.forget_plays([(owner, group_id)])
            if group_id in self._groups.leased:  # by another owner alone: it may be copied at once
                self._wake_all()
            else:
                self._wake()

    def release(self, owner: str) -> int:
        """Queue the groups of a dead owner again and return their number. Call it only when the owner is
        known to be dead.

        The name can never lease again. Otherwise a pending long poll of the dead process could take the
        released groups.
        """
        with self._changing():
            released = self._ledger.release(owner)
            self._rows.forget_plays([(owner, group_id) for group_id in released])
            self._wake_all()
        return len(released)

    # ------------------------------------------------------------------------------------------- learner side

    def take(
        self, num_groups: int, timeout_s: float, step: int | None = None
    ) -> Sequence[AttemptFacts] | None:
        """Wait for `num_groups` ready groups within the staleness bound, then consume them for `step` (None:
        the next).

        The sampler chooses the groups and their order. The attempts of a group are adjacent and ordered by
        member. Returns None after `timeout_s` seconds, or at once if
        the buffer is closed. A step that was taken but not published returns the same batch again.
        """
        groups: list[ReadyGroup] | None = None
        with self._changing(), self._counted("take"):
            deadline = time.monotonic() + timeout_s
            self._wanted.append(num_groups)
            try:
                while groups is None and not self._is_closed:
                    if stale := self._ledger.drop_stale():
                        self._rows.forget(stale)
                        self._wake()  # dropped groups make room for new leases
                    groups = self._ledger.take(num_groups, step)
                    if groups is None and not self._wait(self._takeable, deadline):
                        break
            finally:
                self._wanted.remove(num_groups)
            if groups is None:
                return None
            self._last_lags = Counter(self._groups.lag(group) for group in groups)
            attempts = self._rows.of(groups)
            self._rows.hold_batch(self._groups.step if step is None else step, groups)
            return attempts

    def release_batches(self, before: int) -> None:
        """Record that nobody reads the trajectories of batches of earlier steps any more.

        Until then the files of a batch are kept, also if its groups are forgotten before.
        """
        with self._changing():
            self._rows.release_batches(before)

    def reject(self, step: int, reason: str) -> None:
        """Drop the groups that `take` returned for `step` because nothing was learned from them; others are
        leased instead.
        """
        with self._changing():
            self._rows.forget(self._ledger.reject(step, reason))
            self._wake()

    def tasks(self, group_ids: Sequence[int]) -> list[Task]:
        """Return the tasks of the given groups."""
        return [self._tasks.task(group_id) for group_id in group_ids]

    def advance(self, version: int, step: int | None = None) -> Lineage:
        """Record that the servers use `version`, which learned from every batch up to `step` (None: the last
        one taken). Return the lineage up to it.

        Ready groups that are now too stale are dropped at once, which makes room for new leases. The call is
        idempotent.
        """
        with self._changing():
            if version != self._groups.version:
                self._ledger.advance(version, step)
            self._let_go()
            self._rows.forget(self._ledger.drop_stale())
            self._wake_all()
            if self._journal.num_events - self._last_snapshot > MAX_EVENTS:
                self._take_snapshot()
            return self._groups.lineage.copy()

    def settle(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete: batches up to `step` will never be rolled
        back.
        """
        with self._changing():
            settled = [group for own, batch in self._groups.batches.items() if own <= step for group in batch]
            self._ledger.settle(step)
            self._rows.forget(settled)
            self._take_snapshot()

    def roll_back(self, step: int) -> None:
        """Undo all batches after `step`. The weights of `step` are restored and published next.

        The undone groups become ready again. If a group's tokens would lag too far behind the restored
        weights, or its trajectories are gone, its task is queued again instead.

        Raises:
            CheckpointError: a batch to undo is settled.
        """
        with self._changing():
            self._rows.forget(self._ledger.roll_back(step, is_kept=self._rows.has))
            self._wake_all()

    def _let_go(self) -> None:
        """Forget trajectories of the batch just published if no rollback could make their groups ready again.

        A rollback goes back to the newest checkpoint, so the lag is measured from that checkpoint's version.
        """
        groups, max_staleness = self._groups, self._ledger.rules.max_staleness
        restored = groups.lineage.copy()
        restored.roll_back(groups.settled)
        self._rows.forget(
            [
                g.group_id
                for g in groups.batch(groups.step)
                if any(restored.lag(v) > max_staleness for v in g.versions)
            ]
        )

    # ------------------------------------------------------------------------------------------------ account

    def counts(self) -> BufferCounts:
        with self._lock:
            return self._groups.counts()

    def stats(self) -> dict[str, float]:
        """Return metrics: groups by state, total seconds waited since the start, and lags of the last
        batch.
        """
        with self._lock:
            counts = self._groups.counts()
            lags = self._last_lags
            lag_sum = sum(lag * count for lag, count in lags.items())
            stats: dict[str, float] = {
                **{
                    state: float(getattr(counts, state))
                    for state in ("drawn", "ready", "leased", "queued", "consumed")
                },
                "stored_attempts": float(self._rows.num_stored),
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
        """Return the curriculum's metrics for the step before the last publish; {} without a curriculum."""
        with self._lock:
            return {} if self._curriculum is None else self._curriculum.metrics()

    def leases(self) -> list[HeldLease]:
        """Return all held leases with their owners and ages, oldest first."""
        with self._lock:
            return self._groups.held_leases(self._clock())

    def close(self) -> None:
        """Wake all waiters. From now on `lease` returns [] and `take` returns None."""
        with self._lock:
            self._is_closed = True
            self._wake_all()
        self._rows.close()

    # --------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> bytes:
        """Return cursor, ledger and the facts of ready groups as JSON.

        Of leased groups it holds only the dataset positions. Trajectories stay in their files.
        """
        with self._lock:
            # After a power loss, groups that the checkpoint learned from must not be ready again.
            self._journal.sync()
            state = self._groups.state()
            stored = self._rows.stored(self._groups.ready.values())
        return self._rows.write_state(state, stored)

    def restore(self, data: bytes) -> None:
        """Replace the buffer's content with a saved `state`. Its weights are restored and published next.

        Raises:
            CheckpointError: the bytes are not a valid state.
        """
        state, attempts = self._rows.read_state(data)
        with self._changing():
            for key, attempt in attempts.items():
                self._rows.announce(key, attempt)
            self._ledger.restore(state)
            self._wake_all()

    def resume(self, step: int, state: bytes | None) -> int:
        """Continue after `step`, whose weights are restored and published next. All former lease owners are
        dead. Return the newest version that was ever published; NO_VERSION before the first.

        The journal is used if it can be rolled back to `step`. If it is empty or no longer holds the batches
        to undo, the checkpoint's `state` is used.

        Raises:
            CheckpointError: neither source is available.
        """
        if self._journal.is_empty or step < self._groups.settled:
            if state is not None:
                self.restore(state)
            elif step > 0 or not self._journal.is_empty:
                raise CheckpointError(
                    f"the state of the replay buffer is unknown after step {step}: its journal "
                    f"goes back only to step {self._groups.settled}, and no checkpoint has its "
                    "state; start over with trainer.resume_mode=disable"
                )
        else:
            for owner in self._groups.owners():
                self.release(owner)
            self.roll_back(step)
        with self._changing():
            for group in list(self._groups.ready.values()):
                if not self._rows.has(group):
                    self._ledger.drop_ready(group.group_id, FILES_LOST)
                    self._rows.forget([group.group_id])
            self._rows.remove_strays()
            return self._groups.version

    def _read(self) -> None:
        """Replay the journal."""
        self._ledger.replay(self._followed(), now=self._clock())
        # The process may have died between a group's last member and its variance check.
        for group_id in list(self._groups.ready):
            self._look_at(group_id, "ready")

    def _followed(self) -> Iterator[Event]:
        """Yield the journal's events. The audit follows them without the bound, which may be another now."""
        for seq, event in self._journal.numbered_events():
            if event.kind is EventKind.SNAPSHOT:
                self._last_snapshot = seq
            self._audit.follow(seq, event, max_staleness=math.inf)
            yield event

    # ------------------------------------------------------------------------------------ under the lock only

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; at the end of the block, remove the files that no stored attempt is in any more."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._rows.spare_unused()
                raise
            self._rows.remove_unused()

    def _wake(self) -> None:
        """Wake the waiting leases for which there is room, and the waiting takes if there are enough groups.

        A lease that is woken and leaves room calls this again, so none sleeps beside a group that it could
        have.
        """
        room = self._ledger.room()
        if room > 0:
            self._leasable.notify(room)
        if self._wanted and len(self._groups.ready) >= min(self._wanted):
            self._takeable.notify_all()

    def _wake_all(self) -> None:
        """Wake every waiter: some must end, or lag has changed."""
        self._leasable.notify_all()
        self._takeable.notify_all()

    def _wait(self, changed: threading.Condition, deadline: float, due_s: float = math.inf) -> bool:
        """Release the lock until a change wakes this call, at most for `due_s` or until the deadline
        (monotonic seconds).

        False if the deadline had passed before.
        """
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        changed.wait(min(left_s, due_s))
        return True

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """Count the block's time as time waited."""
        start = self._clock()
        yield
        self._waited_s[what] += self._clock() - start

    def _record(self, events: Sequence[Event]) -> None:
        """Write events to the journal, with the attempts that they refer to."""
        # Late and duplicate members are not kept.
        is_kept = events[0].kind in (EventKind.ADDED, EventKind.IMPORTED)
        seq = self._journal.num_events
        arriving = self._rows.take_arriving()
        stored = {key: attempt.to_json() for key, attempt in arriving.items()} if is_kept else {}
        self._journal.append(events, stored)
        if is_kept:
            self._rows.keep(arriving)
        else:
            self._rows.discard(arriving)
        for event in events:
            seq += 1
            self._audit.follow(seq, event, max_staleness=self._ledger.rules.max_staleness)

    def _take_snapshot(self) -> None:
        """Replace the journal's events by a snapshot, so that a restart need not read them.

        If ledger and audit disagree, the events stay for `agentrl audit`.
        """
        if self._journal.num_events == self._last_snapshot:
            return
        snapshot = take_snapshot(self._groups, self._audit)
        if snapshot is not None:
            self._journal.replace_events(snapshot)
            self._audit, self._last_snapshot = snapshot.audit, self._journal.num_events
