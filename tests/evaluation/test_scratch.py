"""Temporary folders of evaluations: removed at the end, or by the next one if the process was killed."""

import contextlib
import signal
import subprocess
import sys
import tempfile

import pytest

from agentrl.evaluation.scratch import PREFIX, scratch_folder

OWNER = """
import sys, time
from agentrl.evaluation.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "server_0.log").write_text("ready")
    print(folder.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_removed_at_the_end_also_after_an_error(temporary):
    with contextlib.suppress(ValueError), scratch_folder() as folder:
        assert folder.parent == temporary
        (folder / "file").touch()
        raise ValueError
    assert not list(temporary.iterdir())


def test_the_next_evaluation_removes_what_a_killed_one_left_and_nothing_else(temporary):
    others = temporary / "agentrl-evaluated"
    others.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        left = temporary / owner.stdout.readline().strip()
        with scratch_folder() as beside:
            assert (left / "server_0.log").exists(), "its owner lives"
            assert left.name.startswith(PREFIX)
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            with scratch_folder():
                assert not left.exists()
                assert beside.exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert list(temporary.iterdir()) == [others]
