"""Snapshots of a journal: a restart reads few events at any age, and nothing that was known is forgotten."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.audit import Audit, audit
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.checksums import row_checksum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.id_ranges import IdRanges
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.snapshots import take_snapshot
from agentrl.buffer.states import GroupStates
from agentrl.data.attempt_files import FOLDER
from agentrl.errors import CheckpointError
from parts.trajectories import Rows, play, stored

PER_STEP = 3


def opened(folder: Path) -> ReplayBuffer:
    journal = Journal(folder / FILE)
    if "max_staleness" not in journal.facts:
        journal.set_fact("max_staleness", "1")
    return ReplayBuffer(Rows(), LedgerRules(PER_STEP, 1, 2), folder / FOLDER, journal=journal)


def folder_of(target: ReplayBuffer) -> Path:
    return target._rows._folder


def learn(target: ReplayBuffer, step: int) -> list[int]:
    """Play, take and publish the batch of `step`; one group is dropped. Returns the groups of the batch."""
    owner = f"o{step}"
    first, *leases = target.lease(owner, PER_STEP + 1, 0.0)
    target.drop_group(owner, first.group_id, "tool_error")
    leases += target.lease(owner, PER_STEP - len(leases), 0.0) if len(leases) < PER_STEP else []
    for lease in leases:
        played = [play(lease, m, version=lease.version) for m in (0, 1)]
        target.add(owner, stored(*played, folder=folder_of(target)))
    batch = target.take(PER_STEP, 0.0, step)
    assert batch is not None
    target.advance(step, step)
    return sorted({t.group_id for t in batch})


def stored_kinds(folder: Path) -> list[str]:
    with sqlite3.connect(folder / FILE) as database:
        return [kind for (kind,) in database.execute("SELECT kind FROM events ORDER BY seq")]


@pytest.mark.parametrize("num_steps", [3, 12])
def test_a_restart_reads_what_came_after_the_checkpoint_at_any_age(tmp_path, num_steps):
    target = opened(tmp_path)
    target.advance(0, 0)
    for step in range(1, num_steps + 1):
        learn(target, step)
        target.settle(step)
        assert stored_kinds(tmp_path) == ["snapshot"]
    leases = target.lease("last", 2, 0.0)
    target.add("last", stored(play(leases[0], 1), folder=folder_of(target)))
    assert stored_kinds(tmp_path) == ["snapshot", "leased", "leased", "added"]
    again = opened(tmp_path)
    assert again.counts() == target.counts()
    held = [[replace(lease, age_s=0.0) for lease in each.leases()] for each in (again, target)]
    assert held[0] == held[1] != []
    learn(again, num_steps + 1)
    assert again.counts().is_balanced
    assert again.counts().consumed == PER_STEP * (num_steps + 1)


def test_what_ledger_and_audit_do_not_agree_about_is_kept_event_by_event(tmp_path):
    target = opened(tmp_path)
    target.advance(0, 0)
    learn(target, 1)
    kinds = stored_kinds(tmp_path)
    target._groups.consumed += 1  # a bug of the ledger
    target.settle(1)
    assert stored_kinds(tmp_path) == [*kinds, "settled"]


def test_an_audit_that_begins_with_a_snapshot_knows_what_ended_before():
    groups, known = GroupStates(1, None), Audit()
    events = [
        Event(EventKind.PUBLISHED, version=0, step=0),
        Event(EventKind.LEASED, 0, "a"),
        Event(EventKind.LEASED, 1, "a"),
        Event(EventKind.LEASED, 2, "a"),
        Event(EventKind.ADDED, 0, "a", 0, versions=(0,)),
        Event(EventKind.DROPPED, 1, reason="error"),
        Event(EventKind.CONSUMED, 0, step=1),
        Event(EventKind.PUBLISHED, version=1, step=1),
        Event(EventKind.SETTLED, step=1),
    ]
    for seq, event in enumerate(events):
        groups.apply(event)
        known.follow(seq, event, max_staleness=0)
    snapshot = take_snapshot(groups, known)
    assert snapshot is not None
    assert snapshot.ended == ((0, 1, ""), (1, -1, "error"))
    begin = (9, snapshot.event)
    assert audit([begin], max_staleness=0).is_balanced
    assert audit([begin, (10, Event(EventKind.ADDED, 2, "a", 0, versions=(1,)))], max_staleness=0).is_balanced
    for wrong, line in (
        (Event(EventKind.LEASED, 0, "b"), "event 10: group 0 has ended and cannot be leased"),
        (Event(EventKind.CONSUMED, 1, step=2), "event 10: group 1 has ended and cannot be consumed"),
        (Event(EventKind.ROLLED_BACK, step=0), "event 10: step 0 was restored though step 1 was settled"),
        (Event(EventKind.PUBLISHED, version=1, step=2), "event 10: version 1 was published after version 1"),
        (snapshot.event, "event 10: a snapshot follows other events, which it should have replaced"),
    ):
        assert line in audit([begin, (10, wrong)], max_staleness=0).problems
    state = json.loads(snapshot.event.reason)
    state["ledger"]["consumed"] += 1
    forged = Event(EventKind.SNAPSHOT, reason=json.dumps(state))
    assert "the ledger's part of the snapshot has" in audit([(9, forged)], max_staleness=0).problems[0]


# --------------------------------------------------------------------------------------------------- the file


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run of six steps, two of which are settled, and whose process died."""
    (tmp_path / "live").mkdir()
    target = opened(tmp_path / "live")
    target.advance(0, 0)
    for step in range(1, 7):
        learn(target, step)
        if step in (2, 4):
            target.settle(step)
    target._journal.close()
    shutil.copytree(tmp_path / "live", tmp_path / "run")
    return tmp_path / "run"


def test_a_snapshot_of_another_time_is_not_taken_for_the_newest(run):
    """Its own checksum holds, but not those of the events that follow."""
    with sqlite3.connect(run / FILE) as database:
        row = list(database.execute("SELECT * FROM events ORDER BY seq").fetchone())
        row[9] = row[9].replace('"consumed":12', '"consumed":13')
        row[-1] = row_checksum(row[:-1])
        database.execute("DELETE FROM events WHERE kind = 'snapshot'")
        database.execute(f"INSERT INTO events VALUES ({', '.join('?' * len(row))})", row)
    database.close()
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        opened(run)


@given(st.lists(st.sets(st.integers(0, 60), max_size=20), max_size=6))
def test_ranges_are_the_set_of_their_numbers(parts):
    ranges, numbers = IdRanges(), set()
    for part in parts:
        ranges.add(part)
        numbers |= part
        ranges = IdRanges(json.loads(json.dumps(ranges.ranges)))
    assert {number for number in range(-2, 70) if number in ranges} == numbers
    assert all(
        a_last + 1 < b_first
        for (_, a_last), (b_first, _) in zip(ranges.ranges, ranges.ranges[1:], strict=False)
    )
