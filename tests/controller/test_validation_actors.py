"""What becomes of a validation when Ray's actors die, hang or refuse: real processes, without a run around
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from agentrl.cluster.rollouts import RolloutFleet
from agentrl.controller.run import Run
from agentrl.data.trajectories import encode, to_ipc
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.rollout.player import unplayed
from agentrl.rollout.recorder import Attempt
from agentrl.types import Failure, Message, Outcome, Task
from parts.local_ray import local_ray


class Player:
    """A rollout actor that does as it is told."""

    def play(self, what: str) -> bytes:
        match what:
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(600)
            case "refuse":
                raise ConfigError("a tool is unknown")
            case "break":
                raise ZeroDivisionError("a bug")
        attempt = Attempt(3, 1, Task("t:3", "s", (Message("user", "?"),), "single_turn_agent"))
        return to_ipc(encode([unplayed(attempt, Outcome.TIMEOUT, Failure("late"))]))


@pytest.fixture(scope="module")
def actors() -> Iterator:
    with local_ray(__name__):
        player = ray.remote(Player).options(num_cpus=0, max_concurrency=2)
        yield lambda what: player.remote().play.remote(what)


def test_what_was_played_comes_back_and_an_actor_that_died_is_told_apart_from_one_that_failed(actors):
    played, died, refused, broken = (actors(what) for what in ("play", "die", "refuse", "break"))
    (trajectory,) = RolloutFleet.collect(played)
    assert (trajectory.group_id, trajectory.member, trajectory.failure) == (3, 1, Failure("late"))
    assert RolloutFleet.collect(died) is None
    with pytest.raises(ConfigError, match="a tool is unknown"):
        RolloutFleet.collect(refused)
    with pytest.raises(InfrastructureError, match="a rollout actor failed: ZeroDivisionError: a bug"):
        RolloutFleet.collect(broken)


def test_waiting_ends_with_what_is_there_and_looks_after_the_run_meanwhile(actors):
    looks: list[int] = []
    run = SimpleNamespace(heal=lambda: looks.append(1))
    played, hanging, died = actors("play"), actors("hang"), actors("die")
    ray.wait([played, died], num_returns=2)  # how long their processes take to start is not what is tested
    assert set(Run.wait(run, [played, hanging, died], timeout_s=2.0)) == {played, died}
    assert looks, "servers and actors are healed while a validation is waited for"
    assert Run.wait(run, [played], timeout_s=2.0) == [played]
