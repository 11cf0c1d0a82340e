"""The audit of a journal whose old events are a snapshot."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from agentrl.buffer import buffer as buffer_module
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.checksums import row_checksum
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.records import Records
from agentrl.data.attempt_files import FOLDER
from agentrl.errors import CheckpointError, JournalError
from agentrl.extras.research import audit as audit_module
from agentrl.extras.research.audit import RunAudit, audit_run
from parts.trajectories import Rows, play, stored

PER_STEP = 3


def opened(folder: Path) -> ReplayBuffer:
    journal = Journal(folder / FILE)
    if "max_staleness" not in journal.facts:
        journal.set_fact("max_staleness", "1")
    return ReplayBuffer(Rows(), LedgerRules(PER_STEP, 1, 2), folder / FOLDER, journal=journal)


def audit_journal(folder: Path) -> RunAudit:
    """Audit a run that wrote nothing but its journal and attempts: other files are not compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "compare_files", lambda found, ended, folder, bound: ())
        return audit_run(folder)


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


def test_without_checkpoints_a_publish_bounds_what_a_restart_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer_module, "MAX_EVENTS", 40)
    target = opened(tmp_path)
    target.advance(0, 0)
    longest = 0
    for step in range(1, 20):
        before = len(stored_kinds(tmp_path))
        learn(target, step)
        longest = max(longest, len(stored_kinds(tmp_path)))
        assert len(stored_kinds(tmp_path)) <= max(41, before)
    assert longest > 20, "not every publish pays for a snapshot"
    again = opened(tmp_path)
    again.resume(17, None)  # steps that are not settled can still be undone
    again.advance(20, 17)
    assert again.counts().is_balanced
    assert again.counts().consumed == 17 * PER_STEP
    assert audit_journal(tmp_path).audit.is_balanced


def test_the_audit_of_a_run_is_the_same_with_and_without_snapshots(tmp_path):
    reports = []
    for name in ("with", "without"):
        folder = tmp_path / name
        folder.mkdir()
        target = opened(folder)
        target.advance(0, 0)
        if name == "without":
            target._take_snapshot = lambda: None
        batches = {}
        for step in range(1, 8):
            batches[step] = set(learn(target, step))
            if step % 3 == 0:
                target.settle(step)
        target = opened(folder)
        target.resume(6, None)
        target.advance(8, 6)
        found = audit_journal(folder)
        assert found.audit.is_balanced, found.audit.problems
        mine = found.audit.batches()
        for group in found.ended:
            if not group.dropped_for:
                mine.setdefault(group.step, set()).add(group.group_id)
        assert mine == {step: batch for step, batch in batches.items() if step <= 6}
        told = json.loads(found.to_json())
        reports.append(told)
        assert (len(found.ended) > 0) == (name == "with")
        assert stored_kinds(folder).count("snapshot") == (name == "with")
    assert reports[0] == reports[1]


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


def change(folder: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(folder / FILE) as database:
        database.execute(statement, values)
    database.close()


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "UPDATE events SET reason = replace(reason, '\"consumed\":12', '\"consumed\":13')",
            "does not match",
        ),
        ("DELETE FROM events WHERE kind = 'snapshot'", "does not match"),
        ("UPDATE events SET seq = seq + 1000 WHERE kind = 'snapshot'", "does not match"),
        ("DELETE FROM events WHERE kind != 'snapshot'", "should end with event"),
        ("DELETE FROM events", "should end with event"),
    ],
)
def test_damage_of_a_snapshot_is_found(run, statement, told):
    change(run, statement)
    with pytest.raises(CheckpointError, match=told):
        opened(run)
    assert not audit_journal(run).audit.is_balanced


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE archive SET data = x'00' WHERE number = 1", "row 1 of the archive does not match"),
        (
            "UPDATE archive SET data = (SELECT data FROM archive WHERE number = 1)",
            "row 2 of the archive does",
        ),
        ("DELETE FROM archive WHERE number = 1", "row 2 of the archive does not match"),
        ("DELETE FROM archive WHERE number = 2", "should end with row 2, but ends with 1"),
        ("DELETE FROM archive", "should end with row 2, but ends with 0"),
    ],
)
def test_damage_of_the_archive_is_found_by_the_audit_and_stops_no_run(run, statement, told):
    change(run, statement)
    found = audit_journal(run)
    assert any(told in problem for problem in found.audit.problems), found.audit.problems
    learn(opened(run), 7)


def test_a_journal_without_an_archive_is_continued_and_gets_one(tmp_path):
    """As versions before snapshots wrote it."""
    target = opened(tmp_path)
    target.advance(0, 0)
    learn(target, 1)
    before = target.counts()
    target._journal.close()
    change(tmp_path, "DROP TABLE archive")
    change(
        tmp_path,
        "UPDATE facts SET value = '2', checksum = ? WHERE name = 'format'",
        row_checksum(("format", "2")),
    )
    assert audit_journal(tmp_path).audit.is_balanced
    again = opened(tmp_path)
    assert again.counts() == before
    learn(again, 2)
    assert again._journal.facts["format"] == "2"
    again.settle(2)
    assert again._journal.facts["format"] == "3"
    with Records.open(tmp_path / FILE) as records:
        assert records.facts()["format"] == "3"
        assert len(list(records.ended())) == 2 * PER_STEP + 2
    assert opened(tmp_path).counts() == again.counts()
    assert audit_journal(tmp_path).audit.is_balanced


def test_a_disk_that_is_full_leaves_the_events(tmp_path, monkeypatch):
    target = opened(tmp_path)
    target.advance(0, 0)
    learn(target, 1)
    write = Journal._write

    def full(journal: Journal, *statements, head=None) -> None:
        if any("archive" in statement for statement, _ in statements):
            raise JournalError("the disk is full")
        write(journal, *statements, head=head)

    monkeypatch.setattr(Journal, "_write", full)
    with pytest.raises(JournalError):
        target.settle(1)
    kinds = stored_kinds(tmp_path)
    assert kinds[-1] == "settled"
    assert "snapshot" not in kinds
    monkeypatch.undo()
    target.settle(1)  # the call is repeated
    assert stored_kinds(tmp_path) == ["snapshot"]
    assert audit_journal(tmp_path).audit.is_balanced
