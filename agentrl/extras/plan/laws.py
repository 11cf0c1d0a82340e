"""The laws of the ledger, checked on what a simulated run does, by a model that shares no code with it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence

from agentrl.buffer.audit import audit
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.ledger import STALE, LedgerRules
from agentrl.buffer.states import OUTRUN
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.extras.plan.players import place_of
from agentrl.types import NO_VERSION

LEAK_S = 300.0
"""A lease that nobody plays for this long is leaked. Longer than any fault of a hunt."""


class Violation(Exception):
    """A law does not hold. law: its name."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law


class VersionTree:
    """Published versions as a tree, walked edge by edge."""

    def __init__(self) -> None:
        self._parents: dict[int, tuple[int, int]] = {}  # version -> (parent, length of the edge)
        self._by_step: dict[int, int] = {}
        self._restored: int | None = None
        self.current = NO_VERSION

    def publish(self, version: int, step: int) -> None:
        if self._restored is not None:
            self._parents[version] = (self._restored, 0)
        elif self.current != NO_VERSION:
            self._parents[version] = (self.current, version - self.current)
        self._restored = None
        self.current = self._by_step[step] = version

    def roll_back(self, step: int) -> None:
        """The weights after `step` are published next."""
        self._restored = self._by_step[step]
        self._by_step = {own: version for own, version in self._by_step.items() if own <= step}

    def lag(self, version: int) -> int:
        there, here = self._way(version), self._way(self.current)
        return min(there[common] + here[common] for common in there.keys() & here.keys())

    def _way(self, version: int) -> dict[int, int]:
        """Return the ancestors of a version with their distances."""
        way, length = {version: 0}, 0
        while version in self._parents:
            version, edge = self._parents[version]
            length += edge
            way[version] = length
        return way


