"""The life of every group: queued -> leased -> ready -> consumed, or dropped with a reason. No clock, no I/O, no threads.

The ledger decides by its state, and changes it by events only: each is recorded (by the journal) before it takes effect, so that
a ledger which reads them again is the same.

The bound on staleness has two halves. With B groups per step, S the largest lag allowed, and k batches taken and published:

    admission     a group may be leased iff  consumed + ready + leased < (S + k + 1) * B
    consumption   a ready group with a token that lags by more than S is dropped, never taken

The first keeps the second rare: whoever is leased would be taken, in order, S batches from now at the latest. With S = 0
nothing is leased between a take and its publish.

A batch that does not wait for stragglers makes those too old that were leased S versions ago. One that waits for them drops none: the
first half leaves at most B groups of that age, so that they fit into it.

When weights are restored, the batches learned since come back (`roll_back`), and lag counts along the tree of versions (`Lineage`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.samplers import SAMPLERS, ReadyGroup
from agentrl.buffer.states import FORMAT, OWNER_LOST, GroupStates, Play
from agentrl.errors import CheckpointError
from agentrl.types import NO_VERSION

STALE = "stale"
LATE = "late"
DUPLICATE = "duplicate"
EXPIRED = "expired"
ROLLED_BACK = "rolled_back"
NO_VARIANCE = "no_variance"

MAX_LEASES_IN_ORDER = 3
"""With the sampler in_order a group that could not be played is leased so often, before it is dropped and its batch is another."""

Admission = Literal["waiting", "ready", "late", "duplicate"]
"""What became of a member: kept (its group still incomplete | complete with it), or discarded."""


class Ledger(GroupStates):
    """Knows where each group is; a group's id is the position of its task in the dataset, the next one or the curriculum's choice.

    An `owner` is one life of one rollout actor: a restarted actor needs a new name, or what its former self still had in
    flight could be taken for its own.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        group_size: int,
        total_groups: int | None = None,
        waits_for_stragglers: bool = False,
        sampler: str = "fifo",
        oversample: float = 1.0,
        curriculum: Curriculum | None = None,
        record: Callable[[Sequence[Event]], None] = lambda events: None,
    ) -> None:
        """Start empty.

        Args:
            groups_per_step: B.
            max_staleness: S, in versions.
            group_size: members of a complete group.
            total_groups: groups the run will consume; no more are leased than it still needs. None: endless.
            waits_for_stragglers: no batch is taken before every leased group is complete that would be too old for the next one.
            sampler: a name of `SAMPLERS`.
            oversample: times as many groups are in flight as the bound above admits, >= 1.
            curriculum: chooses the tasks that are drawn; None: one position of the dataset after the other.
            record: keeps events, all or none; if it raises, none of them happened.
        """
        super().__init__(group_size, curriculum)
        self._waits_for_stragglers = waits_for_stragglers
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._total_groups = total_groups
        self._sampler = sampler
        self._oversample = oversample
        self._record = record

    @property
    def max_staleness(self) -> int:
        return self._max_staleness

    # ------------------------------------------------------------------------------------------------- admission

    def can_lease(self) -> bool:
        """Say whether the bound admits one more group, and the run needs it."""
        # k * B is counted as groups, not as steps, so that a resumed run may change B.
        ahead = (self._max_staleness + 1) * self._groups_per_step
        bound = self._published + math.ceil(self._oversample * ahead)
        if self._total_groups is not None:
            bound = min(bound, self._total_groups)
        return self._consumed + len(self._ready) + len(self._leased) < bound

    def lease(self, owner: str, now: float = 0.0) -> int:
        """Give `owner` a group to play: the one queued that was drawn first, else one that is drawn.

        Raises:
            ValueError: `can_lease` is False.
        """
        if not self.can_lease():
            raise ValueError("the bound on staleness admits no further group; ask can_lease first")
        if self._queued:
            group_id = min(self._queued, key=lambda queued: self._queued[queued].number)
        else:
            if self._next_draw is None:
                self._next_draw = self._drawn if self._curriculum is None else self._curriculum.draw()
            group_id = self._next_draw
        return self._lease(owner, group_id, now)

    def lease_copy(self, owner: str, *, older_than: float, now: float) -> int | None:
        """Give `owner`, too, the oldest group that another alone has played since before `older_than`; the first to finish counts.

        None: there is no such group.
        """
        slow = [
            (play.order, group_id)
            for group_id, group in self._leased.items()
            if owner not in group.plays and len(group.plays) == 1
            for play in group.plays.values()
            if play.since < older_than
        ]
        return self._lease(owner, min(slow)[1], now) if slow else None

    def _lease(self, owner: str, group_id: int, now: float) -> int:
        self._commit(Event(EventKind.LEASED, group_id, owner))
        self._leased[group_id].plays[owner].since = now
        return group_id

    def add_member(self, owner: str, group_id: int, member: int, versions: int | Iterable[int], accuracy: float | None = None) -> Admission:
        """Record a finished trajectory; with its last member the group becomes ready.

        Then the curriculum hears of it: a group that is dropped later, for its age or lack of variance, says no less of its task.
        `versions`: of its action tokens, or the one of all of them (NO_VERSION: it has none). `accuracy`: in 0..1; None: it does not count.

        Raises:
            ValueError: there is no such member in a group.
        """
        self._check_member(group_id, member)
        play = self._held(owner, group_id)
        if play is None or member in play.left_out:
            self._commit(Event(EventKind.DISCARDED, group_id, owner, member, reason=LATE))
            return "late"
        if member in play.members:
            self._commit(Event(EventKind.DISCARDED, group_id, owner, member, reason=DUPLICATE))
            return "duplicate"
        sampled = (versions,) if isinstance(versions, int) else tuple(sorted(set(versions)))
        sampled = tuple(version for version in sampled if version != NO_VERSION)
        self._commit(Event(EventKind.ADDED, group_id, owner, member, versions=sampled, accuracy=accuracy))
        return "ready" if group_id in self._ready else "waiting"

    def leave_out(self, owner: str, group_id: int, member: int, reason: str) -> Admission:
        """Record that a member will not come: its group is complete with the others. The last one cannot be left out: drop the group.

        Raises:
            ValueError: there is no such member, or it is the last.
        """
        self._check_member(group_id, member)
        play = self._held(owner, group_id)
        if play is None:
            return "late"
        if member in play.left_out or member in play.members:
            return "duplicate"
        if len(play.left_out) + 1 == self._group_size:
            raise ValueError(f"group {group_id}: all members would be left out; drop the group")
        self._commit(Event(EventKind.LEFT_OUT, group_id, owner, member, reason=reason))
        return "ready" if group_id in self._ready else "waiting"

    def _check_member(self, group_id: int, member: int) -> None:
        if not 0 <= member < self._group_size:
            raise ValueError(f"group {group_id}: member {member} is not in 0..{self._group_size - 1}")

    def drop(self, owner: str, group_id: int, reason: str) -> bool:
        """End what `owner` has of a group; False (and nothing happens) when it does not hold it.

        The group ends with it, unless another plays it, too, or its place in the order of batches is kept for it.
        """
        if self._held(owner, group_id) is None:
            return False
        group = self._leased[group_id]
        is_kept = self._sampler == "in_order" and group.num_leases < MAX_LEASES_IN_ORDER
        if len(group.plays) > 1 or is_kept:
            self._commit(Event(EventKind.QUEUED, group_id, owner, reason=reason))
        else:
            self._commit(Event(EventKind.DROPPED, group_id, reason=reason))
        return True

    def drop_ready(self, group_id: int, reason: str) -> None:
        """End a complete group that no batch holds yet; the bound admits another in its place.

        Raises:
            ValueError: it is not ready.
        """
        if group_id not in self._ready:
            raise ValueError(f"group {group_id} is not ready: it cannot be dropped as a complete one")
        self._commit(Event(EventKind.DROPPED, group_id, reason=reason))

    def release(self, owner: str) -> list[int]:
        """Queue all groups of a dead owner again, oldest lease first; members that had arrived are discarded."""
        held = self.held_by(owner)
        self._commit(Event(EventKind.RELEASED, owner=owner), *(Event(EventKind.QUEUED, g, owner, reason=OWNER_LOST) for g in held))
        return held

    def expire(self, *, older_than: float) -> list[tuple[str, int]]:
        """Take back the groups that an owner has had since before `older_than`: its lease has ended. Returns (owner, group)."""
        late = [
            (owner, group_id) for group_id, group in self._leased.items() for owner, play in group.plays.items() if play.since < older_than
        ]
        self._commit(*(Event(EventKind.QUEUED, group_id, owner, reason=EXPIRED) for owner, group_id in late))
        return late

    def _held(self, owner: str, group_id: int) -> Play | None:
        group = self._leased.get(group_id)
        return group.plays.get(owner) if group is not None else None

    # ----------------------------------------------------------------------------------------------- consumption

    def drop_stale(self) -> list[int]:
        """Drop the ready groups that no batch may hold any more, and return their ids."""
        stale = [group_id for group_id, group in self._ready.items() if self.lag(group) > self._max_staleness]
        self._commit(*(Event(EventKind.DROPPED, group_id, reason=STALE) for group_id in stale))
        return stale

    def take(self, num_groups: int, step: int | None = None) -> list[ReadyGroup] | None:
        """Consume `num_groups` ready groups within the bound, chosen by the sampler, for `step` (None: the next).

        None: there are fewer, or stragglers. A step that was taken before is given again.

        Raises:
            ValueError: num_groups is not in 1..groups_per_step: the bound admits no more at once.
        """
        if not 1 <= num_groups <= self._groups_per_step:
            raise ValueError(f"cannot take {num_groups} groups: a batch holds 1 to groups_per_step={self._groups_per_step}")
        step = self._step + 1 if step is None else step
        if taken := self.batch(step):
            return taken
        if self._waits_for_stragglers and self._has_stragglers():
            return None
        fresh = [group for group in self._ready.values() if self.lag(group) <= self._max_staleness]
        open_number = min((group.number for groups in (self._queued, self._leased) for group in groups.values()), default=self._drawn)
        batch = SAMPLERS[self._sampler](fresh, num_groups, self.lag, open_number)
        if batch is not None:
            self._commit(*(Event(EventKind.CONSUMED, group.group_id, step=step) for group in batch))
        return batch

    def _has_stragglers(self) -> bool:
        leases = (play.version for group in self._leased.values() for play in group.plays.values())
        return any(self.lineage.lag(version) >= self._max_staleness for version in leases)

    def reject(self, step: int, reason: str) -> list[int]:
        """Drop the groups of a batch that nothing was learned from, and return them: the bound admits others in their place.

        Raises:
            ValueError: its update is published.
        """
        rejected = list(self._batches.get(step, ()))
        if len(rejected) > self._consumed - self._published:
            raise ValueError(f"cannot reject the batch of step {step}: its update is published")
        self._commit(*(Event(EventKind.DROPPED, group_id, reason=reason) for group_id in rejected))
        return rejected

    def advance(self, version: int, step: int | None = None) -> None:
        """Record that weights which learned from every batch taken so far are published as `version`.

        Raises:
            ValueError: the version is not newer than the last.
        """
        if version <= self.version:
            raise ValueError(f"version {version} was published after version {self.version}: versions only grow")
        self._commit(Event(EventKind.PUBLISHED, version=version, step=self._step if step is None else step))

    def settle(self, step: int) -> None:
        """Note that nothing up to `step` will be undone: a checkpoint of it is complete."""
        if step > self._settled:
            self._commit(Event(EventKind.SETTLED, step=step))

    def roll_back(self, step: int, *, is_kept: Callable[[ReadyGroup], bool] = lambda group: True) -> list[int]:
        """Undo all batches after `step`: its weights are restored, and a publish of them follows.

        Their groups are ready again where `is_kept` says that their trajectories are there and the bound allows them; the tasks
        of the others are queued again, their trajectories discarded, and their ids returned.

        Raises:
            CheckpointError: what was consumed since then is not known any more.
        """
        if step < self._settled:
            raise CheckpointError(f"batches up to step {self._settled} are settled and cannot be undone; step {step} was asked for")
        probe = self.lineage.copy()
        probe.roll_back(step)
        events = [Event(EventKind.ROLLED_BACK, step=step)]
        for undone in sorted(s for s in self._batches if s > step):
            for group in self._batches[undone].values():
                is_fresh = all(probe.lag(version) <= self._max_staleness for version in group.versions)
                kind = EventKind.RETURNED if is_fresh and is_kept(group) else EventKind.REQUEUED
                events.append(Event(kind, group.group_id, step=undone, reason=ROLLED_BACK))
        self._commit(*events)
        return [event.group_id for event in events if event.kind is EventKind.REQUEUED]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state` describes, with its weights restored: a publish of them follows.

        The owners of its leases are gone: their groups are queued.

        Raises:
            CheckpointError: the state has another format, or another curriculum than this run.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(f"the buffer's state has format {state.get('format')!r}, expected {FORMAT}")
        self._commit(Event(EventKind.IMPORTED, reason=json.dumps(state)))

    def _commit(self, *events: Event) -> None:
        if events:
            self._record(events)
        for event in events:
            self.apply(event)
