"""Damage of a journal is found, wherever it is: what is read is what was written, or an error of ours says
which record is not.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.buffer import checksums
from agentrl.buffer.checksums import boot_id, count_line
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.records import Records
from agentrl.buffer.training_buffer import BufferSettings, open_journal, subject_of
from agentrl.config.schema import Config
from agentrl.data.attempt_files import FOLDER
from agentrl.errors import CheckpointError, JournalError
from parts.trajectories import make_trajectory, stored


def write(journal: Journal, folder: Path, *, groups: range) -> None:
    """Have groups be played by two owners, some trajectories be forgotten, and others stay."""
    for group in groups:
        owner = "ab"[group % 2]
        journal.append([Event(EventKind.LEASED, group, owner)])
        journal.name_tasks({group: f"task {group}"})
        for member in range(2):
            turns = [-1, *range(1 + 20 * (group % 7))]  # facts of some length: a run per turn
            played = make_trajectory(turns, group_id=group, member=member)
            [facts] = stored(played, folder=folder / FOLDER)
            data = facts.to_json()
            journal.append(
                [Event(EventKind.ADDED, group, owner, member, versions=(0,), accuracy=member / 3)],
                {(group, owner, member): data},
            )
        if group % 3 == 0:
            journal.append([Event(EventKind.DROPPED, group, reason="timeout")])
            journal.forget([group])


@dataclass(frozen=True)
class Content:
    """All that a journal says."""

    events: tuple[Event, ...]
    attempts: dict[tuple[int, str], dict[int, bytes]]

    @classmethod
    def of(cls, journal: Journal) -> Content:
        kept = [(group, owner) for group in range(100) for owner in "ab" if journal.members(group, owner)]
        return cls(tuple(journal.events()), {play: journal.attempts(*play) for play in kept})


@dataclass(frozen=True)
class Written:
    """A journal in `folder` as a run left it, and its content."""

    folder: Path
    content: Content

    def copied(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return folder


@pytest.fixture(scope="module", params=["closed", "killed"])
def written(request, tmp_path_factory):
    """A journal that was closed, or whose process died: then the newest writes are in SQLite's log."""
    folder, copy = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("copies") / "journal"
    journal = Journal(folder / FILE)
    journal.set_fact("max_staleness", "1")
    write(journal, folder, groups=range(20))
    journal.sync()
    write(journal, folder, groups=range(20, 30))
    content = Content.of(journal)
    assert len(content.events) > 90
    assert len(content.attempts) == 20
    if request.param == "closed":
        journal.close()
    shutil.copytree(folder, copy)
    assert (copy / f"{FILE}-wal").exists() == (request.param == "killed")
    journal.close()
    return Written(copy, content)


def read(folder: Path) -> Content | None:
    """Return what a resumed run reads; None if it is told of damage."""
    journal = None
    try:
        journal = Journal(folder / FILE)
        return Content.of(journal)
    except CheckpointError as error:
        told = str(error)
    finally:
        if journal is not None:
            journal.close()
    assert "\n" not in told
    return None


def set_row(query: str):
    """Return a change of a row by SQLite itself, after which every page of the file is in order."""

    def change(folder: Path) -> None:
        database = sqlite3.connect(folder / FILE)
        assert database.execute(query).rowcount > 0
        database.commit()
        database.close()

    return change


def cut_log(folder: Path) -> None:
    """Leave out the last writes, whose ends were seen by their process."""
    log = folder / f"{FILE}-wal"
    if log.exists():
        os.truncate(log, 32 + 3 * (24 + 4096))  # its head and three pages
    else:
        set_row("UPDATE head SET num_writes = num_writes - 1")(folder)


CHANGES = {
    "an event is another": (set_row("UPDATE events SET group_id = 7 WHERE seq = 12"), r"event 12 of \d+ "
    r".*events 1 to 11 are intact"),
    "the time of an event": (set_row("UPDATE events SET time = time + 1 WHERE seq = 12"), "event 12 of"),
    "an event is gone": (set_row("DELETE FROM events WHERE seq = 12"), "event 12 of"),
    "the last event is gone": (set_row("DELETE FROM events WHERE seq = (SELECT max(seq) FROM events)"),
    "should end with event"),
    "the first event is gone": (set_row("DELETE FROM events WHERE seq = 1"), "event 1 of"),
    "an event has no number": (set_row("UPDATE events SET member = x'00' WHERE seq = 12"), "event 12 of"),
    "an attempt is another": (
        set_row("UPDATE attempts SET data = zeroblob(length(data)) WHERE group_id = 5 AND member = 1"),
        "group 5, member 1, by 'b'"
    ),
    "an attempt is of another group": (
        set_row("UPDATE attempts SET group_id = 77 WHERE group_id = 5 AND member = 1"), "group 77, member 1"
    ),
    "an attempt is text": (set_row("UPDATE attempts SET owner = x'00' WHERE group_id = 5 AND member = 1"),
    "group 5, member 1"),
    "an attempt is shorter": (set_row("UPDATE attempts SET data = x'00' WHERE group_id = 5 AND member = 1"),
    "group 5, member 1"),
    "an attempt is gone": (set_row("DELETE FROM attempts WHERE group_id = 5 AND member = 1"), "one is "
    "missing, or one was not deleted"),
    "a forgotten one is there": (
        set_row("INSERT INTO attempts SELECT 999, group_id + 500, owner, member, checksum, data FROM "
        "attempts LIMIT 1"), "group 5"
    ),
    "the head is another": (set_row("UPDATE head SET num_events = num_events - 1"), "its head"),
    "a task is another": (set_row("UPDATE tasks SET task_id = 'x' WHERE group_id = 5"), "task of group 5"),
    "a fact is another": (set_row("UPDATE facts SET value = '9' WHERE name = 'max_staleness'"), "fact "
    "'max_staleness'"),
    "a write is lost": (cut_log, "writes are lost|its head"),
}  # fmt: skip


