"""The journal: what was said is there after a death, is learned from once, and adds up."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.audit import audit
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.lineage import Lineage
from agentrl.buffer.records import Records
from agentrl.errors import CheckpointError, JournalError
from agentrl.types import NO_VERSION, Lease

import numpy as np  # isort: skip
from parts.trajectories import ATTEMPTS, Rows, play, stored

FOREVER_S = 60.0


def opened(folder: Path, *, staleness: int = 1, **options) -> ReplayBuffer:
    return ReplayBuffer(
        Rows(),
        LedgerRules(groups_per_step=2, max_staleness=staleness, group_size=2),
        ATTEMPTS,
        journal=Journal(folder / FILE),
        **options,
    )


def finish(target: ReplayBuffer, lease: Lease, owner: str = "a", *, version: int, members=(0, 1)) -> None:
    target.add(
        owner,
        stored(*(play(lease, member, version=version, reward=float(member)) for member in members)),
    )


def taken(batch: bytes | None) -> list[tuple[int, int]]:
    assert batch is not None
    return [(t.group_id, t.member) for t in batch]


def audited(folder: Path, *, staleness: int = 1):
    with Records.open(folder / FILE) as records:
        return audit(records.events(), max_staleness=staleness)


def test_a_buffer_that_died_goes_on_where_it_was(tmp_path):
    first = opened(tmp_path)
    first.advance(0, 0)
    one, two, three, four = first.lease("a", 9, 0.0)
    finish(first, one, version=0)
    finish(first, two, version=0, members=(1,))
    finish(first, three, version=0)

    second = opened(tmp_path)  # nothing was closed
    assert second.counts() == first.counts()
    assert second.lease("a", 9, 0.0, held=[2, 1, 0, 3]) == []
    assert [lease.group_id for lease in second.lease("a", 9, 0.0, held=[1])] == [3], "its answer was lost"
    batch = second.take(2, 0.0, 1)
    assert taken(batch) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    finish(second, two, version=0, members=(0,))  # who plays goes on

    third = opened(tmp_path)
    assert list(third.take(2, 0.0, 1)) == list(batch), (
        "the batch of a step whose answer was lost is given again"
    )
    third.advance(1, 1)
    third.advance(1, 1)
    finish(third, four, version=0)
    assert taken(third.take(2, 0.0, 2)) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    found = audited(tmp_path)
    assert found.is_balanced, found.problems
    assert found.counts() == {"queued": 0, "leased": 0, "ready": 0, "consumed": 4, "dropped": 0}


def test_what_was_learned_after_the_checkpoint_comes_back_once(tmp_path):
    first = opened(tmp_path)
    first.advance(0, 0)
    for step in (1, 2, 3):
        for lease in first.lease("a", 2, 0.0):
            finish(first, lease, version=lease.version)
        first.take(2, 0.0, step)
        first.advance(step, step)
        if step == 1:
            first.settle(1)
    leased = first.lease("a", 9, 0.0)
    finish(first, leased[0], version=3)

    second = opened(tmp_path)  # the driver died: all owners are gone; the weights are those after step 1
    second.resume(1, None)
    counts = second.counts()
    assert counts.is_balanced
    assert counts.consumed == 2
    second.advance(4, 1)
    # Groups 2 and 3 were sampled by version 1, the very weights; 4 and 5 by version 2, which is one update
    # away; the one that was ready is of version 3, two updates away.
    assert taken(second.take(2, 0.0, 2)) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    second.advance(5, 2)
    found = audited(tmp_path)
    assert found.is_balanced, found.problems
    assert found.num_rollbacks == 1
    with Records.open(tmp_path / FILE) as records:  # step 1 was settled
        assert [(group.group_id, group.step) for group in records.ended()] == [(0, 1), (1, 1)]
    assert found.batches()[2] == {2, 3}


def test_a_rolled_back_group_that_is_too_far_is_played_again(tmp_path):
    first = opened(tmp_path, staleness=0)
    first.advance(0, 0)
    for step in (1, 2):
        for lease in first.lease("a", 2, 0.0):
            finish(first, lease, version=lease.version)
        first.take(2, 0.0, step)
        first.advance(step, step)
    second = opened(tmp_path, staleness=0)
    second.resume(0, None)
    second.advance(3, 0)
    assert taken(second.take(2, 0.0, 1)) == [(0, 0), (0, 1), (1, 0), (1, 1)], "sampled by the first weights"
    second.advance(4, 1)
    assert [lease.group_id for lease in second.lease("b", 2, 0.0)] == [2, 3], (
        "sampled by weights that are gone"
    )
    found = audited(tmp_path, staleness=0)
    assert found.is_balanced, found.problems
    assert found.came_back() == {"rolled_back": 4}
    assert dict(found.discarded) == second.counts().discarded == {"rolled_back": 4}


def test_a_step_that_is_settled_is_not_undone(tmp_path):
    first = opened(tmp_path)
    first.advance(0, 0)
    for lease in first.lease("a", 2, 0.0):
        finish(first, lease, version=0)
    first.take(2, 0.0, 1)
    first.advance(1, 1)
    state = first.state()
    first.settle(1)
    with pytest.raises(CheckpointError, match="settled"):
        first.roll_back(0)
    second = opened(tmp_path)
    with pytest.raises(CheckpointError, match="is unknown"):
        second.resume(0, None)
    second.resume(0, state)  # what a checkpoint says counts then
    assert second.counts().consumed == 2


def test_nothing_is_kept_of_groups_that_ended_without_being_learned_from(tmp_path):
    """Neither in memory nor in the file: a long run drops many."""
    buffer = opened(tmp_path)
    buffer.advance(0)
    dropped, lost = buffer.lease("a", 2, FOREVER_S)
    for lease in (dropped, lost):
        finish(buffer, lease, version=0, members=(0,))
    assert (buffer.stats()["stored_attempts"] > 0, num_attempts(tmp_path)) == (True, 2)
    buffer.drop_group("a", dropped.group_id, "timeout")
    assert num_attempts(tmp_path) == 1
    buffer.release("a")
    assert (buffer.stats()["stored_attempts"], num_attempts(tmp_path)) == (0, 0)
    assert buffer.counts().queued == 1


def num_attempts(folder: Path) -> int:
    with sqlite3.connect(folder / FILE) as database:
        return database.execute("SELECT count(*) FROM attempts").fetchone()[0]


def test_a_full_disk_changes_nothing(tmp_path):
    """The database may grow no further: what cannot be written did not happen, and happens once there is
    room.
    """
    target = opened(tmp_path)
    target.advance(0, 0)
    [one, two] = target.lease("a", 2, 0.0)
    database = target._journal._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    last = [target.counts()]

    def fill() -> None:
        for _ in range(100):
            finish(target, one, version=0, members=(0,))
            last.append(target.counts())

    with pytest.raises(JournalError, match="cannot be written"):
        fill()
    assert target.counts() == last[-1]
    database.execute("PRAGMA max_page_count = 1000000")
    finish(target, one, version=0)
    finish(target, two, version=0)
    assert taken(target.take(2, 0.0, 1)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert audited(tmp_path).is_balanced


WRITER = """
import sys
from pathlib import Path
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import Journal
journal = Journal(Path(sys.argv[1]))
for number in range(10_000_000):
    events = [Event(EventKind.LEASED, number, "a"), Event(EventKind.ADDED, number, "a", 0, versions=(number,))]
    journal.append(events, {(number, "a", 0): b"x" * 2000})
    print(number, flush=True)
