"""The log of training attempts that a rollout process reports to the driver: counts of outcomes, and each
failure.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import PluginError
from agentrl.plugins.sources import Reference
from agentrl.rollout.recorder import CALLS_OF
from agentrl.tracking.attempts import AttemptCounts, Became, FailedAttempt
from agentrl.types import Failure, Lease, PluginId, Trajectory

MAX_KEPT = 100_000
"""Failures kept for the driver, which polls every second or once a step. The oldest are discarded first."""
MAX_REPORTED = 5_000
"""Failures in one report to the driver."""
MAX_SHARED = 1_000
"""Equal failures share one object.

This bounds the memory if a plugin fails with a different text each time.
"""
_GIVEN = frozenset({"tool", "interaction", "agent"})
"""Names among the `reward/` metrics that are sums of rewards given during the attempt, not names of rewards.
"""


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """Report of one process: `counts` since its start, failures from the requested position on, and the next
    position. warnings: what a person should know besides (`ToldWarnings`).
    """

    counts: AttemptCounts
    failed: tuple[FailedAttempt, ...]
    position: int
    warnings: tuple[str, ...] = ()


class AttemptLog:
    """Counts attempts and keeps failures until they are reported.

    Written by the event loop, read by other threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = AttemptCounts()
        self._failed: deque[FailedAttempt] = deque(maxlen=MAX_KEPT)
        self._end = 0  # number of failures ever recorded
        self._shared: dict[Failure, Failure] = {}

    def ended(self, trajectory: Trajectory, lease: Lease, became: Became | None) -> None:
        """Count an attempt. `became`: what happened to it; None only if it did not fail."""
        with self._lock:
            self._counts.outcomes[trajectory.outcome] += 1
            self._counts.used.update(plugins_of(trajectory, lease))
            if trajectory.failure is not None:
                assert became is not None, "a failed attempt is never trained on"
                shared = trajectory.replace(failure=self._share(trajectory.failure))
                self._note(FailedAttempt.of(shared, became=became, version=lease.version))

    def survived(
        self, trajectory: Trajectory, lease: Lease, failures: Sequence[Failure], *, is_training: bool
    ) -> None:
        """Record the failures that an attempt survived. Those of validation are not counted."""
        if not failures:
            return
        with self._lock:
            for failure in map(self._share, failures):
                self._keep(FailedAttempt.survived(trajectory, failure, version=lease.version))
            if is_training:
                last = (
                    None if trajectory.failure is None else trajectory.failure.plugin
                )  # counted when the attempt ends
                self._counts.failed.update(
                    {failure.plugin for failure in failures if failure.plugin not in (None, last)}
                )

    def since(self, position: int) -> AttemptReport:
        """Return the report from `position` on, and forget earlier failures, which the driver already has."""
        with self._lock:
            while self._failed and self._end - len(self._failed) < position:
                self._failed.popleft()
            first = self._end - len(self._failed)
            failed = tuple(self._failed[index] for index in range(min(MAX_REPORTED, len(self._failed))))
            return AttemptReport(AttemptCounts() + self._counts, failed, first + len(failed))

    def _note(self, failed: FailedAttempt) -> None:
        if failed.failure.plugin is not None:
            self._counts.failed[failed.failure.plugin] += 1
            self._counts.ended_by[failed.failure.plugin] += failed.became != "replaced"
        self._keep(failed)

    def _keep(self, failed: FailedAttempt) -> None:
        self._failed.append(failed)
        self._end += 1

    def _share(self, failure: Failure) -> Failure:
        if len(self._shared) == MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(failure, failure)


@functools.cache
def own_name(name: str) -> str:
    """Return a plugin's own name, by which failures name it. A row may name it as `file.py:Class`."""
    reference = Reference.parse(name)
    try:
        return name if reference is None else str(reference.load().name)
    except (AttributeError, PluginError):  # it could not be opened in the attempt either
        return name


def plugins_of(trajectory: Trajectory, lease: Lease) -> set[PluginId]:
    """Return the plugins of an attempt: agent, partner, environment, called tools, rewards that scored it,
    and the one that failed.
    """
    metrics, partner, environment = (
        trajectory.metrics,
        lease.task.interaction_kwargs,
        lease.task.environment_kwargs,
    )
    found = {PluginId("agent", trajectory.agent_name)}
    found |= {PluginId("tool", name.removeprefix(CALLS_OF)) for name in metrics if name.startswith(CALLS_OF)}
    rewards = {name.removeprefix("reward/") for name in metrics if name.startswith("reward/")} - _GIVEN
    found |= {PluginId("reward", name) for name in rewards if "/" not in name}
    if partner is not None and isinstance(name := partner.get("name"), str):
        found.add(PluginId("interaction", own_name(name)))
    if environment is not None and isinstance(name := environment.get("name"), str):
        found.add(PluginId("environment", own_name(name)))
    if trajectory.failure is not None and trajectory.failure.plugin is not None:
        found.add(trajectory.failure.plugin)
    return found
