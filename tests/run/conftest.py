"""A whole run without any extra: the real Ray, learner and buffer, and servers of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentrl.cluster.cluster import ray_session
from agentrl.config.cluster import ClusterConfig
from parts.core_world import write_core_world
from parts.run_world import World, ended_commands


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return write_core_world(tmp_path_factory.mktemp("core_world"))


@pytest.fixture(autouse=True)
def no_run_outlives_its_test(world: World) -> Iterator[None]:
    with ended_commands(world):
        yield


@pytest.fixture(scope="module")
def one_ray():
    """One Ray for all runs of a file."""
    with ray_session(ClusterConfig()):
        yield
