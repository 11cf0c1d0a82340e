"""Reports a joined Ray whose workers get little CPU. By default Ray starts workers at a low priority."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MEASURE_TIMEOUT_S = 30.0
"""For the start of one worker per node. Nodes that take longer are not reported."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node's niceness of workers, and its load: the mean number of runnable processes over a minute."""

    address: str
    niceness: int
    load: float
    num_cpus: int


def measure_nodes() -> list[NodeLoad]:
    """Start a task on each node and return what it sees; nodes that do not answer are left out."""
    measure = ray.remote(_measure)
    tasks = [
        measure.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    done, _ = ray.wait(tasks, num_returns=len(tasks), timeout=MEASURE_TIMEOUT_S)
    loads: list[NodeLoad] = []
    for task in done:
        with suppress(RayError):  # the node was lost meanwhile
            loads.append(ray.get(task, timeout=MEASURE_TIMEOUT_S))
    return loads


def _measure(address: str) -> NodeLoad:
    # The load counts the whole machine, so the CPUs do too.
    return NodeLoad(address, os.nice(0), os.getloadavg()[0], os.cpu_count() or 1)


def starving(nodes: Sequence[NodeLoad]) -> str | None:
    """Return a sentence about busy nodes whose workers are niced; None if there are none."""
    found = [
        f"{node.address} (niceness {node.niceness}, load {node.load:.1f} on {node.num_cpus} CPUs)"
        for node in nodes
        if node.niceness > 0 and node.load > node.num_cpus
    ]
    if not found:
        return None
    return (
        f"other programs get most of the CPU of {', '.join(found)}: to give this run the same share, start "
        "Ray there with RAY_worker_niceness=0 in its environment"
    )
