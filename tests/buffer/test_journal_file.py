"""The file of a journal: what stands in it, who may read it meanwhile, and how each error is told."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.buffer import journal as module
from agentrl.buffer.checksums import NOTHING, Head, boot_id, count_line, row_checksum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.records import Records
from agentrl.errors import CheckpointError, JournalError

LEASED = Event(EventKind.LEASED, 0, "a")


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as database:
        return database.execute(query).fetchall()


def held(folder: Path) -> list[str]:
    """Files of `folder` that this process holds open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link) for link in links if str(folder) in os.path.realpath(link))


# ---------------------------------------------------------------------------------------------------- content


def test_the_content_of_a_file_by_hand(tmp_path):
    journal = Journal(tmp_path / FILE)
    journal.append([replace(LEASED, owner="ä")], {(0, "ä", 0): b"one", (0, "ä", 1): b"two"})
    journal.append([Event(EventKind.SETTLED, step=3)], {(0, "ä", 1): b"other"})
    journal.name_tasks({0: "t:0"})
    journal.name_tasks({0: "t:9", 1: "t:1"})
    journal.close()
    journal = Journal(tmp_path / FILE)
    journal.append([Event(EventKind.ADDED, 0, "a", 1, 2, 3, (4, 5), "why", 1)], {(0, "b", 0): b"more"})
    events = rows(
        tmp_path / FILE,
        "SELECT seq, kind, group_id, owner, member, step, version, versions, reason, accuracy FROM events",
    )
    assert events == [
        (1, "leased", 0, "ä", -1, -1, -1, "[]", "", None),
        (2, "settled", -1, "", -1, 3, -1, "[]", "", None),
        (3, "added", 0, "a", 1, 2, 3, "[4, 5]", "why", 1.0),
    ]
    attempts = rows(tmp_path / FILE, "SELECT number, group_id, owner, member, data FROM attempts")
    assert attempts == [(1, 0, "ä", 0, b"one"), (3, 0, "ä", 1, b"other"), (4, 0, "b", 0, b"more")]
    assert rows(tmp_path / FILE, "SELECT num_writes, num_events FROM head") == [(3, 3)]
    assert journal.num_bytes == len(b"one" + b"other" + b"more")
    with Records.open(tmp_path / FILE) as records:
        assert records.tasks() == {0: "t:0", 1: "t:1"}
        assert records.facts() == {"format": "3"}


def test_of_a_group_the_attempts_of_one_owner_may_be_forgotten(tmp_path):
    journal = Journal(tmp_path / FILE)
    journal.append([], {(0, owner, 0): owner.encode() for owner in "abc"})
    journal.forget_plays([(0, "b"), (0, "z"), (9, "a")])
    assert [journal.attempts(0, owner) for owner in "abc"] == [{0: b"a"}, {}, {0: b"c"}]
    journal.forget_others(0, "c")
    assert [journal.members(0, owner) for owner in "abc"] == [set(), set(), {0}]
    journal.forget_others(0, "c")
    journal.forget([0, 9])
    assert journal.num_bytes == 0


def test_a_head_is_damaged_if_any_of_its_columns_is_of_another_type():
    row = Head(7, 5, b"\1" * 16, b"\2" * 16).row
    assert Head.of_row(row) == Head(7, 5, b"\1" * 16, b"\2" * 16)
    assert Head() == Head(0, 0, NOTHING, NOTHING)
    for place in range(len(row)):
        for damaged in (None, "1", 1.5, b"\3" * 16, 8):
            assert Head.of_row((*row[:place], damaged, *row[place + 1 :])) is None


# -------------------------------------------------------------------------------------------- many processes


def test_others_read_one_moment_of_it_while_it_is_written(tmp_path):
    journal = Journal(tmp_path / FILE)
    journal.append([LEASED])
    with Records.open(tmp_path / FILE) as records:
        journal.append([LEASED])
        assert len(list(records.events())) == 1
    with Records.open(tmp_path / FILE) as records:
        assert len(list(records.events())) == 2


