"""Signals while a run starts: one line, exit code 130, nothing is left."""

import signal
import time

import pytest

pytestmark = pytest.mark.slow
INTERRUPTED = "interrupted; everything saved so far is kept, and the same command resumes"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", ["starting Ray", "Ray: "])
@pytest.mark.parametrize("twice", [False, True])
def test_a_signal_while_processes_start_ends_in_one_line(world, tmp_path, number, after, twice):
    command = world.start("train", str(world.config), f"trainer.run_dir={tmp_path / 'run'}")
    command.wait_until(lambda: after in command.output())
    time.sleep(1.5)  # Ray, servers and ranks start for seconds
    for _ in range(1 + twice):
        command.process.send_signal(number)
        time.sleep(0.3)
    assert command.wait(60) == 130, command.output()
    assert INTERRUPTED in command.output()
    assert "Traceback" not in command.output()
    assert command.left_behind(10) == []