def test_writes_that_a_power_loss_took_are_no_damage(written, tmp_path):
    """`buffer.journal_sync=process` promises them for the death of a process only."""
    folder = written.copied(tmp_path / "restarted")
    cut_log_of_another_boot(folder)
    assert read(folder) is not None
    lost = Content.of(journal := Journal(folder / FILE))
    journal.close()
    assert lost.events == written.content.events[: len(lost.events)]


def cut_log_of_another_boot(folder: Path) -> None:
    count = folder / f"{FILE}-writes"
    number, boot, _ = count.read_text().split(" ")
    assert boot == boot_id()
    count.write_bytes(count_line(int(number) + 3, "00000000-0000-0000-0000-000000000000"))


def test_where_the_system_tells_no_boot_all_are_one(tmp_path, monkeypatch):
    for path, boot in ((tmp_path / "missing", "-"), (tmp_path / "boot", "a1-b2")):
        (tmp_path / "boot").write_text("a1-b2\n")
        monkeypatch.setattr(checksums, "_BOOT_ID", path)
        assert boot_id.__wrapped__() == boot


def test_a_run_that_begins_anew_does_not_read_what_it_gives_up(written, tmp_path):
    folder = written.copied(tmp_path / "anew")
    CHANGES["the head is another"][0](folder)
    names = {file.name for file in folder.iterdir()}
    config = Config()
    with pytest.raises(CheckpointError, match="its head"):
        open_journal(folder, BufferSettings.of(config), is_new=False)
    journal = open_journal(folder, BufferSettings.of(config), is_new=True)[0]
    assert journal.is_empty
    journal.close()
    assert {name.replace("ledger", "ledger_before_000") for name in names} <= {
        file.name for file in folder.iterdir()
    }
    again = open_journal(folder, BufferSettings.of(config), is_new=False)[0]
    assert again.is_empty
    again.close()


def test_a_journal_is_of_the_run_that_writes_it_also_where_one_before_wrote_no_event(tmp_path):
    first, second = Config(), Config.model_validate({"trainer": {"seed": 7}})
    for config in (first, second):
        open_journal(tmp_path, BufferSettings.of(config), is_new=False)[0].close()
    journal = open_journal(tmp_path, BufferSettings.of(second), is_new=False)[0]
    write(journal, tmp_path, groups=range(5))
    journal.close()
    again = open_journal(tmp_path, BufferSettings.of(second), is_new=False)[0]
    assert not again.is_empty
    again.close()
    assert open_journal(tmp_path, BufferSettings.of(first), is_new=False)[0].is_empty


@pytest.mark.parametrize("is_named", [True, False], ids=["settings known", "written by an older version"])
def test_a_journal_of_other_data_is_renamed_and_the_user_reads_why(tmp_path, is_named):
    first, second = (
        BufferSettings.of(Config.model_validate({"data": {"max_prompt_tokens": limit}}))
        for limit in (64, 128)
    )
    if is_named:
        journal, note = open_journal(tmp_path, first, is_new=False)
        assert note is None
    else:
        journal = Journal(tmp_path / FILE)
        journal.set_fact("subject", subject_of(first))
    write(journal, tmp_path, groups=range(5))
    journal.close()
    other, note = open_journal(tmp_path, second, is_new=False)
    other.close()
    assert other.is_empty
    changed = (
        "data.max_prompt_tokens was 64 and is 128;" if is_named else "one of these changed: data.train_files"
    )
    assert note.startswith(f"the journal belongs to other data: {changed}")
    assert "renamed to ledger_before_000.sqlite, and a new one begins" in note
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    for file in tmp_path.glob("ledger_before_000.sqlite*"):  # the cure, as the line says it
        file.rename(tmp_path / file.name.replace("ledger_before_000", "ledger"))
    again, note = open_journal(tmp_path, first, is_new=False)
    assert note is None
    assert not again.is_empty
    again.close()


def test_a_write_that_failed_left_the_journal_whole(tmp_path):
    journal = Journal(tmp_path / FILE)
    write(journal, tmp_path, groups=range(5))
    before = Content.of(journal)
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(
        JournalError,
        match=f"the disk is full: the journal .* cannot be written; free space in {tmp_path} to continue",
    ):
        write(journal, tmp_path, groups=range(5, 50))
    journal.close()
    again = Journal(tmp_path / FILE)
    events = tuple(again.events())
    assert events[: len(before.events)] == before.events
    with Records.open(tmp_path / FILE) as records:
        assert len(records.attempts()) == sum(
            len(again.attempts(group, owner)) for group in range(50) for owner in "ab"
        )
    again.close()
