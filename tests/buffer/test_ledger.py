"""The ledger against a model of it, under any order of leases, arrivals, deaths, takes, publishes and
restarts.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.buffer.audit import Audit, EndedGroup, audit
from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.ledger import Ledger, LedgerRules
from agentrl.buffer.snapshots import take_snapshot
from agentrl.config.curriculum import CurriculumConfig
from agentrl.errors import CheckpointError, JournalError
from agentrl.types import NO_VERSION

OWNERS = ("a", "b", "c")
OVERTAKEN = [
    *3 * [("lease", 0)],
    *[("arrive", -1), ("learn", 0), ("lease", 0), ("arrive", -1), ("learn", 0)],
    *[("arrive", 0), ("learn", 0), ("arrive", 0), ("learn", 0)],
]
"""Moves in which two old groups are overtaken by younger ones, and finish together."""
WEIGHED = CurriculumConfig(source_weights={"even": 2, "odd": 1}, by_pass_rate=True)


class Tree:
    """Published versions as a tree, walked edge by edge: what `Lineage` says in numbers."""

    def __init__(self) -> None:
        self.parents: dict[int, tuple[int, int]] = {}  # version -> (parent, length of the edge)

    def way(self, version: int) -> dict[int, int]:
        """Ancestor -> distance."""
        way, length = {version: 0}, 0
        while version in self.parents:
            version, edge = self.parents[version]
            length += edge
            way[version] = length
        return way

    def lag(self, version: int, current: int) -> int:
        there, here = self.way(version), self.way(current)
        return min(there[common] + here[common] for common in there.keys() & here.keys())


def fits(rules: LedgerRules, lags: Sequence[int]) -> bool:
    """Return whether groups with these lags all fit into the batches after the next: tries every way."""
    later = range(1, rules.max_staleness + 1)

    @functools.cache
    def place(index: int, room: tuple[int, ...]) -> bool:
        if index == len(lags):
            return True
        return any(
            room[batch - 1] > 0 and place(index + 1, (*room[: batch - 1], room[batch - 1] - 1, *room[batch:]))
            for batch in later
            if lags[index] + batch <= rules.max_staleness
        )

    return place(0, (rules.groups_per_step,) * rules.max_staleness)


class LedgerMachine(RuleBasedStateMachine):
    """Plays many owners and one learner.

    `held` and `arrived` are the model: what each owner has, what has come of it.
    """

    @initialize(
        per_step=st.integers(1, 3),
        staleness=st.integers(0, 2),
        size=st.integers(1, 2),
        total=st.none() | st.integers(1, 12),
        waits=st.booleans(),
        has_curriculum=st.booleans(),
    )
    def start(
        self, per_step: int, staleness: int, size: int, total: int | None, waits: bool, has_curriculum: bool
    ) -> None:
        self.rules = LedgerRules(per_step, staleness, size, total, waits_for_stragglers=waits)
        self.has_curriculum = has_curriculum
        self.journal: list[Event] = []
        self.history: list[Event] = []  # what the journal would hold without snapshots
        self.audit = Audit()
        self.archived: list[EndedGroup] = []
        self.is_disk_full = False
        self.ledger = self.empty()
        self.tree = Tree()
        self.version = 0
        self.ledger.advance(0)
        self.published = {0: 0}  # step -> version
        self.step = 0
        self.settled = 0
        self.owners = list(OWNERS)
        self.held: dict[int, dict[str, int]] = {}  # group -> owner -> version at the lease
        self.arrived: dict[tuple[int, str], dict[int, int]] = {}  # (group, owner) -> member -> version
        self.left_out: dict[tuple[int, str], set[int]] = {}
        self.complete: dict[int, set[int]] = {}  # ready or consumed group -> its versions
        self.drawn: set[int] = set()
        self.is_learning = False
        self.batches: dict[int, list[int]] = {}
        self.dropped: set[int] = set()
        self.refused = 0

    def record(self, events) -> None:
        if self.is_disk_full:
            raise JournalError("full")
        self.journal.extend(events)
        self.history.extend(events)
        for event in events:
            self.audit.follow(len(self.history), event, max_staleness=self.rules.max_staleness)

    def empty(self) -> Ledger:
        chosen = (
            Curriculum(["even", "odd"] * 2, WEIGHED, seed=1, shuffle=True) if self.has_curriculum else None
        )
        return Ledger(self.rules, curriculum=chosen, record=self.record)

    def older(self, age: int) -> int:
        """The version published `age` publishes ago."""
        published = [0, *sorted(self.tree.parents)]
        return published[max(0, len(published) - 1 - age)]

    def lag(self, version: int) -> int:
        return 0 if version == NO_VERSION else self.tree.lag(version, self.version)

    def finish_if_complete(self, group_id: int, owner: str) -> bool:
        key = (group_id, owner)
        if len(self.arrived[key]) + len(self.left_out[key]) < self.rules.group_size:
            return False
        self.complete[group_id] = set(self.arrived[key].values()) - {NO_VERSION}
        for other in self.held.pop(group_id):
            if other != owner:
                self.refused += len(self.arrived[group_id, other])
        return True

    def give_up(self, group_id: int, owner: str) -> None:
        self.refused += len(self.arrived.pop((group_id, owner)))
        del self.held[group_id][owner]
        if not self.held[group_id]:
            del self.held[group_id]

    # ------------------------------------------------------------------------------------------- rollout side

    @rule(which=st.integers(0, 2))
    def lease(self, which: int) -> None:
        owner = self.owners[which]
        if not self.ledger.can_lease():
            with pytest.raises(ValueError, match="bound on staleness"):
                self.ledger.lease(owner)
            return
        group_id = self.ledger.lease(owner)
        assert group_id not in self.held
        assert group_id not in self.dropped
        assert group_id not in self.complete
        self.drawn.add(group_id)
        self.hold(group_id, owner)

    def hold(self, group_id: int, owner: str) -> None:
        self.held.setdefault(group_id, {})[owner] = self.version
        self.arrived[group_id, owner] = {}
        self.left_out[group_id, owner] = set()

    @rule(which=st.integers(0, 2))
    def lease_copy(self, which: int) -> None:
        """Two may play one group; the first that is complete counts."""
        owner = self.owners[which]
        group_id = self.ledger.lease_copy(owner, older_than=1.0, now=0.0)
        alone = [held for held, owners in self.held.items() if owner not in owners and len(owners) == 1]
        assert (group_id is None) == (not alone)
        if group_id is not None:
            assert group_id in alone
            self.hold(group_id, owner)

    def one_held(self, data: st.DataObject) -> tuple[int, str]:
        return data.draw(
            st.sampled_from(
                sorted((group_id, owner) for group_id, owners in self.held.items() for owner in owners)
            )
        )

    @precondition(lambda self: self.held)
    @rule(data=st.data(), age=st.integers(0, 3))
    def add(self, data: st.DataObject, age: int) -> None:
        group_id, owner = key = self.one_held(data)
        member = data.draw(st.integers(0, self.rules.group_size - 1))
        version = data.draw(st.sampled_from([NO_VERSION, self.older(age)]))
        if member in self.left_out[key]:
            assert self.ledger.add_member(owner, group_id, member, version) == "late"
            self.refused += 1
            return
        if member in self.arrived[key]:
            assert self.ledger.add_member(owner, group_id, member, version) == "duplicate"
            self.refused += 1
            return
        admission = self.ledger.add_member(owner, group_id, member, version)
        self.arrived[key][member] = version
        assert admission == ("ready" if self.finish_if_complete(group_id, owner) else "waiting")

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave_out(self, data: st.DataObject) -> None:
        group_id, owner = key = self.one_held(data)
        member = data.draw(st.integers(0, self.rules.group_size - 1))
        if member in self.left_out[key] or member in self.arrived[key]:
            assert self.ledger.leave_out(owner, group_id, member, "timeout") == "duplicate"
            return
        if len(self.left_out[key]) + 1 == self.rules.group_size:
            with pytest.raises(ValueError, match="all members"):
                self.ledger.leave_out(owner, group_id, member, "timeout")
            return
        admission = self.ledger.leave_out(owner, group_id, member, "timeout")
        self.left_out[key].add(member)
        self.refused += 1
        assert admission == ("ready" if self.finish_if_complete(group_id, owner) else "waiting")

    @precondition(lambda self: self.held)
    @rule(ages=st.lists(st.integers(0, 3), min_size=2, max_size=2), data=st.data())
    def finish(self, ages: list[int], data: st.DataObject) -> None:
        """All members still missing, of ages of their own: the farthest decides."""
        group_id, owner = key = self.one_held(data)
        for member in set(range(self.rules.group_size)) - self.arrived[key].keys() - self.left_out[key]:
            version = self.older(ages[member])
            self.arrived[key][member] = version
            self.ledger.add_member(owner, group_id, member, version, ages[member] / 3)
        assert self.finish_if_complete(group_id, owner)

    @rule(group_id=st.integers(0, 20), which=st.integers(0, 2))
    def add_what_is_not_held(self, group_id: int, which: int) -> None:
        owner = self.owners[which]
        if owner not in self.held.get(group_id, {}):
            assert self.ledger.add_member(owner, group_id, 0, self.version) == "late"
            assert not self.ledger.drop(owner, group_id, "any")
            self.refused += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group_id, owner = self.one_held(data)
        assert self.ledger.drop(owner, group_id, "tool_error")
        if len(self.held[group_id]) > 1:
            self.give_up(group_id, owner)
        else:
            del self.held[group_id]
            self.dropped.add(group_id)

    @rule(which=st.integers(0, 2))
    def owner_dies(self, which: int) -> None:
        self.end_owner(which)

    def end_owner(self, which: int) -> None:
        owner = self.owners[which]
        lost = [group_id for group_id, owners in self.held.items() if owner in owners]
        assert sorted(self.ledger.release(owner)) == sorted(lost)
        assert owner in self.ledger.groups.released
        for group_id in lost:
            self.give_up(group_id, owner)
        self.owners[which] = owner + "'"

    @rule()
    def leases_expire(self) -> None:
        assert self.ledger.expire(now=0.0, timeout_s=1.0) == []
        late = self.ledger.expire(now=1.0, timeout_s=0.0)
        assert sorted(late) == sorted(
            (owner, group_id) for group_id, owners in self.held.items() for owner in owners
        )
        for owner, group_id in late:
            self.give_up(group_id, owner)

    # ------------------------------------------------------------------------------------------- learner side

    def drop_stale(self) -> None:
        for group_id in self.ledger.drop_stale():
            assert any(self.lag(version) > self.rules.max_staleness for version in self.complete[group_id])
            self.dropped.add(group_id)
            del self.complete[group_id]

    @precondition(lambda self: not self.is_learning)
    @rule()
    def take(self) -> None:
        self.drop_stale()
        step = self.step + 1
        batch = self.ledger.take(self.rules.groups_per_step, step)
        lags = [max(map(self.lag, owners.values())) for owners in self.held.values()]
        is_held_up = self.rules.waits_for_stragglers and not fits(self.rules, lags)
        if batch is None:
            assert is_held_up or len(self.ledger.groups.ready) < self.rules.groups_per_step
            return
        assert not is_held_up
        assert [group.order for group in batch] == sorted(group.order for group in batch)
        assert self.ledger.take(self.rules.groups_per_step, step) == batch, (
            "an answer that was lost is given again"
        )
        taken = [group_id for own in self.batches.values() for group_id in own]
        for group in batch:
            assert group.group_id not in taken, "taken before, and not undone"
            assert group.group_id not in self.dropped
            assert set(group.versions) == self.complete[group.group_id]
            assert all(self.lag(version) <= self.rules.max_staleness for version in group.versions)
        self.batches[step] = [group.group_id for group in batch]
        self.step = step
        self.is_learning = True

    @precondition(lambda self: self.is_learning)
    @rule(by=st.integers(1, 2))
    def publish(self, by: int) -> None:
        self.tree.parents[self.version + by] = (self.version, by)
        self.version += by
        self.ledger.advance(self.version)
        self.published[self.step] = self.version
        self.is_learning = False

    @precondition(lambda self: self.is_learning)
    @rule()
    def reject(self) -> None:
        """The batch cannot be learned from: as if its groups had been dropped, and others may be leased in
        their place.
        """
        assert sorted(self.ledger.reject(self.step, "reward_error")) == sorted(self.batches[self.step])
        assert self.ledger.reject(self.step, "reward_error") == [], "to say it again changes nothing"
        for group_id in self.batches.pop(self.step):
            self.dropped.add(group_id)
            del self.complete[group_id]
        self.step -= 1
        self.is_learning = False

    @precondition(lambda self: len(self.ledger.groups.ready))
    @rule(which=st.integers(0, 5))
    def drop_ready(self, which: int) -> None:
        """A complete group without variance."""
        ready = sorted(group.group_id for group in self.ledger.groups.ready.values())
        group_id = ready[which % len(ready)]
        self.ledger.drop_ready(group_id, "no_variance")
        self.dropped.add(group_id)
        del self.complete[group_id]

    @precondition(lambda self: not self.is_learning)
    @rule()
    def checkpoint(self) -> None:
        self.ledger.settle(self.step)
        self.settled = max(self.settled, self.step)

    def seen(self) -> tuple[object, ...]:
        """Everything that others can see of the groups."""
        groups = self.ledger.groups
        return groups.state(), groups.counts(), {owner: groups.held_by(owner) for owner in self.owners}

    # ---------------------------------------------------------------------------------------- what goes wrong

    @rule()
    def the_buffer_is_killed(self) -> None:
        """It reads its journal, and is as it was: who plays goes on, and nothing is lost."""
        before = self.seen(), self.ledger.groups.snapshot()
        self.ledger = self.empty()
        self.ledger.replay(self.journal, now=0.0)
        assert (self.seen(), self.ledger.groups.snapshot()) == before

    @rule()
    def a_snapshot_replaces_the_events(self) -> None:
        """A buffer that begins with it is the one that took it, and it knows of every group that ended."""
        before = self.seen(), self.ledger.groups.snapshot()
        snapshot = take_snapshot(self.ledger.groups, self.audit)
        assert snapshot is not None
        self.journal = [snapshot.event]
        self.archived += snapshot.ended
        self.audit = snapshot.audit
        self.ledger = self.empty()
        self.ledger.replay(self.journal, now=0.0)
        assert (self.seen(), self.ledger.groups.snapshot()) == before
        ended = {
            group_id for step, batch in self.batches.items() if step <= self.settled for group_id in batch
        }
        assert self.audit.groups.keys().isdisjoint(ended | self.dropped)
        assert len(self.audit.groups) <= len(self.drawn), "what ended is kept as totals"

    @rule(back=st.integers(0, 3), driver_dies=st.booleans(), keeps=st.booleans(), by=st.integers(1, 3))
    def the_weights_are_restored(self, back: int, driver_dies: bool, keeps: bool, by: int) -> None:
        """Learned again is what was learned since, where it is near enough; the rest is played again; nothing
        is lost.
        """
        step = max(self.settled, self.step - self.is_learning - back)
        if self.settled > 0:
            with pytest.raises(CheckpointError, match="settled"):
                self.ledger.roll_back(self.settled - 1)
        if driver_dies:
            for which in range(len(self.owners)):
                self.end_owner(which)
        restored = self.published[step]
        requeued = self.ledger.roll_back(step, is_kept=lambda group: keeps)
        self.version += by
        self.tree.parents[self.version] = (restored, 0)
        self.ledger.advance(self.version)
        self.published = {s: v for s, v in self.published.items() if s < step} | {step: self.version}
        undone = [group_id for own, batch in self.batches.items() if own > step for group_id in batch]
        near = {
            g
            for g in undone
            if all(self.lag(version) <= self.rules.max_staleness for version in self.complete[g])
        }
        assert sorted(requeued) == sorted(set(undone) - (near if keeps else set()))
        for group_id in requeued:
            del self.complete[group_id]
        # Members of what is played again are refused, too; the audit counts them one by one.
        self.refused = sum(self.ledger.groups.counts().discarded.values())
        self.batches = {own: batch for own, batch in self.batches.items() if own <= step}
        self.step = step
        self.is_learning = False

    @rule()
    def the_disk_is_full(self) -> None:
        """What cannot be written did not happen."""
        before = self.seen()
        self.is_disk_full = True
        with pytest.raises(JournalError):
            self.ledger.release("somebody")
        with pytest.raises(JournalError):
            self.ledger.advance(self.version + 1)
        if self.ledger.can_lease() and not self.has_curriculum:
            with pytest.raises(JournalError):
                self.ledger.lease("a")
        self.is_disk_full = False
        assert self.seen() == before

    @precondition(lambda self: not self.is_learning)
    @rule()
    def a_checkpoint_goes_elsewhere(self) -> None:
        """Another folder has no journal: leases and their members are lost there, and all else is as it
        was.
        """
        state = json.loads(json.dumps(self.ledger.groups.state()))
        before = self.ledger.groups.counts()
        self.journal, self.history = [], []
        self.audit, self.archived = Audit(), []
        self.ledger = self.empty()
        self.ledger.restore(state)
        self.version += 1
        self.tree.parents[self.version] = (self.version - 1, 0)
        self.ledger.advance(self.version)
        after = self.ledger.groups.counts()
        assert (after.leased, after.queued, after.ready) == (0, before.queued + before.leased, before.ready)
        self.refused += sum(
            len(self.arrived[group_id, owner]) for group_id, owners in self.held.items() for owner in owners
        )
        self.held = {}
        self.owners = [owner + "'" for owner in self.owners]
        self.settled = self.step
        self.published[self.step] = self.version

    def teardown(self) -> None:
        """The audit, which knows the events alone, comes to the same counts."""
        if not hasattr(self, "journal"):
            return
        found, counts = (
            audit(enumerate(self.journal), max_staleness=self.rules.max_staleness),
            self.ledger.groups.counts(),
        )
        assert found.is_balanced, found.problems
        groups = found.counts()
        assert (groups["queued"], groups["consumed"], groups["dropped"]) == (
            counts.queued,
            counts.consumed,
            sum(counts.dropped.values()),
        )
        assert groups["leased"] + groups["ready"] == counts.leased + counts.ready
        discarded = found.discarded + self.outrun_so_far(found)
        assert {reason: count for reason, count in discarded.items() if count} == counts.discarded
        kinds = Counter(event.kind for event in self.history)
        assert (found.num_events, found.num_rollbacks) == (len(self.history), kinds[EventKind.ROLLED_BACK])
        assert (
            found.num_taken,
            found.ended.num_leases + sum(life.num_leases for life in found.groups.values()),
        ) == (kinds[EventKind.CONSUMED], kinds[EventKind.LEASED])
        back = (EventKind.QUEUED, EventKind.REQUEUED, EventKind.RETURNED)
        assert found.came_back() == Counter(event.reason for event in self.history if event.kind in back)
        if not kinds[EventKind.IMPORTED]:
            assert found.dropped() == counts.dropped
            batches = found.batches()
            for group_id, step, dropped_for in self.archived:
                assert dropped_for or step <= self.settled
                if not dropped_for:
                    batches.setdefault(step, set()).add(group_id)
            assert batches == {step: set(batch) for step, batch in self.batches.items()}
            gone = {group_id for group_id, _, dropped_for in self.archived if dropped_for}
            assert gone <= self.dropped
            assert len(self.archived) == found.ended.num_groups
            assert found.step == self.step

    def outrun_so_far(self, found: Audit) -> Counter[str]:
        """Count the members of unfinished copies of groups that are ready: no event says that a group became
        ready, so that the audit counts them when the group is taken or dropped.
        """
        ready = [found.groups[group_id] for group_id in self.ledger.groups.ready]
        copies = [
            members for life in ready for who, members in life.players.items() if who != life.last_owner
        ]
        return Counter(outrun=sum(map(len, copies)))

    # --------------------------------------------------------------------------------------------- invariants

    @invariant()
    def counts_balance(self) -> None:
        counts = self.ledger.groups.counts()
        assert counts.is_balanced
        assert counts.drawn == len(self.drawn)
        assert counts.leased == len(self.held)
        assert counts.consumed == sum(map(len, self.batches.values()))
        assert counts.ready + counts.consumed == len(self.complete)
        assert sum(counts.discarded.values()) == self.refused
        assert sum(counts.dropped.values()) == len(self.dropped)

    @invariant()
    def admission_is_bounded(self) -> None:
        counts = self.ledger.groups.counts()
        per_step, staleness, total = (
            self.rules.groups_per_step,
            self.rules.max_staleness,
            self.rules.total_groups,
        )
        published = len(self.batches) - self.is_learning
        ahead = counts.consumed + counts.leased
        assert ahead <= (staleness + published + 1) * per_step
        assert total is None or ahead <= total
        if staleness == 0 and self.is_learning:
            assert not self.ledger.can_lease(), "S = 0: nothing is leased between a take and its publish"

    @invariant()
    def it_never_locks_up(self) -> None:
        """With nothing leased and nothing learning, either a batch is there, or a lease is possible, or the
        run is over.
        """
        total = self.rules.total_groups
        counts = self.ledger.groups.counts()
        is_over = total is not None and total - counts.consumed < self.rules.groups_per_step
        if not self.held and not self.is_learning and not is_over:
            lags = [self.ledger.groups.lag(group) for group in self.ledger.groups.ready.values()]
            fresh = sum(lag <= self.rules.max_staleness for lag in lags)
            assert fresh >= self.rules.groups_per_step or fresh < len(lags) or self.ledger.can_lease()


def test_a_snapshot_is_taken_right_after_a_batch_was_rejected():
    """The step of a batch that was rejected as a whole counts as not taken, for the audit too."""
    groups = 2
    rules = LedgerRules(groups, 0, 1, None)
    found, journal = Audit(), []

    def record(events):
        for event in events:
            journal.append(event)
            found.follow(len(journal), event, max_staleness=0)

    ledger = Ledger(rules, record=record)
    ledger.advance(0)
    for _ in range(groups):
        group_id = ledger.lease("a", 0.0)
        ledger.add_member("a", group_id, 0, 0)
    assert ledger.take(groups, 1) is not None
    assert len(ledger.reject(1, "reward_error")) == groups
    assert take_snapshot(ledger.groups, found) is not None


def test_the_audit_counts_an_outrun_copy_when_its_group_is_taken():
    """The ledger counts it when the group becomes ready, of which no event tells."""
    found, journal = Audit(), []

    def record(events):
        for event in events:
            journal.append(event)
            found.follow(len(journal), event, max_staleness=0)

    ledger = Ledger(LedgerRules(1, 0, 2, None), record=record)
    ledger.advance(0)
    group_id = ledger.lease("a", 0.0)
    assert ledger.lease_copy("b", older_than=1.0, now=0.0) == group_id
    ledger.add_member("a", group_id, 0, 0)
    ledger.add_member("b", group_id, 0, 0)
    assert ledger.add_member("b", group_id, 1, 0) == "ready"
    assert (ledger.groups.counts().discarded, found.discarded.total()) == ({"outrun": 1}, 0)
    assert take_snapshot(ledger.groups, found) is None
    assert ledger.take(1, 1) is not None
    assert found.discarded == Counter(outrun=1)
    assert take_snapshot(ledger.groups, found) is not None


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


def ready(ledger: Ledger, owner: str = "a", *, version: int) -> int:
    group_id = ledger.lease(owner)
    assert ledger.add_member(owner, group_id, 0, version) == "ready"
    return group_id


def test_without_staleness_leases_and_learning_alternate():
    ledger = Ledger(LedgerRules(groups_per_step=2, max_staleness=0, group_size=1))
    ledger.advance(0)
    for step in range(3):
        assert [ready(ledger, version=step) for _ in range(2)] == [2 * step, 2 * step + 1]
        assert not ledger.can_lease()
        assert ledger.take(2) is not None
        assert not ledger.can_lease()
        ledger.advance(step + 1)


def test_batches_that_name_no_step_are_of_the_next_one():
    ledger = Ledger(LedgerRules(groups_per_step=1, max_staleness=4, group_size=1))
    ledger.advance(0)
    groups = [ready(ledger, version=0) for _ in range(4)]
    for step in (1, 2):
        batch = ledger.take(1)
        assert batch is not None
        assert ledger.groups.batch(step) == batch
        assert [group.group_id for group in batch] == [groups[step - 1]]
    ledger.take(1, 7)
    ledger.take(1)
    assert [[group.group_id for group in ledger.groups.batch(step) or ()] for step in (0, 7, 8)] == [
        [],
        [groups[2]],
        [groups[3]],
    ]


def test_with_staleness_one_a_second_batch_is_played_while_the_first_is_learned():
    ledger = Ledger(LedgerRules(groups_per_step=2, max_staleness=1, group_size=1))
    ledger.advance(0)
    for _ in range(4):
        ready(ledger, version=0)
    assert not ledger.can_lease()
    ledger.take(2)
    assert not ledger.can_lease()
    ledger.advance(1)
    batch = ledger.take(2)
    assert batch is not None
    assert [ledger.groups.lag(group) for group in batch] == [1, 1]


def test_a_straggler_that_became_too_old_is_dropped_and_its_place_is_leased_again():
    ledger = Ledger(LedgerRules(groups_per_step=1, max_staleness=0, group_size=1, total_groups=2))
    ledger.advance(0)
    ready(ledger, version=0)
    ledger.take(1)
    ledger.advance(1)
    ready(ledger, version=0)
    assert not ledger.can_lease()
    assert ledger.take(1) is None
    assert ledger.drop_stale() == [1]
    assert ledger.can_lease()
    assert ledger.groups.counts().dropped == {"stale": 1}


def test_the_oldest_token_of_all_members_decides():
    ledger = Ledger(LedgerRules(groups_per_step=1, max_staleness=1, group_size=2))
    ledger.advance(2)
    group_id = ledger.lease("a")
    ledger.add_member("a", group_id, 0, 2)
    ledger.add_member("a", group_id, 1, 0)
    assert ledger.take(1) is None
    assert ledger.drop_stale() == [group_id]


def test_a_group_without_any_sampled_token_is_never_stale():
    ledger = Ledger(LedgerRules(groups_per_step=1, max_staleness=0, group_size=1))
    ledger.advance(0)
    ready(ledger, version=NO_VERSION)
    ledger.advance(99)
    assert ledger.drop_stale() == []
    assert ledger.take(1) is not None


def test_the_oldest_lease_is_taken_first_not_the_first_to_finish():
    ledger = Ledger(LedgerRules(groups_per_step=2, max_staleness=1, group_size=1))
    ledger.advance(0)
    first, second, third = (ledger.lease("a") for _ in range(3))
    for group_id in (third, second, first):
        ledger.add_member("a", group_id, 0, 0)
    batch = ledger.take(2)
    assert batch is not None
    assert [group.group_id for group in batch] == [first, second]


def test_a_group_leased_again_queues_behind_those_leased_meanwhile():
    ledger = Ledger(LedgerRules(groups_per_step=2, max_staleness=0, group_size=1))
    ledger.advance(0)
    ledger.lease("a")
    ready(ledger, "b", version=0)
    ledger.release("a")
    assert ready(ledger, "b", version=0) == 0
    batch = ledger.take(2)
    assert batch is not None
    assert [group.group_id for group in batch] == [1, 0]


def test_a_queued_group_goes_to_the_next_owner_before_any_further_one_is_drawn():
    ledger = Ledger(LedgerRules(groups_per_step=4, max_staleness=0, group_size=2))
    ledger.advance(0)
    assert [ledger.lease("a"), ledger.lease("b"), ledger.lease("a")] == [0, 1, 2]
    ledger.add_member("a", 0, 1, 0)
    assert ledger.release("a") == [0, 2]
    assert [ledger.lease("b"), ledger.lease("b"), ledger.lease("b")] == [0, 2, 3]
    assert ledger.add_member("a", 0, 0, 0) == "late"
    assert ledger.groups.counts().discarded == {"owner_lost": 1, "late": 1}


def test_a_resumed_run_may_change_its_batch_size():
    ledger = Ledger(LedgerRules(groups_per_step=4, max_staleness=0, group_size=1))
    ledger.advance(0)
    for _ in range(4):
        ready(ledger, version=0)
    ledger.take(4)
    smaller = Ledger(LedgerRules(groups_per_step=2, max_staleness=0, group_size=1))
    ledger.advance(1)
    smaller.restore(ledger.groups.state())
    smaller.advance(2)
    assert [ready(smaller, version=2) for _ in range(2)] == [4, 5]
    assert not smaller.can_lease()


def test_misuse_is_answered():
    ledger = Ledger(LedgerRules(groups_per_step=2, max_staleness=0, group_size=2))
    ledger.advance(3)
    with pytest.raises(ValueError, match="version 3 was published after version 3"):
        ledger.advance(3)
    with pytest.raises(ValueError, match=r"member 2 is not in 0\.\.1"):
        ledger.add_member("a", ledger.lease("a"), 2, 3)
    with pytest.raises(ValueError, match="group 0 is not ready"):
        ledger.drop_ready(0, "no_variance")
    with pytest.raises(ValueError, match="contains 1 to groups_per_step=2"):
        ledger.take(3)
    with pytest.raises(CheckpointError, match="format 99, expected 2"):
        ledger.restore({"format": 99})


@given(
    per_step=st.integers(1, 3),
    staleness=st.integers(0, 3),
    size=st.integers(1, 2),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["lease", "lease", "lease", "arrive", "arrive", "learn"]),
            st.sampled_from([-1, -1, 0]) | st.integers(0, 1000),  # the youngest overtake the others
        ),
        max_size=200,
    ),
)
@example(1, 2, 1, OVERTAKEN)
def test_what_waits_for_stragglers_drops_none(
    per_step: int, staleness: int, size: int, moves: list[tuple[str, int]]
) -> None:
    """However long a group takes: when its tokens are no older than its lease, it is learned from, within the
    bound. The learner waits only if otherwise a group might be stranded.
    """
    rules = LedgerRules(per_step, staleness, size, waits_for_stragglers=True)
    ledger = Ledger(rules)
    ledger.advance(0)
    version = 0
    leased_at: dict[int, int] = {}  # versions of the groups that are not yet taken
    missing: dict[int, int] = {}  # members of leased groups that have not arrived

    def arrive(number: int) -> None:
        group_id = sorted(missing)[number % len(missing)]
        left, oldest = missing.pop(group_id), leased_at[group_id]
        ledger.add_member("a", group_id, left - 1, oldest + number % (version - oldest + 1))
        if left > 1:
            missing[group_id] = left - 1

    def learn() -> bool:
        nonlocal version
        assert ledger.drop_stale() == []
        ready = sorted(ledger.groups.ready.values(), key=lambda group: group.order)
        left = leased_at.keys() - {group.group_id for group in ready[:per_step]}
        batch = ledger.take(per_step)
        is_safe = fits(rules, [version - leased_at[group_id] for group_id in left])
        assert (batch is not None) == (len(ready) >= per_step and is_safe)
        for group in batch or ():
            assert ledger.groups.lag(group) <= staleness
            del leased_at[group.group_id]
        if batch is not None:
            version += 1
            ledger.advance(version)
        return batch is not None

    for move, number in moves:
        if move == "lease" and ledger.can_lease():
            group_id = ledger.lease("a")
            leased_at[group_id], missing[group_id] = version, size
        elif move == "arrive" and missing:
            arrive(number)
        elif move == "learn":
            learn()
    while missing:
        arrive(0)
    while learn():
        pass
    assert len(ledger.groups.ready) < per_step
    assert ledger.groups.counts().dropped == {}
