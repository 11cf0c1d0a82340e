"""A live run is audited between its writes, on the file systems that journals know."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from agentrl.buffer import journal as module
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.records import Records
from agentrl.data.attempt_files import FOLDER
from agentrl.extras.research.audit import audit_run
from agentrl.tracking.versions import VERSIONS
from parts.trajectories import Rows


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


def test_a_live_run_is_audited_between_its_writes(folder):
    target = ReplayBuffer(Rows(), LedgerRules(2, 1, 2), folder / FOLDER, journal=Journal(folder / FILE))
    target.advance(0, 0)
    (folder / "config.yaml").write_text("trainer: {keep_trajectories: true}\n")
    (folder / VERSIONS).write_text('{"version": 0, "step": 0, "what": "policy"}\n')
    for _ in range(3):
        target.lease("a", 1, 0.0)
        found = audit_run(folder)
        assert found.audit.is_balanced, found.audit.problems
        assert found.audit.counts()["leased"] == target.counts().leased
    with Records.open(folder / FILE) as records:
        assert len(list(records.events())) == 4
    target.settle(0)
    target.advance(1, 1)
