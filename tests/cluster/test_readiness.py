"""The table of a start: what stands and what is waited for is said again and again until all stands, and kept
with the seconds it took.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping

import pytest

from agentrl.cluster.readiness import StartUp
from agentrl.cluster.starting import wait_until_all_ready
from agentrl.errors import ServerError
from agentrl.servers.startup import Readiness


class Part:
    """A part of which `num_ready` of two stand; it fails when `error` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_ready = 0
        self.error: Exception | None = None
        self.looks = 0
        self.waits_for = ""

    @property
    def starting(self) -> Mapping:
        return {}

    @property
    def readiness(self) -> Readiness:
        self.looks += 1
        may_come = self.num_ready < 2 and self.error is None
        return Readiness(self.name, self.num_ready, 2, may_come, self.waits_for)

    def wait_until_ready(self) -> None:
        if self.error is not None:
            raise self.error


def test_it_says_what_a_part_waits_for():
    start_up = StartUp(lambda text: None)
    waiting = Part("servers")
    waiting.waits_for = "rollout.urls: http://127.0.0.1:9: Connection refused"
    start_up.add(waiting, Part("learner"))
    assert start_up.line() == f"servers 0/2 (0 s; {waiting.waits_for}), learner 0/2 (0 s)"


def test_it_says_what_stands_until_all_does(tmp_path):
    said: queue.Queue[str] = queue.Queue()
    servers, learner = Part("servers"), Part("learner")
    with StartUp(said.put, interval_s=0.01) as start_up:
        start_up.add(servers, learner)
        with start_up.step("replay buffer"):
            assert (
                said.get(timeout=20)
                == "starting: servers 0/2 (0 s), learner 0/2 (0 s), replay buffer 0/1 (0 s)"
            )
            servers.num_ready = 2
        while "servers 2/2, learner 0/2 (0 s), replay buffer 1/1" not in said.get(timeout=20):
            pass
        learner.num_ready = 2
        start_up.finish(tmp_path / "readiness.txt")
    rows = [line.split() for line in (tmp_path / "readiness.txt").read_text().splitlines()]
    assert [(row[:-3], row[-3]) for row in rows] == [
        (["servers"], "2/2"),
        (["learner"], "2/2"),
        (["replay", "buffer"], "1/1"),
    ]
    assert not start_up._thread.is_alive(), "it says no more"


def test_a_part_that_only_a_look_tells_of_is_waited_for():
    part, other = Part("servers"), Part("learner")
    other.num_ready = 2

    class Comes(Part):
        @property
        def readiness(self) -> Readiness:
            self.num_ready = min(2, self.looks)
            return super().readiness

    coming = Comes("attached")
    wait_until_all_ready([other, coming])
    assert coming.num_ready == 2
    part.error = ServerError("http://there did not generate", status=None)
    with pytest.raises(
        ServerError, match=r"^http://there did not generate; start-up: servers 0/2$"
    ) as raised:
        wait_until_all_ready([other, part], table=lambda: "servers 0/2")
    assert raised.value.status is None


def test_what_is_said_never_ends_a_start():
    def refuse(text: str) -> None:
        raise ValueError(text)

    with StartUp(refuse, interval_s=0.001) as start_up:
        start_up.add(Part("servers"))
        start_up._thread.join(20)
        assert not start_up._thread.is_alive()
