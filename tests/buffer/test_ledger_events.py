"""What each verb of the ledger answers, which events it records, and how they change the counts."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.ledger import MAX_LEASES_IN_ORDER, Ledger, LedgerRules
from agentrl.buffer.samplers import SAMPLERS, ReadyGroup
from agentrl.buffer.states import FORMAT, GroupStates, check_format
from agentrl.errors import CheckpointError
from agentrl.types import NO_VERSION, BufferCounts, HeldLease


class Recorded:
    """A ledger of two members per group whose events are kept."""

    def __init__(self, per_step: int = 2, staleness: int = 1, size: int = 2, **rules: object) -> None:
        self.events: list[Event] = []
        self.ledger = Ledger(LedgerRules(per_step, staleness, size, **rules), record=self.record)
        self.ledger.advance(0, 0)
        self.events.clear()

    def record(self, events) -> None:
        self.events.extend(events)

    def new(self) -> list[Event]:
        found, self.events = self.events, []
        return found

    def play(self, owner: str = "a", *, version: int = 0) -> int:
        group_id = self.ledger.lease(owner)
        for member in range(self.ledger.rules.group_size):
            answer = self.ledger.add_member(owner, group_id, member, version)
        assert answer == "ready"
        return group_id


def counts(**changed: object) -> BufferCounts:
    none = dict.fromkeys(("drawn", "queued", "leased", "ready", "consumed"), 0)
    return BufferCounts(**{**none, "dropped": {}, "discarded": {}, **changed})


def test_an_event_says_nothing_that_it_was_not_told():
    event = Event(EventKind.SETTLED)
    assert (event.group_id, event.owner, event.member, event.step) == (-1, "", -1, -1)
    assert (event.version, event.versions, event.reason, event.accuracy) == (-1, (), "", None)


def test_rules_have_defaults_that_change_nothing():
    rules = LedgerRules(1, 2, 3)
    assert (rules.total_groups, rules.waits_for_stragglers, rules.sampler) == (None, False, "fifo")
    assert rules.oversample == 1


def test_a_group_from_lease_to_publish():
    it = Recorded(staleness=3)
    ledger = it.ledger
    assert ledger.groups.counts() == counts()
    assert (ledger.groups.version, ledger.groups.step, ledger.groups.settled) == (0, 0, 0)
    assert ledger.groups.published == 0
    assert ledger.lease("a", 5.0) == 0
    assert ledger.lease("b", 7.0) == 1
    assert it.new() == [Event(EventKind.LEASED, 0, "a"), Event(EventKind.LEASED, 1, "b")]
    assert ledger.groups.counts() == counts(drawn=2, leased=2)
    assert ledger.groups.owners() == ["a", "b"]
    assert ledger.groups.held_by("a") == [0]
    assert ledger.groups.play("a", 1) is ledger.groups.play("a", 9) is None
    assert ledger.groups.play("b", 1).since == 7.0
    assert [(g, owner) for g, owner, _ in ledger.groups.plays()] == [(0, "a"), (1, "b")]
    assert ledger.add_member("a", 0, 1, [3, 0, NO_VERSION, 3], 0.5) == "waiting"
    assert it.new() == [Event(EventKind.ADDED, 0, "a", 1, versions=(0, 3), accuracy=0.5)]
    assert ledger.groups.held_leases(10.0) == [HeldLease(0, "a", 5.0, 1), HeldLease(1, "b", 3.0, 0)]
    assert ledger.add_member("a", 0, 1, 0) == "duplicate"
    assert it.new() == [Event(EventKind.DISCARDED, 0, "a", 1, reason="duplicate")]
    assert ledger.add_member("b", 0, 0, 0) == "late"
    assert it.new() == [Event(EventKind.DISCARDED, 0, "b", 0, reason="late")]
    assert ledger.take(1) is None
    assert ledger.add_member("a", 0, 0, NO_VERSION) == "ready"
    assert it.new() == [Event(EventKind.ADDED, 0, "a", 0, versions=())]
    assert ledger.groups.ready[0] == ReadyGroup(0, 0, 0, "a", 0, (0, 1), (0, 3))
    assert ledger.groups.counts() == counts(drawn=2, leased=1, ready=1, discarded={"duplicate": 1, "late": 1})
    (taken,) = ledger.take(1)
    assert taken.group_id == 0
    assert it.new() == [Event(EventKind.CONSUMED, 0, step=1)]
    assert ledger.take(1, 1) == [taken] == ledger.groups.batch(1)
    assert it.new() == ledger.groups.batch(2) == []
    assert (ledger.groups.step, ledger.groups.consumed, ledger.groups.published) == (1, 1, 0)
    ledger.advance(4)
    assert it.new() == [Event(EventKind.PUBLISHED, version=4, step=1)]
    assert (ledger.groups.version, ledger.groups.published) == (4, 1)
    ledger.settle(1)
    ledger.settle(1)
    ledger.settle(0)
    assert it.new() == [Event(EventKind.SETTLED, step=1)]
    assert ledger.groups.settled == 1
    assert ledger.groups.batches == {}


def test_members_that_are_left_out_complete_a_group():
    it = Recorded(size=3)
    ledger = it.ledger
    group_id = ledger.lease("a")
    it.new()
    assert ledger.leave_out("b", group_id, 0, "lost") == "late"
    assert it.new() == []
    assert ledger.leave_out("a", group_id, 0, "lost") == "waiting"
    assert it.new() == [Event(EventKind.LEFT_OUT, 0, "a", 0, reason="lost")]
    assert ledger.leave_out("a", group_id, 0, "lost") == "duplicate"
    assert ledger.add_member("a", group_id, 0, 0) == "late"
    assert it.new() == [Event(EventKind.DISCARDED, 0, "a", 0, reason="late")]
    assert ledger.leave_out("a", group_id, 1, "lost") == "waiting"
    it.new()
    with pytest.raises(ValueError, match="shrinking would remove all members"):
        ledger.leave_out("a", group_id, 2, "lost")
    assert it.new() == []
    assert ledger.add_member("a", group_id, 2, 0) == "ready"
    assert ledger.groups.ready[group_id].members == (2,)
    assert ledger.groups.counts().discarded == {"lost": 2, "late": 1}
    other = ledger.lease("a")
    assert ledger.add_member("a", other, 0, 0) == "waiting"
    assert ledger.leave_out("a", other, 0, "lost") == "duplicate", "it has arrived"
    assert ledger.add_member("a", other, 1, 0) == "waiting"
    assert ledger.leave_out("a", other, 2, "lost") == "ready"


@pytest.mark.parametrize("member", [-1, 2])
def test_a_member_is_of_its_group(member):
    it = Recorded()
    group_id = it.ledger.lease("a")
    for verb in (
        lambda: it.ledger.add_member("a", group_id, member, 0),
        lambda: it.ledger.leave_out("a", group_id, member, "lost"),
    ):
        with pytest.raises(ValueError, match=rf"group 0: member {member} is not in 0\.\.1"):
            verb()
    assert it.new() == [Event(EventKind.LEASED, 0, "a")]


def test_no_more_groups_are_leased_than_the_bound_admits():
    for staleness, oversample, total, bound in (
        (0, 1.0, None, 2),
        (1, 1.0, None, 4),
        (1, 1.5, None, 6),
        (0, 1.3, None, 3),
        (1, 1.0, 3, 3),
        (1, 1.0, 9, 4),
    ):
        it = Recorded(staleness=staleness, oversample=oversample, total_groups=total, size=1)
        ledger = it.ledger
        for number in range(bound):
            assert ledger.can_lease() is True
            group_id = ledger.lease("a")
            if number == 0:
                ledger.add_member("a", group_id, 0, 0)
        assert ledger.can_lease() is False
        it.new()
        with pytest.raises(ValueError, match="admits no more groups"):
            ledger.lease("a")
        assert it.new() == []
        assert len(ledger.take(1)) == 1
        assert ledger.can_lease() is False, "what is taken counts until it is published"
        ledger.advance(1)
        assert ledger.can_lease() is (total is None or total > bound)


def test_the_queue_comes_first_in_the_order_of_draws():
    it = Recorded()
    first, second = it.ledger.lease("a"), it.ledger.lease("a")
    assert it.ledger.add_member("a", second, 0, 0) == "waiting"
    it.new()
    assert it.ledger.release("b") == []
    assert it.new() == [Event(EventKind.RELEASED, owner="b")]
    assert it.ledger.release("a") == [first, second]
    assert it.new() == [
        Event(EventKind.RELEASED, owner="a"),
        Event(EventKind.QUEUED, first, "a", reason="owner_lost"),
        Event(EventKind.QUEUED, second, "a", reason="owner_lost"),
    ]
    assert it.ledger.groups.released == {"a", "b"}
    assert it.ledger.groups.counts() == counts(drawn=2, queued=2, discarded={"owner_lost": 1})
    assert it.ledger.lease("c") == first
    assert it.ledger.groups.counts() == counts(drawn=2, queued=1, leased=1, discarded={"owner_lost": 1})
    assert [it.ledger.lease("c"), it.ledger.lease("c")] == [second, 2]


def test_leases_that_are_too_old_expire():
    it = Recorded()
    for moment in (1.0, 2.0, 3.0):
        it.ledger.lease("a", moment)
    it.new()
    assert it.ledger.expire(now=11.0, timeout_s=10.0) == it.new() == []
    assert it.ledger.expire(now=13.0, timeout_s=10.0) == [("a", 0), ("a", 1)]
    assert it.new() == [Event(EventKind.QUEUED, group_id, "a", reason="expired") for group_id in (0, 1)]
    assert it.ledger.groups.counts() == counts(drawn=3, queued=2, leased=1)


def restarted(it: Recorded, *, now: float) -> Ledger:
    """Return a ledger that begins with a snapshot of another."""
    after = Ledger(it.ledger.rules, record=it.record)
    state = json.dumps({"ledger": it.ledger.groups.snapshot()})
    after.replay([Event(EventKind.SNAPSHOT, reason=state)], now=now)
    return after


@pytest.mark.parametrize("restarts", [False, True])
def test_each_expiry_doubles_the_time_of_the_next_lease(restarts):
    """Also after a restart. Groups that take longer than a lease would never be complete otherwise."""
    it, now = Recorded(), 0.0
    for time_s in (10.0, 20.0, 40.0, 80.0):
        assert it.ledger.lease("a", now) == 0
        assert it.ledger.next_expiry(10.0) == now + time_s
        assert it.ledger.expire(now=now + time_s, timeout_s=10.0) == []
        now += time_s + 1.0
        assert it.ledger.expire(now=now, timeout_s=10.0) == [("a", 0)]
        if restarts:
            it.ledger = restarted(it, now=now)
    assert it.ledger.lease("a", now) == 0
    assert it.ledger.next_expiry(10.0) == now + 160.0
    assert it.ledger.lease("a", now + 1.0) == 1
    assert it.ledger.next_expiry(10.0) == now + 11.0, "the other group has its own time"
    assert it.ledger.release("a") == [0, 1]
    assert it.ledger.next_expiry(10.0) == math.inf


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=8), st.integers(0, 99))
def test_the_next_expiry_is_when_the_first_lease_expires(leases, later_s):
    """However often groups expired before: `expire` and `next_expiry` against all leases one by one."""
    it, now = Recorded(len(leases)), 0
    for pause_s, num_expired in leases:
        now += pause_s
        group_id = it.ledger.lease("a", now)
        it.ledger.groups.leased[group_id].num_expired = num_expired
    ends = [play.since + 10.0 * 2 ** leases[group_id][1] for group_id, _, play in it.ledger.groups.plays()]
    assert it.ledger.next_expiry(10.0) == min(ends)
    late = [group_id for group_id, end in enumerate(ends) if now + later_s > end]
    assert [group_id for _, group_id in it.ledger.expire(now=now + later_s, timeout_s=10.0)] == late


def test_a_copy_is_of_the_oldest_group_that_one_other_owner_plays():
    it = Recorded()
    ledger = it.ledger
    ledger.lease("a", 1.0)
    ledger.lease("b", 2.0)
    ledger.lease("c", 5.0)
    it.new()
    assert ledger.lease_copy("d", older_than=1.0, now=9.0) is None
    assert ledger.lease_copy("a", older_than=9.0, now=9.0) == 1
    assert it.new() == [Event(EventKind.LEASED, 1, "a")]
    assert ledger.groups.play("a", 1).since == 9.0
    assert ledger.lease_copy("d", older_than=3.0, now=9.0) == 0, "of group 1 there is a copy"
    assert ledger.lease_copy("d", older_than=5.0, now=9.0) is None
    assert ledger.lease_copy("c", older_than=9.0, now=9.0) is None
    assert [lease.group_id for lease in ledger.groups.held_leases(9.0)] == [0, 1, 2, 1, 0]
    ledger.add_member("a", 1, 0, 0)
    ledger.add_member("b", 1, 0, 0)
    ledger.add_member("b", 1, 1, 0)
    assert ledger.groups.ready[1].owner == "b"
    assert ledger.groups.ready[1].order == 1
    assert ledger.groups.counts() == counts(drawn=3, leased=2, ready=1, discarded={"outrun": 1})
    assert ledger.add_member("a", 1, 1, 0) == "late"
    it.new()
    assert ledger.drop("d", 0, "error") is True
    assert it.new() == [Event(EventKind.QUEUED, 0, "d", reason="error")]
    assert ledger.drop("d", 0, "error") is False
    assert it.new() == []
    assert ledger.drop("a", 0, "error") is True
    assert it.new() == [Event(EventKind.DROPPED, 0, reason="error")]
    assert ledger.groups.counts() == counts(
        drawn=3, leased=1, ready=1, dropped={"error": 1}, discarded={"outrun": 1, "late": 1}
    )


def test_the_sampler_in_order_leases_a_group_again_a_few_times():
    it = Recorded(sampler="in_order")
    for _ in range(2):
        assert it.ledger.lease("a") == 0
        it.new()
        assert it.ledger.drop("a", 0, "error") is True
        assert it.new() == [Event(EventKind.QUEUED, 0, "a", reason="error")]
    assert it.ledger.lease("a") == 0
    it.new()
    assert it.ledger.drop("a", 0, "error") is True
    assert it.new() == [Event(EventKind.DROPPED, 0, reason="error")]
    assert MAX_LEASES_IN_ORDER == 3


def test_ready_groups_can_be_dropped():
    it = Recorded()
    group_id = it.play()
    it.new()
    it.ledger.drop_ready(group_id, "no_variance")
    assert it.new() == [Event(EventKind.DROPPED, group_id, reason="no_variance")]
    assert it.ledger.groups.counts() == counts(drawn=1, dropped={"no_variance": 1})
    with pytest.raises(ValueError, match="group 0 is not ready"):
        it.ledger.drop_ready(group_id, "no_variance")
    assert it.new() == []


def test_what_is_too_stale_is_dropped_and_never_taken():
    it = Recorded(per_step=1)
    old, newer = it.play(version=0), it.ledger.lease("a")
    assert it.ledger.drop_stale() == []
    it.ledger.advance(1, 0)
    assert it.ledger.groups.lag(it.ledger.groups.ready[old]) == 1
    assert it.ledger.drop_stale() == []
    it.ledger.advance(2, 0)
    assert it.ledger.take(1) is None, "a lag of 2"
    it.new()
    assert it.ledger.drop_stale() == [old]
    assert it.new() == [Event(EventKind.DROPPED, old, reason="stale")]
    it.ledger.add_member("a", newer, 0, NO_VERSION)
    it.ledger.add_member("a", newer, 1, [])
    assert it.ledger.groups.lag(it.ledger.groups.ready[newer]) == 0
    assert [group.group_id for group in it.ledger.take(1)] == [newer]


@pytest.mark.parametrize("num_groups", [0, 3])
def test_a_batch_has_at_least_one_group_and_at_most_a_step(num_groups):
    it = Recorded()
    for _ in range(3):
        it.play()
    with pytest.raises(ValueError, match=f"cannot take {num_groups} groups"):
        it.ledger.take(num_groups)
    assert len(it.ledger.take(2)) == 2


def test_stragglers_are_waited_for_when_they_would_be_too_old():
    it = Recorded(per_step=1, waits_for_stragglers=True)
    it.ledger.lease("a")
    it.play()
    assert [group.group_id for group in it.ledger.take(1)] == [1], "the straggler is fresh enough for another"
    it.ledger.advance(1)
    it.play(version=1)
    assert it.ledger.take(1) is None
    it.ledger.drop("a", 0, "error")
    assert [group.group_id for group in it.ledger.take(1)] == [2]


def test_a_rejected_batch_counts_as_not_taken():
    it = Recorded()
    groups = [it.play(), it.play()]
    it.ledger.take(2)
    it.new()
    assert it.ledger.reject(9, "empty") == it.new() == []
    assert it.ledger.reject(1, "empty") == groups
    assert it.new() == [Event(EventKind.DROPPED, group_id, reason="empty") for group_id in groups]
    assert it.ledger.groups.counts() == counts(drawn=2, dropped={"empty": 2})
    assert (it.ledger.groups.step, it.ledger.groups.batches) == (0, {})
    it.play()
    assert len(it.ledger.take(1)) == 1
    it.ledger.advance(1)
    with pytest.raises(ValueError, match="step 1: its update is already published"):
        it.ledger.reject(1, "empty")
    assert it.ledger.groups.counts().consumed == 1


@pytest.mark.parametrize("version", [0, -1])
def test_versions_increase(version):
    it = Recorded()
    with pytest.raises(ValueError, match="versions must increase"):
        it.ledger.advance(version)
    assert it.new() == []


def learned(steps: int = 2, **rules: object) -> Recorded:
    """A group of one member per step, each step published."""
    it = Recorded(per_step=1, size=1, **rules)
    for step in range(1, steps + 1):
        it.play(version=step - 1)
        it.ledger.take(1)
        it.ledger.advance(step)
    it.new()
    return it


def test_undone_groups_are_ready_again_if_fresh_and_kept():
    it = learned()
    assert it.ledger.roll_back(1) == []
    assert it.new() == [
        Event(EventKind.ROLLED_BACK, step=1),
        Event(EventKind.RETURNED, 1, step=2, reason="rolled_back"),
    ]
    assert it.ledger.groups.counts() == counts(drawn=2, ready=1, consumed=1)
    assert (it.ledger.groups.step, it.ledger.groups.published) == (1, 1)
    assert sorted(it.ledger.groups.batches) == [1]

    it = learned()
    assert it.ledger.roll_back(0, is_kept=lambda group: group.group_id == 1) == [0]
    assert it.new() == [
        Event(EventKind.ROLLED_BACK, step=0),
        Event(EventKind.REQUEUED, 0, step=1, reason="rolled_back"),
        Event(EventKind.RETURNED, 1, step=2, reason="rolled_back"),
    ]
    assert it.ledger.groups.counts() == counts(drawn=2, queued=1, ready=1, discarded={"rolled_back": 1})
    assert it.ledger.groups.published == 0

    assert it.ledger.groups.lineage.lag(2) == 2, "from the restored weights"

    it = learned(staleness=0)
    assert it.ledger.roll_back(0) == [1], "its token is of an abandoned version: lag 1"


def test_what_is_settled_is_not_undone():
    it = learned()
    it.ledger.settle(1)
    it.new()
    with pytest.raises(CheckpointError, match="batches up to step 1 are settled"):
        it.ledger.roll_back(0)
    assert it.new() == []
    assert it.ledger.groups.batches.keys() == {2}
    it.ledger.roll_back(1)
    assert it.ledger.groups.counts().ready == 1


def test_a_state_is_continued_elsewhere():
    it = learned(staleness=2)
    for _ in range(2):
        it.play(version=2)
    leased = it.ledger.lease("a")
    it.ledger.roll_back(1)
    it.ledger.advance(5, 1)
    it.ledger.drop_ready(2, "no_variance")
    it.ledger.add_member("b", 0, 0, 0)
    queued = it.ledger.groups.counts()
    state = it.ledger.groups.state()
    assert state["format"] == FORMAT == 2
    assert "curriculum" not in state
    assert state["open"] == [[leased, 4, 0]]
    other = Recorded(per_step=1, size=1, staleness=2)
    other.ledger.lease("z")
    other.new()
    other.ledger.restore(json.loads(json.dumps(state)))
    assert [event.kind for event in other.new()] == [EventKind.IMPORTED]
    found = other.ledger.groups
    assert found.counts() == counts(
        drawn=5,
        queued=1,
        ready=2,
        consumed=1,
        dropped={"no_variance": 1},
        discarded={"late": 1},
    )
    assert queued.leased == 1
    assert (found.step, found.settled, found.published) == (1, 1, 1)
    assert found.ready == it.ledger.groups.ready
    assert found.version == 5
    assert other.ledger.lease("a") == leased
    assert found.leased[leased].plays["a"].order == 5
    assert found.next_draw() == found.next_draw() == 5
    other.ledger.drop_ready(3, "no_variance")
    other.play()
    assert found.ready[leased + 1].finished == 4


def test_members_of_lost_owners_are_discarded_on_import():
    it = Recorded()
    group_id = it.ledger.lease("a")
    it.ledger.lease_copy("b", older_than=1.0, now=0.0)
    it.ledger.add_member("a", group_id, 0, 0)
    it.ledger.add_member("b", group_id, 1, 0)
    state = it.ledger.groups.state()
    assert state["open"] == [[0, 0, 2]]
    other = Recorded()
    other.ledger.restore(state)
    assert other.ledger.groups.counts() == counts(drawn=1, queued=1, discarded={"owner_lost": 2})


@pytest.mark.parametrize("form", [1, 3, None])
def test_another_format_is_refused(form):
    with pytest.raises(CheckpointError, match=f"has format {form}, expected 2"):
        check_format({"format": form})
    check_format({"format": 2})


def test_a_replay_is_the_ledger_and_leases_begin_then():
    events: list[Event] = []
    first = Ledger(LedgerRules(2, 1, 2), record=events.extend)
    first.advance(0, 0)
    first.lease("a", 1.0)
    first.add_member("a", 0, 0, 0)
    again = Ledger(LedgerRules(2, 1, 2))
    again.replay(events, now=50.0)
    assert again.groups.counts() == first.groups.counts()
    assert again.groups.held_leases(60.0) == [HeldLease(0, "a", 10.0, 1)]


def test_an_event_that_is_not_recorded_has_not_happened():
    ledger = Ledger(LedgerRules(2, 1, 2), record=lambda events: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ledger.lease("a")
    assert ledger.groups.counts() == counts()


def test_an_empty_state():
    groups = GroupStates(2, None)
    assert groups.version == NO_VERSION
    assert groups.counts() == counts()
    assert (groups.step, groups.settled, groups.consumed, groups.published, groups.drawn) == (0,) * 5
    assert groups.owners() == groups.held_leases(0.0) == []


def ready(number: int, *, order: int, finished: int, versions: tuple[int, ...] = (0,)) -> ReadyGroup:
    return ReadyGroup(10 + number, number, order, "a", finished, (0,), versions)


GROUPS = (
    ready(0, order=2, finished=1, versions=(4, 7)),
    ready(1, order=1, finished=2, versions=(9,)),
    ready(3, order=0, finished=0, versions=()),
    ready(2, order=3, finished=3, versions=(9,)),
)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ("fifo", [3, 1, 0, 2]),
        ("freshest", [3, 1, 2, 0]),
        ("windowed", [3, 0, 1, 2]),
        ("in_order", [0, 1, 2, 3]),
    ],
)
def test_samplers_order_groups(sampler, expected):
    lag = {10: 5, 11: 1, 12: 1, 13: 0}

    def take(count: int, open_number: int = 4) -> list[int] | None:
        batch = SAMPLERS[sampler](GROUPS, count, lambda group: lag[group.group_id], open_number)
        return None if batch is None else [group.number for group in batch]

    for count in range(1, 5):
        assert take(count) == expected[:count]
    assert take(5) is None


def test_the_sampler_in_order_waits_for_what_was_drawn_before():
    def take(open_number: int) -> list[ReadyGroup] | None:
        return SAMPLERS["in_order"](GROUPS, 3, lambda group: 0, open_number)

    assert take(3) == [GROUPS[0], GROUPS[1], GROUPS[3]]
    assert take(2) is take(1) is None


def test_the_oldest_version_of_a_group():
    assert [group.min_version for group in GROUPS] == [4, 9, -1, 9]


def test_one_stale_token_is_enough():
    it = Recorded(per_step=1, staleness=1)
    it.ledger.lease("a")
    it.ledger.advance(1, 0)
    it.ledger.advance(2, 0)
    it.ledger.add_member("a", 0, 0, 2)
    it.ledger.add_member("a", 0, 1, 0)
    assert it.ledger.groups.lag(it.ledger.groups.ready[0]) == 2
    assert it.ledger.take(1) is None
    assert it.ledger.drop_stale() == [0]


def test_an_undone_group_with_one_stale_token_is_played_again():
    it = Recorded(per_step=1, staleness=1)
    it.play(version=0)
    it.ledger.take(1)
    it.ledger.advance(1)
    slow = it.ledger.lease("a")
    it.ledger.add_member("a", slow, 0, 1)
    it.play(version=1)
    it.ledger.take(1)
    it.ledger.advance(2)
    it.ledger.add_member("a", slow, 1, 2)
    assert [group.versions for group in it.ledger.take(1)] == [(1, 2)]
    it.ledger.advance(3)
    assert it.ledger.roll_back(0) == [slow]
    assert it.ledger.groups.counts().ready == 2


def test_the_copy_is_of_the_oldest_lease():
    it = Recorded(size=1)
    for owner in ("a", "b"):
        it.ledger.lease(owner, 1.0)
    for owner, group_id in (("a", 0), ("b", 1)):
        it.ledger.release(owner)
        assert it.ledger.lease("c", 2.0) == group_id
    assert it.ledger.lease_copy("d", older_than=9.0, now=9.0) == 0


def test_no_batch_in_order_while_an_earlier_group_is_open():
    it = Recorded(sampler="in_order", staleness=3)
    first, second, third = it.ledger.lease("a"), it.play(), it.play()
    it.ledger.lease("b")
    assert it.ledger.take(1) is None
    for member in range(2):
        it.ledger.add_member("a", first, member, 0)
    assert [group.group_id for group in it.ledger.take(2)] == [first, second]
    assert [group.group_id for group in it.ledger.take(1, 2)] == [third]


def test_the_batch_that_is_rejected_is_the_one_that_is_named():
    it = Recorded(per_step=1, size=1, staleness=3)
    groups = [it.play(), it.play()]
    for step in (1, 2):
        it.ledger.take(1, step)
    assert it.ledger.reject(2, "empty") == groups[1:]
    assert (it.ledger.groups.step, list(it.ledger.groups.batches)) == (1, [1])


def test_a_state_of_another_format_changes_nothing():
    it = Recorded()
    with pytest.raises(CheckpointError, match="expected 2"):
        it.ledger.restore({"format": 1})
    assert it.new() == []
    with pytest.raises(CheckpointError, match="expected 2"):
        it.ledger.groups.apply(Event(EventKind.IMPORTED, reason='{"format": 1}'))


def test_restored_weights_are_published_next():
    other = Recorded(per_step=1, size=1)
    other.ledger.restore(learned().ledger.groups.state())
    other.ledger.advance(7, 2)
    assert [other.ledger.groups.lineage.lag(version) for version in (1, 2, 7)] == [1, 0, 0]
