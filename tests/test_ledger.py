"""The ledger against a model of it, under any order of leases, arrivals, deaths, takes, publishes and restarts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.ledger import Ledger
from agentrl.config.curriculum import CurriculumConfig
from agentrl.errors import CheckpointError
from agentrl.types import NO_VERSION

OWNERS = ("a", "b", "c")
WEIGHED = CurriculumConfig(source_weights={"even": 2, "odd": 1}, by_pass_rate=True)


class LedgerMachine(RuleBasedStateMachine):
    """Plays many owners and one learner. `held` and `arrived` are the model: what each owner has, what has come of it."""

    @initialize(
        per_step=st.integers(1, 3),
        staleness=st.integers(0, 2),
        size=st.integers(1, 2),
        total=st.none() | st.integers(1, 12),
        waits=st.booleans(),
        has_curriculum=st.booleans(),
    )
    def start(self, per_step: int, staleness: int, size: int, total: int | None, waits: bool, has_curriculum: bool) -> None:
        self.settings = {"groups_per_step": per_step, "max_staleness": staleness, "group_size": size, "total_groups": total}
        self.settings["waits_for_stragglers"] = waits
        self.has_curriculum = has_curriculum
        self.leased_at: dict[int, int] = {}
        self.ledger = self.empty()
        self.version = 0
        self.ledger.advance(0)
        self.owners = list(OWNERS)
        self.held: dict[int, str] = {}
        self.arrived: dict[int, dict[int, int]] = {}  # group -> member -> version
        self.leases: list[int] = []
        self.is_learning = False
        self.taken: list[int] = []
        self.gone: set[int] = set()
        self.batches = 0
        self.refused = 0

    def empty(self) -> Ledger:
        chosen = Curriculum(["even", "odd"] * 2, WEIGHED, seed=1, shuffle=True) if self.has_curriculum else None
        return Ledger(**self.settings, curriculum=chosen)

    # ------------------------------------------------------------------------------------------- rollout side

    @rule(which=st.integers(0, 2))
    def lease(self, which: int) -> None:
        if not self.ledger.can_lease():
            with pytest.raises(ValueError, match="bound on staleness"):
                self.ledger.lease(self.owners[which])
            return
        group_id = self.ledger.lease(self.owners[which])
        assert group_id not in self.held
        assert group_id not in self.gone
        self.held[group_id] = self.owners[which]
        self.arrived[group_id] = {}
        self.leases.append(group_id)
        self.leased_at[group_id] = self.version

    @precondition(lambda self: self.held)
    @rule(data=st.data(), age=st.integers(0, 3))
    def add(self, data: st.DataObject, age: int) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.held)))
        member = data.draw(st.integers(0, self.settings["group_size"] - 1))
        version = data.draw(st.sampled_from([NO_VERSION, max(0, self.version - age)]))
        expected = "duplicate" if member in self.arrived[group_id] else "waiting"
        if expected == "waiting" and len(self.arrived[group_id]) + 1 == self.settings["group_size"]:
            expected = "ready"
        assert self.ledger.add_member(self.held[group_id], group_id, member, version) == expected
        self.refused += expected == "duplicate"
        if expected != "duplicate":
            self.arrived[group_id][member] = version
        if expected == "ready":
            del self.held[group_id]

    @precondition(lambda self: self.held)
    @rule(ages=st.lists(st.integers(0, 3), min_size=2, max_size=2), which=st.integers(0, 5))
    def finish(self, ages: list[int], which: int) -> None:
        """All members still missing, of ages of their own: the oldest decides."""
        group_id = sorted(self.held)[which % len(self.held)]
        for member in set(range(self.settings["group_size"])) - self.arrived[group_id].keys():
            version = max(0, self.version - ages[member])
            self.arrived[group_id][member] = version
            self.ledger.add_member(self.held[group_id], group_id, member, version, ages[member] / 3)
        del self.held[group_id]

    @rule(group_id=st.integers(0, 20), which=st.integers(0, 2))
    def add_what_is_not_held(self, group_id: int, which: int) -> None:
        owner = self.owners[which]
        if self.held.get(group_id) != owner:
            assert self.ledger.add_member(owner, group_id, 0, self.version) == "late"
            assert not self.ledger.drop(owner, group_id, "any")
            self.refused += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.held)))
        assert self.ledger.drop(self.held.pop(group_id), group_id, "tool_error")
        self.gone.add(group_id)

    @rule(which=st.integers(0, 2))
    def owner_dies(self, which: int) -> None:
        owner = self.owners[which]
        lost = [group_id for group_id, holder in self.held.items() if holder == owner]
        assert self.ledger.release(owner) == lost
        for group_id in lost:
            del self.held[group_id]
            self.refused += len(self.arrived.pop(group_id))
        self.owners[which] = owner + "'"

    # ------------------------------------------------------------------------------------------- learner side

    @precondition(lambda self: not self.is_learning)
    @rule()
    def take(self) -> None:
        self.gone |= set(self.ledger.drop_stale())
        batch = self.ledger.take(self.settings["groups_per_step"])
        late = [group_id for group_id in self.held if self.version - self.leased_at[group_id] >= self.settings["max_staleness"]]
        is_held_up = self.settings["waits_for_stragglers"] and bool(late)
        if batch is None:
            assert is_held_up or self.ledger.num_ready < self.settings["groups_per_step"]
            return
        assert not is_held_up
        last_lease = [len(self.leases) - self.leases[::-1].index(group.group_id) for group in batch]
        assert last_lease == sorted(last_lease)
        for group in batch:
            assert group.group_id not in self.gone, "taken or dropped before"
            oldest = [version for version in self.arrived[group.group_id].values() if version != NO_VERSION]
            assert all(self.version - version <= self.settings["max_staleness"] for version in oldest)
            assert len(self.arrived[group.group_id]) == self.settings["group_size"]
            self.taken.append(group.group_id)
            self.gone.add(group.group_id)
        self.batches += 1
        self.is_learning = True

    @precondition(lambda self: self.is_learning)
    @rule(by=st.integers(1, 2))
    def publish(self, by: int) -> None:
        self.version += by
        self.ledger.advance(self.version)
        self.is_learning = False

    @precondition(lambda self: self.is_learning)
    @rule()
    def reject(self) -> None:
        """The batch cannot be learned from: as if its groups had been dropped, and others may be leased in their place."""
        per_step = self.settings["groups_per_step"]
        with pytest.raises(ValueError, match="cannot reject"):
            self.ledger.reject(per_step + 1, "reward_error")
        before = self.ledger.counts()
        self.ledger.reject(per_step, "reward_error")
        assert self.ledger.counts().dropped["reward_error"] == before.dropped.get("reward_error", 0) + per_step
        self.taken = self.taken[:-per_step]
        self.batches -= 1
        self.is_learning = False

    @precondition(lambda self: self.ledger.num_ready)
    @rule(which=st.integers(0, 5))
    def drop_ready(self, which: int) -> None:
        """A complete group without variance."""
        ready = sorted(group["group_id"] for group in self.ledger.state()["ready"])
        group_id = ready[which % len(ready)]
        self.ledger.drop_ready(group_id, "no_variance")
        self.gone.add(group_id)

    @precondition(lambda self: not self.is_learning)
    @rule()
    def crash_and_resume(self) -> None:
        state = json.loads(json.dumps(self.ledger.state()))
        before = self.ledger.counts()
        self.ledger = self.empty()
        self.version += 1
        self.ledger.restore(state, version=self.version)
        after = self.ledger.counts()
        assert (after.leased, after.queued, after.ready) == (0, before.queued + before.leased, before.ready)
        self.refused += sum(len(self.arrived.pop(group_id)) for group_id in self.held)
        self.held = {}
        self.owners = [owner + "'" for owner in self.owners]

    # --------------------------------------------------------------------------------------------- invariants

    @invariant()
    def counts_balance(self) -> None:
        counts = self.ledger.counts()
        assert counts.is_balanced
        assert counts.leased == len(self.held)
        assert counts.consumed == len(self.taken)
        assert sum(counts.discarded.values()) == self.refused
        assert counts.consumed + sum(counts.dropped.values()) == len(self.gone)

    @invariant()
    def no_group_is_taken_twice(self) -> None:
        assert len(self.taken) == len(set(self.taken))

    @invariant()
    def admission_is_bounded(self) -> None:
        counts = self.ledger.counts()
        per_step, staleness, total = (self.settings[name] for name in ("groups_per_step", "max_staleness", "total_groups"))
        published = self.batches - self.is_learning
        ahead = counts.consumed + counts.ready + counts.leased
        assert ahead <= (staleness + published + 1) * per_step
        assert total is None or ahead <= total
        if staleness == 0 and self.is_learning:
            assert not self.ledger.can_lease(), "S = 0: nothing is leased between a take and its publish"

    @invariant()
    def it_never_locks_up(self) -> None:
        """With nothing leased and nothing learning, either a batch is there, or a lease is possible, or the run is over."""
        total = self.settings["total_groups"]
        counts = self.ledger.counts()
        is_over = total is not None and total - counts.consumed < self.settings["groups_per_step"]
        if not self.held and not self.is_learning and not is_over:
            probe = self.empty()
            probe.restore(self.ledger.state(), version=self.version)
            probe.drop_stale()
            assert probe.num_ready >= self.settings["groups_per_step"] or probe.can_lease()


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


def ready(ledger: Ledger, owner: str = "a", *, version: int) -> int:
    group_id = ledger.lease(owner)
    assert ledger.add_member(owner, group_id, 0, version) == "ready"
    return group_id


def test_without_staleness_leases_and_learning_alternate():
    ledger = Ledger(groups_per_step=2, max_staleness=0, group_size=1)
    ledger.advance(0)
    for step in range(3):
        assert [ready(ledger, version=step) for _ in range(2)] == [2 * step, 2 * step + 1]
        assert not ledger.can_lease()
        assert ledger.take(2) is not None
        assert not ledger.can_lease()
        ledger.advance(step + 1)


def test_with_staleness_one_a_second_batch_is_played_while_the_first_is_learned():
    ledger = Ledger(groups_per_step=2, max_staleness=1, group_size=1)
    ledger.advance(0)
    for _ in range(4):
        ready(ledger, version=0)
    assert not ledger.can_lease()
    ledger.take(2)
    assert not ledger.can_lease()
    ledger.advance(1)
    batch = ledger.take(2)
    assert batch is not None
    assert [ledger.lag(group) for group in batch] == [1, 1]


def test_a_straggler_that_became_too_old_is_dropped_and_its_place_is_leased_again():
    ledger = Ledger(groups_per_step=1, max_staleness=0, group_size=1, total_groups=2)
    ledger.advance(0)
    ready(ledger, version=0)
    ledger.take(1)
    ledger.advance(1)
    ready(ledger, version=0)
    assert not ledger.can_lease()
    assert ledger.take(1) is None
    assert ledger.drop_stale() == [1]
    assert ledger.can_lease()
    assert ledger.counts().dropped == {"stale": 1}


def test_the_oldest_token_of_all_members_decides():
    ledger = Ledger(groups_per_step=1, max_staleness=1, group_size=2)
    ledger.advance(2)
    group_id = ledger.lease("a")
    ledger.add_member("a", group_id, 0, 2)
    ledger.add_member("a", group_id, 1, 0)
    assert ledger.take(1) is None
    assert ledger.drop_stale() == [group_id]


def test_a_group_without_any_sampled_token_is_never_stale():
    ledger = Ledger(groups_per_step=1, max_staleness=0, group_size=1)
    ledger.advance(0)
    ready(ledger, version=NO_VERSION)
    ledger.advance(99)
    assert ledger.drop_stale() == []
    assert ledger.take(1) is not None


def test_the_oldest_lease_is_taken_first_not_the_first_to_finish():
    ledger = Ledger(groups_per_step=2, max_staleness=1, group_size=1)
    ledger.advance(0)
    first, second, third = (ledger.lease("a") for _ in range(3))
    for group_id in (third, second, first):
        ledger.add_member("a", group_id, 0, 0)
    batch = ledger.take(2)
    assert batch is not None
    assert [group.group_id for group in batch] == [first, second]


def test_a_group_leased_again_queues_behind_those_leased_meanwhile():
    ledger = Ledger(groups_per_step=2, max_staleness=0, group_size=1)
    ledger.advance(0)
    ledger.lease("a")
    ready(ledger, "b", version=0)
    ledger.release("a")
    assert ready(ledger, "b", version=0) == 0
    batch = ledger.take(2)
    assert batch is not None
    assert [group.group_id for group in batch] == [1, 0]


def test_a_queued_group_goes_to_the_next_owner_before_any_further_one_is_drawn():
    ledger = Ledger(groups_per_step=4, max_staleness=0, group_size=2)
    ledger.advance(0)
    assert [ledger.lease("a"), ledger.lease("b"), ledger.lease("a")] == [0, 1, 2]
    ledger.add_member("a", 0, 1, 0)
    assert ledger.release("a") == [0, 2]
    assert [ledger.lease("b"), ledger.lease("b"), ledger.lease("b")] == [0, 2, 3]
    assert ledger.add_member("a", 0, 0, 0) == "late"
    assert ledger.counts().discarded == {"owner_lost": 1, "late": 1}


def test_a_resumed_run_may_change_its_batch_size():
    ledger = Ledger(groups_per_step=4, max_staleness=0, group_size=1)
    ledger.advance(0)
    for _ in range(4):
        ready(ledger, version=0)
    ledger.take(4)
    smaller = Ledger(groups_per_step=2, max_staleness=0, group_size=1)
    smaller.restore(ledger.state(), version=1)
    assert [ready(smaller, version=1) for _ in range(2)] == [4, 5]
    assert not smaller.can_lease()


def test_misuse_is_answered():
    ledger = Ledger(groups_per_step=2, max_staleness=0, group_size=2)
    ledger.advance(3)
    with pytest.raises(ValueError, match="version 3 was published after version 3"):
        ledger.advance(3)
    with pytest.raises(ValueError, match=r"member 2 is not in 0\.\.1"):
        ledger.add_member("a", ledger.lease("a"), 2, 3)
    with pytest.raises(ValueError, match="group 0 is not ready"):
        ledger.drop_ready(0, "no_variance")
    with pytest.raises(ValueError, match="holds 1 to groups_per_step=2"):
        ledger.take(3)
    with pytest.raises(CheckpointError, match="format 99, expected 1"):
        ledger.restore({"format": 99}, version=1)
    with pytest.raises(ValueError, match="older than the state's 3"):
        ledger.restore(ledger.state(), version=2)


@given(
    per_step=st.integers(1, 4),
    staleness=st.integers(0, 4),
    size=st.integers(1, 2),
    moves=st.lists(st.tuples(st.sampled_from(["lease", "lease", "arrive", "learn"]), st.integers(0, 1000)), max_size=200),
)
def test_what_waits_for_stragglers_drops_none(per_step: int, staleness: int, size: int, moves: list[tuple[str, int]]) -> None:
    """However long a group takes: when its tokens are no older than its lease, it is learned from, within the bound."""
    ledger = Ledger(groups_per_step=per_step, max_staleness=staleness, group_size=size, waits_for_stragglers=True)
    ledger.advance(0)
    version = 0
    missing: dict[int, tuple[int, int]] = {}  # of each leased group: version at the lease, members that have not arrived

    def arrive(number: int) -> None:
        group_id = sorted(missing)[number % len(missing)]
        leased_at, left = missing.pop(group_id)
        ledger.add_member("a", group_id, left - 1, leased_at + number % (version - leased_at + 1))
        if left > 1:
            missing[group_id] = (leased_at, left - 1)

    def learn() -> bool:
        nonlocal version
        assert ledger.drop_stale() == []
        batch = ledger.take(per_step)
        if batch is not None:
            assert all(ledger.lag(group) <= staleness for group in batch)
            version += 1
            ledger.advance(version)
        return batch is not None

    for move, number in moves:
        if move == "lease" and ledger.can_lease():
            missing[ledger.lease("a")] = (version, size)
        elif move == "arrive" and missing:
            arrive(number)
        elif move == "learn":
            learn()
    while missing:
        arrive(0)
    while learn():
        pass
    assert ledger.num_ready < per_step
    assert ledger.counts().dropped == {}
