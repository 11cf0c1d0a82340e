"""Ray kills a process when its node runs out of memory, and reports that as an error of its own. It is a
death like any other, and the message says why.

The cluster of this file takes any use of memory for too much, so every process is killed soon.
"""

from __future__ import annotations

import sys
import time

import pytest
import ray

from agentrl.cluster.actors import ActorKind
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import Seat
from agentrl.cluster.starting import wait_until_all_ready
from agentrl.config.cluster import ClusterConfig
from agentrl.errors import InfrastructureError, RankLost
from agentrl.learner.dispatch import dispatch
from parts.ranks import run_program

KILLED = r"Ray killed it because the node ran out of memory \(\d+\.\d+GB of \d+\.\d+GB in use\)"


class Sleeper:
    """An object of an actor, or of a rank."""

    def __init__(self, *, rank: int = 0, address: str = "", port: int = 0) -> None:
        """What a rank is told is not used."""

    @dispatch("all")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_a_process_that_ray_kills_for_want_of_memory_has_died(monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.0")
    run_program(__file__, timeout_s=200)


def an_actor_is_killed() -> None:
    actor = ActorKind("Sleeper", "the sleeper", timeout_s=60.0, num_threads=1).launch({}, Sleeper)
    with pytest.raises(InfrastructureError, match=f"^the sleeper died: {KILLED}$"):
        actor.run(Sleeper.sleep, 50.0)


def a_rank_is_killed() -> None:
    group = WorkerGroup.launch(Sleeper, seats=[Seat()], name="learner", deadlines=CallDeadlines(60.0))

    def use() -> None:
        wait_until_all_ready([group])
        group.run(Sleeper.sleep, 50.0)

    try:
        with pytest.raises(RankLost, match=rf"^learner rank 0 was lost during '\w+': {KILLED}$"):
            use()
    finally:
        group.stop()


if __name__ == "__main__":
    with ray_session(ClusterConfig()):
        ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
        an_actor_is_killed()
        a_rank_is_killed()
