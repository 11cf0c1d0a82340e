"""The journal on file systems on which processes cannot share memory by a file: SQLite has no log there."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.buffer import journal as module
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.file_systems import is_shared
from agentrl.buffer.journal import FILE, Journal
from agentrl.errors import JournalError

LEASED = [Event(EventKind.LEASED, group, "a") for group in range(3)]


@pytest.fixture(params=["known to be shared", "no shared memory", "a VFS without shared memory"])
def folder(request, tmp_path, monkeypatch) -> Path:
    """A folder in which the log cannot work: SQLite is told so, finds out, or has not the means."""
    if request.param == "known to be shared":
        monkeypatch.setattr(module, "is_shared", lambda path: True)
    elif request.param == "no shared memory":
        (tmp_path / f"{FILE}-shm").mkdir()  # the file that would be mapped cannot be made
    else:

        def connected(path: Path) -> sqlite3.Connection:
            return sqlite3.connect(f"file:{path}?vfs=unix-dotfile", uri=True, isolation_level=None)

        monkeypatch.setattr(module, "_connected", connected)
    return tmp_path


def mode_of(journal: Journal) -> str:
    return journal._database.execute("PRAGMA journal_mode").fetchone()[0]


def test_a_journal_is_written_and_read_again(folder):
    journal = Journal(folder / FILE)
    assert mode_of(journal) == "truncate"
    journal.append(LEASED[:2], {(0, "a", 0): b"data"})
    journal.sync()
    again = Journal(folder / FILE)  # nothing was closed
    assert [*again.events()] == LEASED[:2]
    assert again.attempts(0, "a") == {0: b"data"}
    again.append(LEASED[2:])
    again.close()
    assert [*Journal(folder / FILE).events()] == LEASED


def test_the_levels_of_durability(folder):
    for is_synced, level in ((False, 0), (True, 2)):
        journal = Journal(folder / FILE, is_synced=is_synced)
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (level,)
        journal.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_journal_with_a_log_is_continued_without_one(tmp_path, monkeypatch, is_known):
    """The run's folder was moved; its process had died, so the newest writes are in the log."""
    before, after = tmp_path / "local", tmp_path / "shared"
    before.mkdir()
    (after / f"{FILE}-shm").mkdir(parents=True)
    journal = Journal(before / FILE)
    assert mode_of(journal) == "wal"
    journal.append(LEASED)
    for name in (FILE, f"{FILE}-wal", f"{FILE}-writes"):
        shutil.copy(before / name, after)
    journal.close()
    monkeypatch.setattr(module, "is_shared", lambda path: is_known)
    again = Journal(after / FILE)
    assert mode_of(again) == "truncate"
    assert [*again.events()] == LEASED


WRITER = """
import sys
from agentrl.buffer import journal as module
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import Journal
module.is_shared = lambda path: True
journal = Journal(module.Path(sys.argv[1]))
number = 0
while True:
    journal.append([Event(EventKind.LEASED, number, "a")], {(number, "a", 0): bytes(5000)})
    number += 1
    print(number, flush=True)
"""


def test_what_was_acknowledged_survives_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_shared", lambda path: True)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / FILE)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    while (told := int(writer.stdout.readline())) < 20:
        pass
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    journal = Journal(tmp_path / FILE)
    groups = [event.group_id for event in journal.events()]
    assert groups == list(range(len(groups)))
    assert len(groups) >= told
    assert all(journal.attempts(group, "a") == {0: bytes(5000)} for group in groups)


def test_a_folder_that_cannot_be_written_is_not_taken_for_a_shared_one(tmp_path):
    with pytest.raises(JournalError, match=r"nowhere/ledger\.sqlite cannot be written: unable to open"):
        Journal(tmp_path / "nowhere" / FILE)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:5 / /mnt/team rw - nfs4 server:/team rw
31 30 0:6 / /mnt/team/fast rw - ext4 /dev/sdb1 rw
32 22 0:7 / /mnt/with\\040space rw master:1 - cifs //server/x rw
33 22 0:8 / /buckets rw - fuse.s3fs s3fs rw
34 22 0:9 / /over rw - nfs4 server:/x rw
35 22 0:10 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/home/me/runs/ledger.sqlite", False),
        ("/mnt/team/runs/ledger.sqlite", True),
        ("/mnt/teammate/ledger.sqlite", False),
        ("/mnt/team/fast/ledger.sqlite", False),
        ("/mnt/with space/ledger.sqlite", True),
        ("/buckets/a/ledger.sqlite", True),
        ("/over/ledger.sqlite", False),
    ],
)
def test_the_file_system_of_a_path(path, shared, tmp_path):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert is_shared(Path(path), tmp_path / "mountinfo") is shared
    assert is_shared(Path(path), tmp_path / "none") is False
