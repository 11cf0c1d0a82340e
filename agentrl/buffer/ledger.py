"""The ledger: the life cycle of every group, queued -> leased -> ready -> consumed, or dropped with a reason.

It uses no clock, no I/O and no threads. Its state changes only by events. Each event is recorded in the
journal before it takes effect, so replaying the journal restores the same state.

The staleness bound has two parts. Let B be the groups per step, S the largest lag allowed, and k the number
of batches taken and published:

    admission     a group may be leased iff  consumed + ready + leased < (S + k + 1) * B
    consumption   a ready group with a token that lags by more than S is dropped, never taken

Admission makes stale drops rare: taken in order, a leased group is consumed at most S batches later. With S =
0 nothing is leased between a take and its publish.

A batch that does not wait for stragglers makes groups leased S versions ago too stale. A ledger that waits
for stragglers drops none: a group with a lag of a can be in one of the S - a batches after the next, so at
most (S - a) * B groups with a lag of a or more may still be played when a batch is taken. Otherwise younger
groups would fill these batches, and the older ones would all be late at once.

When weights are restored, the batches learned since then are undone (`roll_back`), and lag is counted along
the tree of versions (`Lineage`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.samplers import SAMPLERS, ReadyGroup
from agentrl.buffer.states import EXPIRED, OWNER_LOST, GroupStates, Play, check_format
from agentrl.config.buffer import BufferConfig
from agentrl.errors import CheckpointError
from agentrl.types import NO_VERSION

STALE = "stale"
LATE = "late"
DUPLICATE = "duplicate"
ROLLED_BACK = "rolled_back"
NO_VARIANCE = "no_variance"
FILES_LOST = "files_lost"

MAX_LEASES_IN_ORDER = 3
"""Leases of one group with the sampler in_order, before a group that cannot be played is dropped."""

Admission = Literal["waiting", "ready", "late", "duplicate"]
"""Result of adding a member.

