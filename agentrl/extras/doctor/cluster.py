"""Check `cluster`: joins Ray, runs the checks of a machine on every node, and compares the nodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.cluster.cluster import ray_session
from agentrl.errors import InfrastructureError
from agentrl.extras.doctor.checks import BY_NAME
from agentrl.extras.doctor.clock import wall_clock
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.examine import examine
from agentrl.extras.doctor.nodes import NodeReport, compare_nodes, read_facts
from agentrl.extras.doctor.subject import Subject, existing

NODES_S = 110.0
"""For the checks of all nodes, which run side by side."""
ASK_S = 10.0
NUM_READINGS = 3
"""Of a node's clock; the fastest answer says most."""


def diagnose(subject: Subject, *names: str) -> Iterator[Diagnosis]:
    """Examine all nodes of the cluster. `names`: checks to run there."""
    cluster = subject.config.cluster
    joined = cluster if cluster.address is not None else cluster.model_copy(update={"address": "auto"})
    folder = existing(subject.run_folder)
    with (
        tempfile.NamedTemporaryFile(prefix=".agentrl-doctor-", dir=folder) as marker,
        ray_session(joined) as summary,
    ):
        yield Diagnosis("cluster", "ok", summary)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        reports: list[NodeReport] = []
        for report, failure in _examine_nodes(subject, nodes, names, marker.name):
            if failure is not None:
                yield failure
            if report is not None:
                reports.append(report)
                yield from (replace(own, node=report.address) for own in report.diagnoses)
        if reports:
            yield from compare_nodes(reports)


def examine_node(subject: str, names: Sequence[str], marker: str, address: str) -> str:
    """Run checks on the machine of this process; return a NodeReport as text.

    Args:
        subject: as text.
        marker: path of a file in the driver's run folder.
    """
    # Ray hides the GPUs from a task that reserved none; their check needs them all.
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    found = examine(Subject.parse(subject), [BY_NAME[name] for name in names])
    return NodeReport(address, read_facts(Path(marker)), tuple(found)).as_json()


def _examine_nodes(
    subject: Subject, nodes: dict[str, str], names: Sequence[str], marker: str
) -> Iterator[tuple[NodeReport | None, Diagnosis | None]]:
    """Yield the report of each node, or why there is none. `nodes`: id -> address."""
    tasks = {
        _on(examine_node, node).remote(
            subject.anchored().as_json(), names, str(Path(marker).resolve()), _named(nodes, node)
        ): node
        for node in nodes
    }
    done, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=NODES_S)
    for task in done:
        node = tasks[task]
        try:
            report = NodeReport.parse(ray.get(task, timeout=ASK_S))
        except RayError as error:
            yield None, _failed(_named(nodes, node), str(error).strip().splitlines()[-1])
        except InfrastructureError as error:
            yield None, _failed(_named(nodes, node), str(error))
        else:
            yield _with_clock(report, node), None
    for task in late:
        ray.cancel(task)  # it ends the processes of its checks; without this they outlive the command
    if late:
        ray.wait(late, num_returns=len(late), timeout=ASK_S)
    for task in late:
        yield None, _failed(_named(nodes, tasks[task]), f"gave no answer within {NODES_S:g} s")


def _on(function: Any, node: str) -> Any:
    """Return a remote function that runs on the node with this id, whatever else runs there."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where)


def _named(nodes: dict[str, str], node: str) -> str:
    """Return a name of a node: its address, with a part of its id if several nodes share one."""
    address = nodes[node]
    return address if list(nodes.values()).count(address) == 1 else f"{address} ({node[:6]})"


def _with_clock(report: NodeReport, node: str) -> NodeReport:
    """Add the difference between a node's clock and the one here, by the fastest of a few answers."""
    readings = []
    for _ in range(NUM_READINGS):
        before = wall_clock()
        try:
            there = ray.get(_on(wall_clock, node).remote(), timeout=ASK_S)
        except RayError:
            break
        after = wall_clock()
        readings.append((after - before, there - (before + after) / 2))
    if not readings:
        return report
    took_s, skew_s = min(readings)
    return replace(report, skew_s=skew_s, skew_error_s=took_s / 2)


def _failed(address: str, why: str) -> Diagnosis:
    cure = "the same agentrl on every node; `ray status`, and the node's logs in /tmp/ray/session_latest"
    return Diagnosis("node", "wrong", why, cure, node=address)