"""  # noqa: E501


def test_kill_9_while_it_writes_loses_nothing_that_was_said(tmp_path):
    """Every transaction whose end was seen is there, whole; at most one more is."""
    path = tmp_path / FILE
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    last = -1
    for line in writer.stdout:
        last = int(line)
        if last == 300:
            os.kill(writer.pid, signal.SIGKILL)
    writer.wait(FOREVER_S)
    journal = Journal(path)
    numbers = [event.group_id for event in journal.events()]
    assert numbers == [number for number in range(len(numbers) // 2) for _ in range(2)]
    assert last + 1 <= len(numbers) // 2 <= last + 2
    assert journal.attempts(last, "a") == {0: b"x" * 2000}


def test_a_foreign_or_damaged_file_is_told(tmp_path):
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(CheckpointError, match="damaged"):
        Journal(tmp_path / FILE)
    Journal(tmp_path / "other").set_fact("format", "99")
    with pytest.raises(CheckpointError, match="format 99"):
        Journal(tmp_path / "other")


LIFE = [
    Event(EventKind.PUBLISHED, version=0, step=0),
    Event(EventKind.LEASED, 0, "a"),
    Event(EventKind.ADDED, 0, "a", 0, versions=(0,)),
    Event(EventKind.CONSUMED, 0, step=1),
    Event(EventKind.PUBLISHED, version=1, step=1),
]
UNDONE = [
    Event(EventKind.ROLLED_BACK, step=0),
    Event(EventKind.RETURNED, 0, step=1),
    Event(EventKind.PUBLISHED, version=2, step=0),
]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*LIFE, LIFE[3]], "is consumed and cannot be consumed"),
        ([*LIFE[:3], LIFE[1]], None),
        ([*LIFE, LIFE[1]], "is consumed and cannot be leased"),
        (
            [
                *LIFE[:2],
                Event(EventKind.RELEASED, owner="a"),
                Event(EventKind.QUEUED, 0, "a", reason="owner_lost"),
                LIFE[1],
            ],
            "which is dead",
        ),
        ([*LIFE, LIFE[4]], "version 1 was published after version 1"),
        ([*LIFE[:3], Event(EventKind.CONSUMED, 0, step=5)], "for step 5 after step 0"),
        ([LIFE[0], Event(EventKind.PUBLISHED, version=4, step=0), *LIFE[1:4]], "4 versions old"),
        ([Event(EventKind.DROPPED, 7, reason="stale")], "is queued and cannot be dropped"),
        (
            [
                *LIFE,
                Event(EventKind.ROLLED_BACK, step=0),
                Event(EventKind.RETURNED, 0, step=1),
                Event(EventKind.PUBLISHED, version=2, step=0),
                LIFE[3],
            ],
            None,
        ),
        ([*LIFE, Event(EventKind.SETTLED, step=1), Event(EventKind.ROLLED_BACK, step=0)], "was settled"),
    ],
)
def test_the_audit_finds_what_no_group_can_do(events, words):
    found = audit(enumerate(events), max_staleness=1)
    assert found.is_balanced == (words is None), found.problems
    assert words is None or words in found.problems[0]


def test_the_audit_counts_what_happened():
    """A group that is played twice, one that is dropped, one whose step is undone."""
    events = [
        *LIFE,
        Event(EventKind.LEASED, 1, "a"),
        Event(EventKind.ADDED, 1, "a", 0, versions=(1,)),
        Event(EventKind.LEFT_OUT, 1, "a", 1, reason="retried"),
        Event(EventKind.QUEUED, 1, "a", reason="expired"),
        Event(EventKind.LEASED, 1, "b"),
        Event(EventKind.DROPPED, 1, "b", reason="reward_error"),
        Event(EventKind.LEASED, 2, "b"),
        Event(EventKind.ADDED, 2, "b", 0, versions=(0,)),
        Event(EventKind.DISCARDED, 2, "a", 0, reason="late"),
        Event(EventKind.CONSUMED, 2, step=2),
        *UNDONE[:1],
        Event(EventKind.REQUEUED, 2, step=2, reason="rolled_back"),
        Event(EventKind.RETURNED, 0, step=1, reason="rolled_back"),
    ]
    found = audit(enumerate(events), max_staleness=1)
    assert found.problems == []
    assert (found.num_events, found.num_taken, found.num_rollbacks, found.max_lag, found.step) == (
        18,
        2,
        1,
        1,
        0,
    )
    assert found.counts() == {"queued": 1, "leased": 0, "ready": 1, "consumed": 0, "dropped": 1}
    assert found.dropped() == {"reward_error": 1}
    assert found.came_back() == {"expired": 1, "rolled_back": 2}
    assert found.discarded == {"retried": 1, "expired": 1, "late": 1, "rolled_back": 1}
    assert [life.num_leases for life in found.groups.values()] == [1, 2, 1]
    assert found.batches() == {}


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_version_that_is_not_newer_than_the_last_is_refused(version):
    lineage = Lineage.of([(0, 0), (3, 1)])
    with pytest.raises(ValueError, match=f"version {version} was published after version 3"):
        lineage.publish(version, 2)
    assert [lineage.version, lineage.lag(0), lineage.lag(3)] == [3, 3, 0], "it was not added"
    lineage.publish(4, 2)
    assert [lineage.version, lineage.lag(0), lineage.lag(3)] == [4, 4, 1]


@settings(deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["learn", "learn", "back"]), st.integers(0, 4)), max_size=30))
def test_the_lineage_told_by_versions_and_steps_is_the_one_that_was_lived(moves):
    lived, told = Lineage(), []
    step, version = 0, 0
    lived.publish(0, 0)
    told.append((0, 0))
    for move, size in moves:
        if move == "back":
            step = max(0, step - size)
            lived.roll_back(step)
        else:
            step += 1
        version += 1
        lived.publish(version, step)
        told.append((version, step))
    again = Lineage.of(told)
    restored = Lineage.restored(json.loads(json.dumps(lived.state())))
    for older in range(version + 1):
        assert again.lag(older) == lived.lag(older) == restored.lag(older)
    assert lived.lag(version) == 0
    versions = np.array([NO_VERSION, *range(version + 1)], np.int32)
    assert lived.lags(versions).tolist() == [0, *(lived.lag(older) for older in range(version + 1))]
