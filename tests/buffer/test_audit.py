"""The audit of lists of events written by hand: what it counts, and what it complains about."""

from __future__ import annotations

import json

import pytest

from agentrl.buffer.audit import MAX_PROBLEMS, Audit, GroupLife, audit
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.lineage import Lineage

FIRST = Event(EventKind.PUBLISHED, version=0, step=0)


def leased(group_id: int, owner: str = "a") -> Event:
    return Event(EventKind.LEASED, group_id, owner)


def added(group_id: int, member: int, *versions: int, owner: str = "a") -> Event:
    return Event(EventKind.ADDED, group_id, owner, member, versions=versions)


def consumed(group_id: int, step: int) -> Event:
    return Event(EventKind.CONSUMED, group_id, step=step)


def audited(*events: Event, max_staleness: int = 1) -> Audit:
    return audit(enumerate(events, 10), max_staleness=max_staleness)


def test_an_empty_journal_balances():
    found = audited()
    assert found.is_balanced is True
    assert found.counts() == {"queued": 0, "leased": 0, "ready": 0, "consumed": 0, "dropped": 0}
    assert found.dropped() == found.came_back() == found.batches() == {}
    assert (found.num_events, found.num_taken, found.num_rollbacks, found.max_lag) == (0, 0, 0, 0)
    assert (found.step, found.settled, found.problems, found.num_problems) == (0, 0, [], 0)
    life = GroupLife()
    assert (life.state, life.step, life.num_members, life.num_leases, life.dropped_for) == (
        "queued",
        -1,
        0,
        0,
        "",
    )


def test_every_number_is_of_what_happened():
    found = audited(
        FIRST,
        leased(0),
        leased(1),
        leased(2, "b"),
        leased(2, "c"),
        leased(3),
        leased(4),
        added(0, 0, 0),
        added(0, 1),
        added(1, 0, 0),
        added(2, 0, 0, owner="b"),
        added(2, 1, 0, owner="b"),
        added(2, 0, 0, owner="c"),
        Event(EventKind.DISCARDED, 1, "a", 0, reason="duplicate"),
        Event(EventKind.DISCARDED, 1, "a", 0, reason="duplicate"),
        Event(EventKind.LEFT_OUT, 1, "a", 1, reason="lost"),
        Event(EventKind.QUEUED, 2, "b", reason="expired"),
        consumed(0, 1),
        Event(EventKind.PUBLISHED, version=1, step=1),
        consumed(1, 2),
        Event(EventKind.DROPPED, 3, reason="error"),
        Event(EventKind.RELEASED, owner="b"),
        Event(EventKind.QUEUED, 2, "c", reason="owner_lost"),
        Event(EventKind.QUEUED, 4, "a", reason="owner_lost"),
        Event(EventKind.SETTLED, step=1),
    )
    assert found.problems == []
    assert found.counts() == {"queued": 2, "leased": 0, "ready": 0, "consumed": 2, "dropped": 1}
    assert found.dropped() == {"error": 1}
    assert found.came_back() == {"expired": 1, "owner_lost": 2}
    assert found.batches() == {1: {0}, 2: {1}}
    assert found.discarded == {"duplicate": 2, "lost": 1, "expired": 2, "owner_lost": 1}
    assert (found.num_events, found.num_taken, found.num_rollbacks, found.max_lag) == (25, 2, 0, 1)
    assert (found.step, found.settled, found.released) == (2, 1, {"b"})
    assert found.lineage.version == 1
    first = found.groups[0]
    assert (first.state, first.step, first.num_members, first.num_leases) == ("consumed", 1, 2, 1)
    assert (first.versions, first.players) == ({0}, {"a": {(0, 0), (1,)}})
    assert (found.groups[2].num_leases, found.groups[2].players) == (2, {})
    assert found.groups[3].dropped_for == "error"


def test_a_group_of_which_a_copy_is_played_stays_leased():
    found = audited(leased(0), leased(0, "b"), Event(EventKind.QUEUED, 0, "a", reason="expired"))
    assert found.counts()["leased"] == 1
    assert found.groups[0].players == {"b": set()}
    assert found.is_balanced


