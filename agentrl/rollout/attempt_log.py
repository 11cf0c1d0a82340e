"""What a rollout process tells the driver of its attempts of training: how all of them ended, and each that failed."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from agentrl.rollout.recorder import CALLS_OF
from agentrl.tracking.attempts import AttemptCounts, Became, FailedAttempt
from agentrl.types import Failure, Lease, Outcome, PluginId, Trajectory

MAX_KEPT = 100_000
"""Failures that wait for the driver, which asks every second, or once a step; the oldest go first."""
MAX_REPORTED = 5_000
"""In one answer to the driver."""
MAX_SHARED = 1_000
"""Equal failures are one object; a plugin that fails with another text each time is not worth more memory than that."""
_GIVEN = frozenset({"tool", "interaction", "agent"})
"""Sums of what was given during the attempt stand among the metrics of rewards."""


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """What one process says: `counts` since its start; failures from the asked position on, and the position behind them."""

    counts: AttemptCounts
    failed: tuple[FailedAttempt, ...]
    position: int


class AttemptLog:
    """Counts attempts, and keeps failures until they were asked for. Written by the event loop, read from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = AttemptCounts()
        self._failed: deque[FailedAttempt] = deque(maxlen=MAX_KEPT)
        self._end = 0  # failures ever noted
        self._shared: dict[Failure, Failure] = {}

    def ended(self, trajectory: Trajectory, lease: Lease, became: Became) -> None:
        """Count an attempt; `became` says what follows if it failed."""
        with self._lock:
            self._counts.outcomes[trajectory.outcome] += 1
            self._counts.used.update(plugins_of(trajectory, lease))
            if trajectory.failure is not None:
                shared = trajectory.replace(failure=self._share(trajectory.failure))
                self._note(FailedAttempt.of(shared, became=became, version=lease.version))

    def went_on(self, trajectory: Trajectory, lease: Lease, survived: list[Failure], *, is_training: bool) -> None:
        """Note failures after which an attempt went on, and forget them; those of validation are not counted."""
        if not survived:
            return
        with self._lock:
            for failure in map(self._share, survived):
                record = trajectory.replace(failure=failure, outcome=Outcome.TOOL_ERROR)
                self._keep(FailedAttempt.of(record, became="went_on", version=lease.version))
            if is_training:
                last = None if trajectory.failure is None else trajectory.failure.plugin  # counted when the attempt ends
                self._counts.failed.update({failure.plugin for failure in survived if failure.plugin not in (None, last)})
        survived.clear()

    def since(self, position: int) -> AttemptReport:
        """Return what was noted from `position` on, and forget what came before it: the driver has that."""
        with self._lock:
            while self._failed and self._end - len(self._failed) < position:
                self._failed.popleft()
            first = self._end - len(self._failed)
            failed = tuple(self._failed[index] for index in range(min(MAX_REPORTED, len(self._failed))))
            return AttemptReport(AttemptCounts() + self._counts, failed, first + len(failed))

    def _note(self, failed: FailedAttempt) -> None:
        if failed.failure.plugin is not None:
            self._counts.failed[failed.failure.plugin] += 1
        self._keep(failed)

    def _keep(self, failed: FailedAttempt) -> None:
        self._failed.append(failed)
        self._end += 1

    def _share(self, failure: Failure) -> Failure:
        if len(self._shared) == MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(failure, failure)


def plugins_of(trajectory: Trajectory, lease: Lease) -> set[PluginId]:
    """Return who took part in an attempt: its agent, partner, tools that were called, rewards that scored it, and whoever failed it."""
    metrics, partner = trajectory.metrics, lease.task.interaction_kwargs
    found = {PluginId("agent", trajectory.agent_name)}
    found |= {PluginId("tool", name.removeprefix(CALLS_OF)) for name in metrics if name.startswith(CALLS_OF)}
    rewards = {name.removeprefix("reward/") for name in metrics if name.startswith("reward/")} - _GIVEN
    found |= {PluginId("reward", name) for name in rewards if "/" not in name}
    if partner is not None and isinstance(name := partner.get("name"), str):
        found.add(PluginId("interaction", name))
    if trajectory.failure is not None and trajectory.failure.plugin is not None:
        found.add(trajectory.failure.plugin)
    return found
