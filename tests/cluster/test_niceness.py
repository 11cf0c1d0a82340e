"""The priority of Ray's workers: told if it costs a joined run most of its CPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from ray.cluster_utils import Cluster

from agentrl.cluster import cluster as fleet_cluster
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.niceness import NodeLoad, measure_nodes, starving
from agentrl.config.cluster import ClusterConfig


@pytest.mark.parametrize(
    ("niceness", "load", "is_told"), [(15, 2.5, True), (15, 2.0, False), (0, 9.0, False), (1, 2.1, True)]
)
def test_only_niced_workers_on_a_busy_machine_are_told(niceness, load, is_told):
    quiet = NodeLoad("10.0.0.1", 15, 0.1, 64)
    text = starving([quiet, NodeLoad("10.0.0.2", niceness, load, 2)])
    assert (text is not None) == is_told
    if text is not None:
        assert f"10.0.0.2 (niceness {niceness}, load {load:.1f} on 2 CPUs)" in text
        assert "10.0.0.1" not in text


@pytest.mark.slow
def test_workers_of_a_joined_ray_are_measured_and_told(monkeypatch):
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "_system_config": {"worker_niceness": 4},
        },
    )
    monkeypatch.setattr(
        fleet_cluster, "starving", lambda found: starving([replace(n, load=99.0) for n in found])
    )
    try:
        with ray_session(ClusterConfig(address=nodes.address)) as line:
            [node] = measure_nodes()
            assert node.niceness == os.nice(0) + 4
            assert f"(niceness {node.niceness}, load 99.0 on" in line
    finally:
        nodes.shutdown()