def test_a_group_is_what_the_owner_that_completed_it_delivered():
    """`a` delivered one member and left out the other; what `b` delivered meanwhile is an unfinished copy."""
    found = audited(
        FIRST,
        leased(0),
        leased(0, "b"),
        added(0, 0, 0),
        Event(EventKind.ADDED, 0, "b", 0, versions=(0,)),
        Event(EventKind.ADDED, 0, "b", 1, versions=(0,)),
        Event(EventKind.LEFT_OUT, 0, "a", 1, reason="timeout"),
        consumed(0, 1),
        Event(EventKind.ROLLED_BACK, step=0),
        Event(EventKind.REQUEUED, 0, step=1, reason="rolled_back"),
    )
    assert found.discarded == {"timeout": 1, "outrun": 2, "rolled_back": 1}


def test_a_group_leased_again_begins_again():
    found = audited(leased(0), added(0, 0, 0), leased(0), added(0, 1, 1))
    assert (found.groups[0].num_members, found.groups[0].versions) == (1, {1})
    assert found.groups[0].num_leases == 2


def test_undone_steps():
    found = audited(
        FIRST,
        *(
            event
            for group_id in (0, 1, 2)
            for event in (leased(group_id), added(group_id, 0, 0), added(group_id, 1, 0))
        ),
        consumed(0, 1),
        Event(EventKind.PUBLISHED, version=1, step=1),
        consumed(1, 2),
        consumed(2, 2),
        Event(EventKind.PUBLISHED, version=2, step=2),
        Event(EventKind.ROLLED_BACK, step=1),
        Event(EventKind.RETURNED, 1, step=2, reason="rolled_back"),
        Event(EventKind.REQUEUED, 2, step=2, reason="rolled_back"),
        Event(EventKind.PUBLISHED, version=3, step=1),
        consumed(1, 2),
    )
    assert found.problems == []
    assert found.counts() == {"queued": 1, "leased": 0, "ready": 0, "consumed": 2, "dropped": 0}
    assert (found.num_rollbacks, found.num_taken, found.step, found.max_lag) == (1, 4, 2, 1)
    assert found.came_back() == {"rolled_back": 2}
    assert found.discarded == {"rolled_back": 2}
    assert found.batches() == {1: {0}, 2: {1}}
    requeued = found.groups[2]
    assert (requeued.step, requeued.players) == (-1, {})
    assert found.lineage.lag(2) == 1


def test_a_group_that_returned_is_ready():
    found = audited(leased(0), added(0, 0), consumed(0, 1), Event(EventKind.RETURNED, 0, step=1, reason="x"))
    assert found.counts()["ready"] == 1
    assert found.groups[0].step == -1
    assert found.is_balanced


def test_a_dropped_group_is_of_no_step():
    found = audited(leased(0), consumed(0, 1), Event(EventKind.DROPPED, 0, reason="empty"))
    assert (found.groups[0].state, found.groups[0].step, found.is_balanced) == ("dropped", -1, True)
    assert found.batches() == {}


ADDED = (leased(0), added(0, 0, 0))


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ((FIRST, FIRST), "event 11: version 0 was published after version 0"),
        (
            (Event(EventKind.PUBLISHED, version=-1, step=0),),
            "event 10: version -1 was published after version -1",
        ),
        (
            (Event(EventKind.SETTLED, step=2), Event(EventKind.ROLLED_BACK, step=1)),
            "event 11: step 1 was restored though step 2 was settled",
        ),
        ((Event(EventKind.LEASED),), "event 10: leased names no group"),
        ((Event(EventKind.ADDED, -1, "a", 0),), "event 10: added names no group"),
        (
            (Event(EventKind.RELEASED, owner="a"), leased(0)),
            "event 11: group 0 was leased to a, which is dead",
        ),
        ((*ADDED, consumed(0, 2)), "event 12: group 0 was taken for step 2 after step 0"),
        ((*ADDED, consumed(0, -1)), "event 12: group 0 was taken for step -1 after step 0"),
        (
            (FIRST, *ADDED, Event(EventKind.PUBLISHED, version=2, step=0), consumed(0, 1)),
            "event 14: group 0 was taken with a token 2 versions old; the bound is 1",
        ),
        ((added(0, 0),), "event 10: group 0 is queued and cannot be added"),
        ((Event(EventKind.LEFT_OUT, 0, "a", 0),), "event 10: group 0 is queued and cannot be left_out"),
        ((Event(EventKind.QUEUED, 0, "a"),), "event 10: group 0 is queued and cannot be queued"),
        ((Event(EventKind.DROPPED, 0),), "event 10: group 0 is queued and cannot be dropped"),
        ((consumed(0, 1),), "event 10: group 0 is queued and cannot be consumed"),
        ((Event(EventKind.RETURNED, 0),), "event 10: group 0 is queued and cannot be returned"),
        ((Event(EventKind.REQUEUED, 0),), "event 10: group 0 is queued and cannot be requeued"),
        ((leased(0), Event(EventKind.RETURNED, 0)), "event 11: group 0 is leased and cannot be returned"),
        ((leased(0), Event(EventKind.REQUEUED, 0)), "event 11: group 0 is leased and cannot be requeued"),
        ((*ADDED, consumed(0, 1), leased(0)), "event 13: group 0 is consumed and cannot be leased"),
        ((*ADDED, consumed(0, 1), consumed(0, 1)), "event 13: group 0 is consumed and cannot be consumed"),
        (
            (leased(0), Event(EventKind.DROPPED, 0), Event(EventKind.DROPPED, 0)),
            "event 12: group 0 is dropped and cannot be dropped",
        ),
    ],
)
def test_what_may_not_happen_is_a_problem(events, problem):
    found = audited(*events)
    assert found.problems == [problem]
    assert found.num_problems == 1
    assert found.is_balanced is False