class Laws:
    """Follows a run by its events and its batches.

    bound         consumed + leased <= (S + k + 1) * B, with k batches taken and published
    balance       every group drawn is queued, leased, ready, consumed or dropped
    staleness     no token of a batch lags by more than S
    once          no group is trained on twice in one lineage of weights
    waste         no group is dropped as stale, if the oldest lease is taken first and waited for
    content       a batch has B groups, and each trajectory is what was played as that member
    dead          no dead owner holds a lease
    leak          every lease is played by its owner
    """

    def __init__(self, rules: LedgerRules) -> None:
        self._rules = rules
        self._tree = VersionTree()
        self._batches: dict[int, set[int]] = {}
        self._published = 0
        self._plays: dict[tuple[int, str], tuple[set[int], set[int]]] = {}  # members added and left out
        self._complete: dict[int, set[int]] = {}  # members of groups that are ready or consumed
        self._idle_since: dict[tuple[str, int], float] = {}
        self._drops_none = rules.waits_for_stragglers and rules.sampler == "fifo"
        self.events: list[Event] = []

    # ------------------------------------------------------------------------------------------- what happens

    def wrote(self, events: Sequence[Event]) -> None:
        """Follow events that the ledger wrote to its journal."""
        self.events.extend(events)
        for event in events:
            self._follow(event)

    def _follow(self, event: Event) -> None:
        match event.kind:
            case EventKind.CONSUMED:
                if any(event.group_id in batch for batch in self._batches.values()):
                    raise Violation("once", f"group {event.group_id} is taken again for step {event.step}")
                self._batches.setdefault(event.step, set()).add(event.group_id)
            case EventKind.RETURNED | EventKind.REQUEUED:
                self._batches[event.step].discard(event.group_id)
            case EventKind.DROPPED:
                if event.reason == STALE and self._drops_none:
                    raise Violation("waste", f"group {event.group_id} is dropped as stale, not waited for")
                for batch in self._batches.values():
                    batch.discard(event.group_id)
            case EventKind.LEASED:
                self._plays[event.group_id, event.owner] = (set(), set())
            case EventKind.ADDED | EventKind.LEFT_OUT:
                self._arrive(event)
            case EventKind.IMPORTED:
                self._restore(json.loads(event.reason)["step"])
            case EventKind.PUBLISHED:
                self._tree.publish(event.version, event.step)
                self._published = self._consumed
            case EventKind.ROLLED_BACK:
                self._drops_none = False  # weights of an abandoned branch are farther than their number
                self._tree.roll_back(event.step)
            case _:
                return

    def _arrive(self, event: Event) -> None:
        added, left_out = self._plays[event.group_id, event.owner]
        (added if event.kind is EventKind.ADDED else left_out).add(event.member)
        if len(added) + len(left_out) == self._rules.group_size:
            self._complete[event.group_id] = added

    def _restore(self, step: int) -> None:
        """Follow a checkpoint that was imported: what came after it never happened."""
        self._batches = {own: batch for own, batch in self._batches.items() if own <= step}
        self._drops_none = False
        self._tree.roll_back(step)
        self._published = self._consumed
        self._plays.clear()

    @property
    def _consumed(self) -> int:
        return sum(map(len, self._batches.values()))

    def after_call(self, buffer: ReplayBuffer) -> None:
        """Check what must hold after each call of the buffer."""
        counts, rules = buffer.counts(), self._rules
        if not counts.is_balanced:
            raise Violation("balance", str(counts))
        if counts.consumed != self._consumed:
            raise Violation("balance", f"{counts.consumed} groups count as consumed, {self._consumed} are")
        published = min(self._published, self._consumed)
        bound = published + math.ceil(rules.oversample * (rules.max_staleness + 1) * rules.groups_per_step)
        bound = bound if rules.total_groups is None else min(bound, rules.total_groups)
        ahead = counts.consumed + counts.leased
        if ahead > bound:
            raise Violation("bound", f"{ahead} groups are leased or consumed, and the bound is {bound}")

    def took(self, step: int, batch: Sequence[AttemptFacts]) -> None:
        """Check a batch that the learner received."""
        groups: dict[int, set[int]] = {}
        for attempt in batch:
            groups.setdefault(attempt.group_id, set()).add(attempt.member)
            place = (attempt.group_id, attempt.member)
            if place_of(attempt) != place:
                raise Violation("content", f"{place} has the content of {place_of(attempt)}")
            for version, _ in attempt.versions:
                if (lag := self._tree.lag(version)) > self._rules.max_staleness:
                    raise Violation("staleness", f"step {step} has a token of {place} with lag {lag}")
        if groups.keys() != self._batches.get(step, set()):
            raise Violation("content", f"step {step} got {sorted(groups)}, not {self._batches.get(step)}")
        if len(groups) != self._rules.groups_per_step:
            raise Violation("content", f"step {step} has {len(groups)} groups")
        for group_id, members in groups.items():
            if members != self._complete[group_id]:
                raise Violation(
                    "content", f"group {group_id} has members {members}, not all that were played"
                )
        if len(batch) != sum(map(len, groups.values())):
            raise Violation("content", f"step {step} has a member twice")

    def watch_leases(
        self, buffer: ReplayBuffer, playing: Callable[[str], Sequence[int] | None], now: float
    ) -> None:
        """Check that each lease is played. `playing`: the groups of a live owner; None: it is dead."""
        idle: dict[tuple[str, int], float] = {}
        for lease in buffer.leases():
            own = playing(lease.owner)
            if own is None or lease.group_id not in own:
                key = (lease.owner, lease.group_id)
                idle[key] = self._idle_since.get(key, now)
                if now - idle[key] > LEAK_S:
                    who = "a dead owner" if own is None else "an owner that does not play it"
                    raise Violation("leak", f"group {lease.group_id} is leased to {who}, {lease.owner}")
        self._idle_since = idle

    def released(self, buffer: ReplayBuffer, owner: str) -> None:
        """Check that a dead owner, which was released, holds nothing."""
        if held := [lease.group_id for lease in buffer.leases() if lease.owner == owner]:
            raise Violation("dead", f"{owner} is released and holds groups {held}")

    def begin_journal(self) -> None:
        """The run continues in another folder, where no event is written yet."""
        self.events = []

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self, buffer: ReplayBuffer, total_steps: int) -> None:
        """Check the end of a run: everything was learned once, and the audit of its events agrees."""
        counts = buffer.counts()
        if sorted(step for step, batch in self._batches.items() if batch) != [*range(1, total_steps + 1)]:
            raise Violation("once", f"of {total_steps} steps, these have batches: {sorted(self._batches)}")
        if counts.leased:
            raise Violation("leak", f"{counts.leased} groups are leased after the last step")
        found = audit(enumerate(self.events), max_staleness=self._rules.max_staleness)
        if not found.is_balanced:
            raise Violation("audit", found.problems[0])
        groups = found.counts()
        own = (counts.queued, counts.leased + counts.ready, counts.consumed, sum(counts.dropped.values()))
        theirs = (groups["queued"], groups["leased"] + groups["ready"], groups["consumed"], groups["dropped"])
        if own != theirs:
            raise Violation("audit", f"the buffer counts {own}, its events say {theirs}")
        discarded = {reason: count for reason, count in counts.discarded.items() if reason != OUTRUN}
        if {
            reason: count for reason, count in found.discarded.items() if count and reason != OUTRUN
        } != discarded:
            raise Violation("audit", f"{discarded} attempts were discarded, events say {found.discarded}")
        # The audit learns of unfinished copies when their group is taken or dropped.
        if found.discarded[OUTRUN] > counts.discarded.get(OUTRUN, 0):
            raise Violation("audit", f"events say {found.discarded[OUTRUN]} attempts were outrun")

    @property
    def fingerprint(self) -> str:
        """A hash of all events, in order."""
        text = "\n".join(map(repr, self.events))
        return hashlib.sha256(text.encode()).hexdigest()[:12]