def test_a_write_waits_for_another_that_has_the_lock(tmp_path):
    journal = Journal(tmp_path / FILE)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    release.start()
    journal.append([LEASED])
    release.join()
    assert not journal.is_empty
    [(wait_ms,)] = journal._database.execute("PRAGMA busy_timeout").fetchall()
    assert wait_ms < 60_000, "a lock that nobody releases is told within a minute"


@pytest.mark.parametrize(("options", "level"), [({}, 1), ({"is_synced": True}, 2)])
def test_only_a_journal_that_is_synced_waits_for_the_disk_at_each_write(tmp_path, options, level):
    journal = Journal(tmp_path / FILE, **options)
    assert journal._database.execute("PRAGMA synchronous").fetchall() == [(level,)]


def test_a_closed_or_refused_journal_holds_no_file(tmp_path):
    journal = Journal(tmp_path / FILE)
    assert held(tmp_path)
    journal.append([LEASED])
    journal.close()
    journal.close()
    assert held(tmp_path) == []
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("UPDATE head SET num_events = 9")
    database.close()
    for look in (Journal, lambda path: Records.open(path).__enter__()):
        with pytest.raises(CheckpointError, match="its head does not match"):
            look(tmp_path / FILE)
        assert held(tmp_path) == []


# ---------------------------------------------------------------------------------------- what is there first


def empty_database(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (x)")
        database.execute("DROP TABLE t")
    database.close()


BEFORE = {
    "nothing": (lambda path: None, False, None),
    "the count alone": (lambda path: None, True, None),
    "an empty file": (Path.touch, False, None),
    "an empty file and the count": (Path.touch, True, None),
    "a database without tables": (empty_database, False, None),
    "a database that lost its tables": (empty_database, True, "its tables are missing"),
}


@pytest.mark.parametrize("before", BEFORE)
def test_a_journal_begins_where_there_is_none_yet(tmp_path, before):
    make, has_count, words = BEFORE[before]
    make(tmp_path / FILE)
    if has_count:
        (tmp_path / f"{FILE}-writes").write_bytes(count_line(0, boot_id()))
    if words:
        with pytest.raises(CheckpointError, match=words):
            Journal(tmp_path / FILE)
    else:
        journal = Journal(tmp_path / FILE)
        assert (journal.is_empty, journal.facts) == (True, {"format": "3"})
        journal.append([LEASED])
        assert [*Journal(tmp_path / FILE).events()] == [LEASED]


COUNTS = {
    "whole": (lambda line: line, None),
    "begun": (lambda line: b"", None),
    "cut": (lambda line: line[:-3], "its line does not match its checksum"),
    "another number": (lambda line: line.replace(b"1", b"0", 1), "its line does not match its checksum"),
    "no text": (lambda line: b"\xff" + line[1:], "its line does not match its checksum"),
    "no number": (lambda line: b"x" + line[1:], "its line does not match its checksum"),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_a_damaged_count_of_writes_is_told(tmp_path, kind):
    change, words = COUNTS[kind]
    journal = Journal(tmp_path / FILE)
    journal.append([LEASED])
    journal.close()
    count = tmp_path / f"{FILE}-writes"
    assert count.stat().st_mode & 0o777 == 0o644 & ~umask(), "others may read it"
    assert count.read_bytes() == count_line(1, boot_id())
    count.write_bytes(change(count.read_bytes()))
    for look in (Journal, lambda path: Records.open(path).__enter__()):
        if words is None:
            look(tmp_path / FILE)
            continue
        with pytest.raises(CheckpointError, match=f"{FILE}-writes: {words}"):
            look(tmp_path / FILE)


def umask() -> int:
    os.umask(mask := os.umask(0o022))
    return mask


def test_what_cannot_be_read_is_not_called_damaged(tmp_path):
    with pytest.raises(CheckpointError, match=f"{FILE} cannot be read: unable to open"):
        Records.open(tmp_path / FILE).__enter__()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"{FILE}-writes").mkdir()
    for look in (Journal, lambda path: Records.open(path).__enter__()):
        with pytest.raises(CheckpointError, match=f"{FILE}-writes cannot be read: Is a directory"):
            look(tmp_path / FILE)


# ----------------------------------------------------------------------------------------------------- errors


class Broken:
    """A database of which every statement fails."""

    in_transaction = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def execute(self, *statement: object) -> None:
        raise self._error

    def close(self) -> None:
        pass


def of_sqlite(code: int) -> sqlite3.Error:
    error = sqlite3.DatabaseError("it says why")
    error.sqlite_errorcode = code
    return error


FOREIGN_TEXT = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
DAMAGED = [
    of_sqlite(sqlite3.SQLITE_CORRUPT),
    of_sqlite(sqlite3.SQLITE_CORRUPT_VTAB),
    of_sqlite(sqlite3.SQLITE_NOTADB),
]
FULL = "the disk is full: the journal .* cannot be written; free space in "
UNWRITTEN = "the journal .* cannot be written: it says why; free space or make it writable"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        *((error, CheckpointError, "is damaged: it says why") for error in DAMAGED),
        (FOREIGN_TEXT, CheckpointError, "is damaged: its tables are malformed"),
        (of_sqlite(sqlite3.SQLITE_FULL), JournalError, FULL),
        (of_sqlite(sqlite3.SQLITE_READONLY), JournalError, UNWRITTEN),
        (of_sqlite(sqlite3.SQLITE_IOERR_WRITE), JournalError, UNWRITTEN),
        (sqlite3.ProgrammingError("it says why"), JournalError, UNWRITTEN),
    ],
)
def test_a_write_that_fails_is_told_by_its_cause(tmp_path, error, kind, words):
    journal = Journal(tmp_path / FILE)
    journal._database = Broken(error)
    changes = [lambda: journal.append([LEASED]), lambda: journal.set_fact("a", "b")]
    for change in [*changes, journal.sync] if isinstance(error, sqlite3.Error) else changes:
        with pytest.raises(kind, match=words):
            change()
    assert journal.is_empty
    assert "a" not in journal.facts