def test_steps_and_lags_at_their_bounds_are_fine():
    later = Event(EventKind.PUBLISHED, version=1, step=0)
    assert audited(FIRST, *ADDED, later, consumed(0, 1)).is_balanced
    assert not audited(FIRST, *ADDED, later, consumed(0, 1), max_staleness=0).is_balanced
    assert audited(*ADDED, consumed(0, 0)).is_balanced
    assert audited(Event(EventKind.SETTLED, step=1), Event(EventKind.ROLLED_BACK, step=1)).step == 1
    assert audited(Event(EventKind.SETTLED, step=1), Event(EventKind.ROLLED_BACK, step=1)).is_balanced
    two = [leased(0), added(0, 0, 0), added(0, 1, 1)]
    found = audited(FIRST, *two, Event(EventKind.PUBLISHED, version=2, step=0), consumed(0, 1))
    assert found.max_lag == 2, "of the oldest token"


def test_a_group_without_tokens_has_no_lag():
    assert audited(leased(0), added(0, 0), consumed(0, 1)).max_lag == 0


def test_the_largest_lag_is_kept():
    found = audited(
        FIRST,
        *ADDED,
        Event(EventKind.PUBLISHED, version=1, step=0),
        consumed(0, 1),
        leased(1),
        added(1, 0, 1),
        consumed(1, 1),
    )
    assert (found.max_lag, found.num_taken) == (1, 2)


def test_all_problems_are_counted_and_the_first_ones_kept():
    found = audited(*(Event(EventKind.DROPPED, group_id) for group_id in range(MAX_PROBLEMS + 5)))
    assert (found.num_problems, len(found.problems)) == (MAX_PROBLEMS + 5, MAX_PROBLEMS)
    assert found.problems[0] == "event 10: group 0 is queued and cannot be dropped"
    assert MAX_PROBLEMS == 20


def test_a_checkpoint_of_another_folder():
    state = {
        "lineage": Lineage.of([(0, 0), (1, 1), (2, 2)]).state(),
        "step": 2,
        "discarded": {"late": 3},
        "open": [[5, 3, 1]],
        "ready": [{"group_id": 6, "versions": [1, 2], "members": [0, 2, 3], "owner": "a"}],
        "consumed": 4,
        "dropped": {"error": 1, "stale": 2},
    }
    imported = Event(EventKind.IMPORTED, reason=json.dumps(state))
    found = audited(leased(0), imported)
    assert found.is_balanced
    assert found.counts() == {"queued": 1, "leased": 0, "ready": 1, "consumed": 4, "dropped": 3}
    assert (found.step, found.settled, found.discarded) == (2, 2, {"late": 3, "owner_lost": 1})
    assert (found.groups[5].state, found.groups[6].state, found.groups[6].versions) == (
        "queued",
        "ready",
        {1, 2},
    )
    assert 0 not in found.groups
    found = audited(imported, Event(EventKind.PUBLISHED, version=7, step=2), consumed(6, 3), leased(5))
    assert found.is_balanced, found.problems
    assert (found.max_lag, found.step) == (1, 3), "7 has the weights of 2"
    assert found.counts()["consumed"] == 5
    undone = (
        Event(EventKind.ROLLED_BACK, step=2),
        Event(EventKind.REQUEUED, 6, step=3, reason="rolled_back"),
    )
    found = audited(imported, Event(EventKind.PUBLISHED, version=7, step=2), consumed(6, 3), *undone)
    assert found.discarded["rolled_back"] == 3, "its members were delivered before the import"
