"""Nsight Systems around the ranks of a role, by a program of its name that writes down how it was called."""

import os
import sys

import pytest
from pydantic import ValidationError

from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import Seat
from agentrl.cluster.seats import check_nsight, recorded
from agentrl.config.profiler import NsightConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.learner.dispatch import dispatch
from parts.local_ray import local_ray

NSYS = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != python ] && [ "$1" != {python} ]; do shift; done
exec "$@"
"""


class Idle:
    def __init__(self, *, rank, address, port): ...

    @dispatch("all")
    def executable(self):
        return sys.executable


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """Put a program `nsys` on the path, of Ray's processes too, and return the file of its calls."""
    log = tmp_path / "calls"
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS.format(log=log, python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return log


def test_the_ranks_of_a_role_run_under_nsys_in_the_same_python(nsys, tmp_path):
    with local_ray(__name__):
        config = NsightConfig(roles=("actor",), options={"t": "nvtx", "stop-on-exit": "true"})
        check_nsight(config)
        seats = recorded({"actor": [Seat()], "servers": [Seat()]}, config, tmp_path / "my run")
        assert seats["servers"] == [Seat()]
        group = WorkerGroup.start(Idle, seats=seats["actor"], deadlines=CallDeadlines(60.0))
        try:
            assert os.path.realpath(group.run(Idle.executable)) == os.path.realpath(sys.executable)
        finally:
            group.stop()
    assert f"profile -o {tmp_path}/my run/actor_%p --stop-on-exit=true -t nvtx python" in nsys.read_text()


def test_without_the_program_or_the_role_a_run_does_not_begin(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check_nsight(NsightConfig())
    with pytest.raises(ConfigError, match=r"profiler.nsight needs the program nsys"):
        check_nsight(NsightConfig(roles=("actor",)))
    with pytest.raises(ValidationError, match="roles names reward_model, which this run does not have"):
        Config.model_validate({"profiler": {"nsight": {"roles": ["reward_model"]}}})