waiting: kept, the group is incomplete. ready: kept, the group is complete. Else: discarded.
"""


@dataclass(frozen=True, slots=True)
class LedgerRules:
    """How far the rollouts may run ahead, and how batches are formed.

    groups_per_step: B.
    max_staleness: S, in versions.
    group_size: members of a complete group.
    total_groups: groups that the run will consume; no more are leased than it still needs. None: unlimited.
    waits_for_stragglers: take no batch while leased groups might become too stale for the batches after it.
    sampler: a key of `SAMPLERS`.
    oversample: factor >= 1 on the number of groups that admission allows.
    """

    groups_per_step: int
    max_staleness: int
    group_size: int
    total_groups: int | None = None
    waits_for_stragglers: bool = False
    sampler: str = "fifo"
    oversample: float = 1.0

    @classmethod
    def of(cls, config: BufferConfig, *, group_size: int, total_steps: int) -> LedgerRules:
        """Return the rules of a run of `total_steps` batches."""
        return cls(
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            group_size=group_size,
            total_groups=total_steps * config.groups_per_step,
            waits_for_stragglers=config.stragglers == "wait",
            sampler=config.sampler,
            oversample=config.oversample,
        )


class Ledger:
    """Decides which events happen to groups. `groups` is their state; others may read it, not change it.

    A group's id is its task's position: the next one, or the curriculum's choice. An `owner` is one
    incarnation of a rollout actor. A restarted actor needs a new name; otherwise calls that its previous
    process still had in flight would count as its own.
    """

    def __init__(
        self,
        rules: LedgerRules,
        *,
        curriculum: Curriculum | None = None,
        record: Callable[[Sequence[Event]], None] = lambda events: None,
    ) -> None:
        """Start empty.

        Args:
            curriculum: chooses the tasks to draw. None: dataset positions in order.
            record: stores events atomically; if it raises, none of them happened.
        """
        self.rules = rules
        self.groups = GroupStates(rules.group_size, curriculum)
        self._record = record

    def replay(self, events: Iterable[Event], *, now: float) -> None:
        """Apply events that were recorded before. All leases start `now`: the recorder had another clock."""
        for event in events:
            self.groups.apply(event)
        for _, _, play in self.groups.plays():
            play.since = now

    # ---------------------------------------------------------------------------------------------- admission

    def can_lease(self) -> bool:
        """Return whether the bound admits one more group and the run needs it."""
        return self.room() > 0

    def room(self) -> int:
        """Return how many more groups the bound admits and the run needs; at most 0: none."""
        groups, rules = self.groups, self.rules
        # `published` counts groups (k * B), not steps, so that a resumed run can change B.
        bound = groups.published + math.ceil(
            rules.oversample * (rules.max_staleness + 1) * rules.groups_per_step
        )
        if rules.total_groups is not None:
            bound = min(bound, rules.total_groups)
        return bound - groups.consumed - len(groups.ready) - len(groups.leased)

    def lease(self, owner: str, now: float = 0.0) -> int:
        """Lease one group to `owner`: the queued group that was drawn first, or a newly drawn group if none
        is queued.

        `now` must not be smaller than at any lease before.

        Raises:
            ValueError: `can_lease` is False.
        """
        if not self.can_lease():
            raise ValueError("the bound on staleness admits no more groups; call can_lease first")
        queued = self.groups.queued
        group_id = (
            min(queued, key=lambda group_id: queued[group_id].number) if queued else self.groups.next_draw()
        )
        return self._lease(owner, group_id, now)

    def lease_copy(self, owner: str, *, older_than: float, now: float) -> int | None:
        """Lease to `owner` a copy of the oldest group that exactly one other owner has held since before
        `older_than`.

        The first owner to finish the group wins. Returns None if there is no such group.
        """
        slow = self._to_copy(owner)
        if slow is None or slow[1].since >= older_than:
            return None
        return self._lease(owner, slow[0], now)

    def _to_copy(self, owner: str) -> tuple[int, Play] | None:
        """Return the oldest lease of a group that exactly one owner holds, not `owner`."""
        for group_id, holder, play in self.groups.plays():
            if holder != owner and len(self.groups.leased[group_id].plays) == 1:
                return group_id, play
        return None

    def next_expiry(self, timeout_s: float) -> float:
        """Return when the next lease expires (see `expire`); infinity without leases."""
        earliest = math.inf
        for group_id, _, play in self.groups.plays():
            if play.since + timeout_s >= earliest:  # later leases expire even later
                break
            earliest = min(earliest, play.since + self._time_s(group_id, timeout_s))
        return earliest

    def _time_s(self, group_id: int, timeout_s: float) -> float:
        """Return for how long a leased group may be played."""
        return math.ldexp(timeout_s, self.groups.leased[group_id].num_expired)

    def next_copy(self, owner: str) -> float:
        """Return when the lease began that `lease_copy` would copy first; infinity if there is none."""
        slow = self._to_copy(owner)
        return math.inf if slow is None else slow[1].since

    def _lease(self, owner: str, group_id: int, now: float) -> int:
        self._commit(Event(EventKind.LEASED, group_id, owner))
        self.groups.leased[group_id].plays[owner].since = now
        return group_id

    def add_member(
        self,
        owner: str,
        group_id: int,
        member: int,
        versions: int | Iterable[int],
        accuracy: float | None = None,
    ) -> Admission:
        """Record a finished trajectory. The group becomes ready when its last member arrives.

        The curriculum observes the group at that moment, before it can be dropped as stale or without
        variance: such a group is equally informative about its task.

        Args:
            versions: versions of the action tokens, or one version for all of them (NO_VERSION: no action
                tokens).
            accuracy: in 0..1; None: it does not count.

        Raises:
            ValueError: `member` is outside of the group.
        """
        self._check_member(group_id, member)
        play = self.groups.play(owner, group_id)
        if play is None or member in play.left_out:
            self._commit(Event(EventKind.DISCARDED, group_id, owner, member, reason=LATE))
            return "late"
        if member in play.members:
            self._commit(Event(EventKind.DISCARDED, group_id, owner, member, reason=DUPLICATE))
            return "duplicate"
        sampled = (versions,) if isinstance(versions, int) else tuple(sorted(set(versions)))
        sampled = tuple(version for version in sampled if version != NO_VERSION)
        self._commit(Event(EventKind.ADDED, group_id, owner, member, versions=sampled, accuracy=accuracy))
        return "ready" if group_id in self.groups.ready else "waiting"

    def leave_out(self, owner: str, group_id: int, member: int, reason: str) -> Admission:
        """Record that a member will not arrive; its group completes without it.

        Raises:
            ValueError: `member` is outside of the group, or all members would be left out: drop the group
                instead.
        """
        self._check_member(group_id, member)
        play = self.groups.play(owner, group_id)
        if play is None:
            return "late"
        if member in play.left_out or member in play.members:
            return "duplicate"
        if len(play.left_out) + 1 == self.rules.group_size:
            raise ValueError(f"group {group_id}: shrinking would remove all members; drop the group")
        self._commit(Event(EventKind.LEFT_OUT, group_id, owner, member, reason=reason))
        return "ready" if group_id in self.groups.ready else "waiting"

    def _check_member(self, group_id: int, member: int) -> None:
        if not 0 <= member < self.rules.group_size:
            raise ValueError(f"group {group_id}: member {member} is not in 0..{self.rules.group_size - 1}")

    def drop(self, owner: str, group_id: int, reason: str) -> bool:
        """End the owner's lease of a group. Returns False, and changes nothing, if `owner` does not hold the
        group.

        The group is dropped, with two exceptions: another owner plays a copy of it, or the sampler in_order
        keeps its place (it is queued again, up to MAX_LEASES_IN_ORDER leases).
        """
        if self.groups.play(owner, group_id) is None:
            return False
        group = self.groups.leased[group_id]
        is_kept = self.rules.sampler == "in_order" and group.num_leases < MAX_LEASES_IN_ORDER
        if len(group.plays) > 1 or is_kept:
            self._commit(Event(EventKind.QUEUED, group_id, owner, reason=reason))
        else:
            self._commit(Event(EventKind.DROPPED, group_id, reason=reason))
        return True

    def drop_ready(self, group_id: int, reason: str) -> None:
        """Drop a ready group; the bound then admits another group.

        Raises:
            ValueError: the group is not ready.
        """
        if group_id not in self.groups.ready:
            raise ValueError(f"group {group_id} is not ready, so it cannot be dropped as complete")
        self._commit(Event(EventKind.DROPPED, group_id, reason=reason))

    def release(self, owner: str) -> list[int]:
        """End the leases of a dead owner and return its groups, oldest lease first; they are queued again.

        Members that had already arrived are discarded. A group of which another owner plays a copy stays
        leased.
        """
        held = self.groups.held_by(owner)
        self._commit(
            Event(EventKind.RELEASED, owner=owner),
            *(Event(EventKind.QUEUED, g, owner, reason=OWNER_LOST) for g in held),
        )
        return held

    def expire(self, *, now: float, timeout_s: float) -> list[tuple[str, int]]:
        """End all leases that are older than `timeout_s`. Returns their (owner, group id) pairs.

        Each expiry doubles the time of the group's next leases. Otherwise groups that take longer, on servers
        that are slower than the config expects, would be begun again for ever.
        """
        oldest_first = itertools.takewhile(
            lambda lease: now - lease[2].since > timeout_s, self.groups.plays()
        )
        late = [
            (owner, group_id)
            for group_id, owner, play in oldest_first
            if now - play.since > self._time_s(group_id, timeout_s)
        ]
        self._commit(*(Event(EventKind.QUEUED, group_id, owner, reason=EXPIRED) for owner, group_id in late))
        return late

    # -------------------------------------------------------------------------------------------- consumption

    def is_stale(self, group: ReadyGroup) -> bool:
        """Return whether the group is too stale for any batch."""
        return self.groups.lag(group) > self.rules.max_staleness

    def drop_stale(self) -> list[int]:
        """Drop the ready groups that are too stale for any batch and return their ids."""
        stale = [group_id for group_id, group in self.groups.ready.items() if self.is_stale(group)]
        self._commit(*(Event(EventKind.DROPPED, group_id, reason=STALE) for group_id in stale))
        return stale

    def take(self, num_groups: int, step: int | None = None) -> list[ReadyGroup] | None:
        """Consume `num_groups` ready groups within the bound for `step` (None: the next). The sampler chooses
        them.

        Returns None if too few groups are ready, or if a straggler must be waited for. A step that was
        already taken returns the same groups again.

        Raises:
            ValueError: num_groups is not in 1..groups_per_step.
        """
        if not 1 <= num_groups <= self.rules.groups_per_step:
            raise ValueError(
                f"cannot take {num_groups} groups: a batch contains 1 to "
                f"groups_per_step={self.rules.groups_per_step}"
            )
        step = self.groups.step + 1 if step is None else step
        if taken := self.groups.batch(step):
            return taken
        groups = self.groups
        if len(groups.ready) < num_groups or (self.rules.waits_for_stragglers and self._strands()):
            return None
        fresh = [group for group in groups.ready.values() if not self.is_stale(group)]
        still_open = (*groups.queued.values(), *groups.leased.values())
        open_number = min((group.number for group in still_open), default=groups.drawn)
        batch = SAMPLERS[self.rules.sampler](fresh, num_groups, groups.lag, open_number)
        if batch is not None:
            self._commit(*(Event(EventKind.CONSUMED, group.group_id, step=step) for group in batch))
        return batch

    def _strands(self) -> bool:
        """Return whether a batch taken now might strand leased groups: too few batches would remain for them.

        Ready groups need no check: fifo takes the older ones first, and admission limits their number.
        """
        lag, rules = self.groups.lineage.lag, self.rules
        oldest_first = sorted(
            (
                max(lag(play.version) for play in group.plays.values())
                for group in self.groups.leased.values()
            ),
            reverse=True,
        )
        return any(
            place >= (rules.max_staleness - own_lag) * rules.groups_per_step
            for place, own_lag in enumerate(oldest_first)
        )

    def reject(self, step: int, reason: str) -> list[int]:
        """Drop the groups of a batch from which nothing was learned and return their ids; the bound admits
        others.

        Raises:
            ValueError: the update of this batch is published.
        """
        rejected = list(self.groups.batches.get(step, ()))
        if len(rejected) > self.groups.consumed - self.groups.published:
            raise ValueError(f"cannot reject the batch of step {step}: its update is already published")
        self._commit(*(Event(EventKind.DROPPED, group_id, reason=reason) for group_id in rejected))
        return rejected

    def advance(self, version: int, step: int | None = None) -> None:
        """Record that `version` was published. It learned from every batch up to `step` (None: the last one
        taken).

        Raises:
            ValueError: `version` is not newer than the last one.
        """
        if version <= self.groups.version:
            raise ValueError(
                f"version {version} was published after version {self.groups.version}: versions must increase"
            )
        self._commit(
            Event(EventKind.PUBLISHED, version=version, step=self.groups.step if step is None else step)
        )

    def settle(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete: no batch up to `step` will be undone."""
        if step > self.groups.settled:
            self._commit(Event(EventKind.SETTLED, step=step))

    def roll_back(
        self, step: int, *, is_kept: Callable[[ReadyGroup], bool] = lambda group: True
    ) -> list[int]:
        """Undo all batches after `step`. The weights of `step` are restored and published next.

        An undone group becomes ready again if it is within the bound and `is_kept` returns True (its
        trajectories still exist). Otherwise its trajectories are discarded, its task is queued again, and its
        id is returned.

        Raises:
            CheckpointError: batches after `step` are already settled.
        """
        if step < self.groups.settled:
            raise CheckpointError(
                f"batches up to step {self.groups.settled} are settled and cannot be undone; requested: step "
                f"{step}"
            )
        probe = self.groups.lineage.copy()
        probe.roll_back(step)
        events = [Event(EventKind.ROLLED_BACK, step=step)]
        for undone in sorted(s for s in self.groups.batches if s > step):
            for group in self.groups.batches[undone].values():
                is_fresh = all(probe.lag(version) <= self.rules.max_staleness for version in group.versions)
                kind = EventKind.RETURNED if is_fresh and is_kept(group) else EventKind.REQUEUED
                events.append(Event(kind, group.group_id, step=undone, reason=ROLLED_BACK))
        self._commit(*events)
        return [event.group_id for event in events if event.kind is EventKind.REQUEUED]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the ledger's state with `state`. Its weights are restored and published next.

        The owners of its leases are gone, so their groups are queued.

        Raises:
            CheckpointError: the state's format or curriculum differs from this run's.
        """
        check_format(state)
        self._commit(Event(EventKind.IMPORTED, reason=json.dumps(state)))

    def _commit(self, *events: Event) -> None:
        # Record first: if `_record` raises, no event has taken effect and the caller can retry.
        if events:
            self._record(events)
        for event in events:
            self.groups.apply(event)