def test_a_journal_in_memory_has_no_disk(tmp_path):
    journal = Journal(None)
    journal._database = Broken(of_sqlite(sqlite3.SQLITE_FULL))
    with pytest.raises(JournalError, match="the journal in memory cannot be written: it says why"):
        journal.append([LEASED])


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, FULL), (errno.EACCES, "cannot be written: .*free space or make it")]
)
def test_a_count_that_cannot_be_written_is_told_by_its_cause(tmp_path, monkeypatch, code, words):
    def fail(path: Path) -> None:
        raise OSError(code, "it says why")

    monkeypatch.setattr(module, "WriteCount", fail)
    with pytest.raises(JournalError, match=words):
        Journal(tmp_path / FILE)


UNREACHABLE = [
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_PERM,
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "words"),
    [
        *((of_sqlite(code), "cannot be read: it says why") for code in UNREACHABLE),
        *((error, "is damaged: it says why") for error in DAMAGED),
        (sqlite3.OperationalError("it says why"), "is damaged: it says why"),
        (FOREIGN_TEXT, "is damaged: its tables are malformed"),
    ],
)
def test_a_read_that_fails_is_told_by_its_cause(error, words):
    with pytest.raises(CheckpointError, match=words):
        Records(Broken(error), Path(FILE)).facts()


def test_a_checksum_depends_on_the_record_and_on_all_before_it():
    first = row_checksum((1, "a"))
    found = {first, row_checksum((1, "b")), row_checksum((1, "a"), first), row_checksum(("1", "a"))}
    assert {len(checksum) for checksum in found} == {16}
    assert len(found) == 4
