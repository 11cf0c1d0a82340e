"""The limit of open files, each time in a process of its own that begins with a low one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.rollout.open_files import OTHER_FILES

PROGRAM = """
import resource, sys
from agentrl.errors import ConfigError
from agentrl.rollout.open_files import allow_trajectories

soft, hard, num_trajectories = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    allow_trajectories(num_trajectories)
except ConfigError as error:
    sys.exit(f"refused: {error}")
files = [open("/dev/null") for _ in range(num_trajectories)]
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def start(soft: int, hard: int, num_trajectories: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard), str(num_trajectories)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("hard", "reached"),
    [(4096, 2 * 300 + OTHER_FILES), (300 + OTHER_FILES, 300 + OTHER_FILES)],
    ids=["what it needs", "what there is"],
)
def test_a_low_limit_is_raised_and_as_many_files_open(hard, reached):
    done = start(64, hard, 300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(reached), str(hard)]


def test_a_higher_limit_stays():
    assert start(2000, 4096, 10).stdout.split() == ["2000", "4096"]


def test_a_hard_limit_that_is_too_low_is_one_line():
    done = start(64, 500, 300)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(
        f"refused: rollout.max_concurrent_trajectories=300 needs {300 + OTHER_FILES} open files"
    )
    assert "may have 500" in line
    assert f"at most {500 - OTHER_FILES} per actor" in line
