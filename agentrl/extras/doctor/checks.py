"""The table of checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import UserError


@dataclass(frozen=True, slots=True)
class Check:
    """A check: a module whose `diagnose(subject)` yields diagnoses.

    deadline_s: after which its process is killed.
    is_alone: measures speed, so no other check runs beside it.
    of_node: examines one machine, so `--cluster` runs it on every node.
    """

    name: str
    module: str
    deadline_s: float
    is_alone: bool = False
    of_node: bool = True


CHECKS = (
    Check("python", "agentrl.extras.doctor.interpreter", 20.0),
    Check("processor", "agentrl.extras.doctor.processor", 30.0, is_alone=True),
    Check("gpus", "agentrl.extras.doctor.gpus", 60.0, is_alone=True),
    Check("memory", "agentrl.extras.doctor.memory", 20.0),
    Check("limits", "agentrl.extras.doctor.limits", 20.0),
    Check("disks", "agentrl.extras.doctor.disks", 30.0, is_alone=True),
    Check("clock", "agentrl.extras.doctor.clock", 20.0),
    Check("network", "agentrl.extras.doctor.network", 20.0),
    Check("sandbox", "agentrl.extras.doctor.walls", 30.0),
    Check("ray", "agentrl.extras.doctor.ray_start", 60.0, of_node=False),
    Check("trackers", "agentrl.extras.doctor.trackers", 30.0, of_node=False),
    Check("template", "agentrl.extras.doctor.template", 30.0, of_node=False),
    Check("servers", "agentrl.extras.doctor.servers", 90.0, of_node=False),
    Check("frozen", "agentrl.extras.doctor.frozen", 600.0, of_node=False),
    Check("publish", "agentrl.extras.doctor.publish", 90.0, is_alone=True, of_node=False),
)
"""In the order of the report."""

CLUSTER = Check("cluster", "agentrl.extras.doctor.cluster", 150.0, of_node=False)
"""Runs the others on every node of the cluster. It has the time of a slow node."""

BY_NAME = {check.name: check for check in (*CHECKS, CLUSTER)}


def choose_checks(names: Sequence[str], *, on_cluster: bool) -> tuple[Check, ...]:
    """Return the checks to run here, in the order of the report.

    Args:
        names: of checks; none: all.
        on_cluster: checks of a node run on every node of the cluster instead of here.

    Raises:
        UserError: a name is unknown.
    """
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no check {unknown[0]!r}; available: {', '.join(known)}")
    chosen = [check for check in CHECKS if not names or check.name in names]
    if not on_cluster:
        return tuple(chosen)
    return (*(check for check in chosen if not check.of_node), CLUSTER)
