"""The audit finds every damage of a journal."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.records import FORMAT, Records
from agentrl.data.attempt_files import FOLDER
from agentrl.errors import CheckpointError
from agentrl.extras.research.audit import audit_run
from parts.trajectories import make_trajectory, stored

NUM_FLIPS = 2000
"""In all, a part of it in the fast sample."""


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


def flip(folder: Path, rng: random.Random) -> str:
    """Change one byte of one of the files, and return which."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    sizes = [file.stat().st_size for file in files]
    [file] = rng.choices(files, sizes)
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data))
    data[place] ^= rng.randrange(1, 256)
    file.write_bytes(data)
    return f"{file.name} at {place}"


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


def is_found_by_audit(folder: Path) -> bool:
    try:
        return any("is damaged" in problem for problem in audit_run(folder).audit.problems)
    except CheckpointError:
        return True


def no_flip_is_unseen(written: Written, folder: Path, seeds: range) -> int:
    """Return how many flips were found; all others have left the content as it was."""
    num_found = 0
    for seed in seeds:
        place = flip(written.copied(folder), random.Random(seed))
        shutil.copytree(folder, folder.with_name("audited"), dirs_exist_ok=False)
        content = read(folder)
        assert content in (None, written.content), place
        if content is None:
            assert is_found_by_audit(folder.with_name("audited")), place
        shutil.rmtree(folder.with_name("audited"))
        num_found += content is None
    return num_found


def test_a_sample_of_flipped_bytes_is_seen(written, tmp_path):
    assert no_flip_is_unseen(written, tmp_path / "flipped", range(100)) > 25


@pytest.mark.slow
def test_two_thousand_flipped_bytes_are_seen(written, tmp_path):
    assert no_flip_is_unseen(written, tmp_path / "flipped", range(1000, 1000 + NUM_FLIPS)) > NUM_FLIPS // 4


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


def read_all(folder: Path) -> None:
    with Records.open(folder / FILE) as records:
        list(records.events())
        for attempt in records.attempts():
            records.data_of(attempt)
        records.tasks()
        records.facts()


@pytest.mark.parametrize("kind", CHANGES)
def test_each_kind_of_damage_names_its_record_and_what_can_be_saved(written, tmp_path, kind):
    change, words = CHANGES[kind]
    folder = written.copied(tmp_path / "changed")
    change(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_all(folder)
    assert f"Move {folder / FILE}* away to continue from the newest checkpoint" in str(caught.value)
    assert is_found_by_audit(folder)


def test_a_whole_journal_is_balanced_and_its_attempts_are_counted(written, tmp_path):
    found = audit_run(written.copied(tmp_path / "whole"))
    assert not [problem for problem in found.audit.problems if "damaged" in problem]
    assert "stored attempts: 40 of 40 are intact" in found.lines()


def test_a_change_of_one_attempt_is_one_problem_of_the_audit(written, tmp_path):
    folder = written.copied(tmp_path / "changed")
    CHANGES["an attempt is another"][0](folder)
    found = audit_run(folder)
    assert found.audit.num_problems == 1
    assert "stored attempts: 39 of 40 are intact" in found.lines()


OLD = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO facts VALUES ('format', '1');
"""


def test_a_journal_without_checksums_is_answered_with_the_cure(tmp_path):
    database = sqlite3.connect(tmp_path / FILE)
    database.executescript(OLD)
    database.close()
    for look in (lambda: Journal(tmp_path / FILE), lambda: audit_run(tmp_path)):
        with pytest.raises(
            CheckpointError,
            match=f"has format 1, this version reads 2 and {FORMAT}: .* or move .*{FILE}\\* away",
        ):
            look()
