"""Counters of one rollout process. All except `in_flight` only grow; readers take differences."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Literal

import trio

from agentrl.types import Trajectory

Became = Literal["retried", "replaced", "masked", "left_out"]

SUMMED = (
    *("num_turns", "num_tool_calls", "num_tool_errors", "num_interruptions"),
    *("num_tool_retries", "num_tool_timeouts", "num_tool_failures", "num_cut_outputs"),
    *("generate_s", "tool_s", "interaction_s", "reward_s"),
)


class IdleTime:
    """Idle seconds since the first task started.

    Call `begin` and `end` around each task, from within trio.
    """

    def __init__(self) -> None:
        self._running = 0
        self._seconds = 0.0
        self._since: float | None = None
        self._now: Callable[[], float] = time.monotonic

    def begin(self) -> None:
        if self._since is not None:
            self._seconds += self._now() - self._since
            self._since = None
        self._running += 1

    @property
    def num_running(self) -> int:
        return self._running

    def end(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._now = (
                trio.lowlevel.current_clock().current_time
            )  # trio's clock is not accessible from other threads
            self._since = self._now()

    def seconds(self) -> float:
        """Return the total, including the current idle period. Thread-safe."""
        total, since = self._seconds, self._since
        return total if since is None else total + self._now() - since


class RolloutStats:
    """Counts attempts."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._in_flight = 0

    def begin(self) -> None:
        """Count an attempt that starts."""
        self._in_flight += 1

    def end(self) -> None:
        """Count an attempt that is over, finished or cancelled."""
        self._in_flight -= 1

    def finished(self, trajectory: Trajectory) -> None:
        """Count an attempt that returned a trajectory, with any outcome."""
        self._counts["finished"] += 1
        self._counts[f"outcome/{trajectory.outcome.value}"] += 1
        for name in SUMMED:
            self._counts[name] += trajectory.metrics.get(name, 0.0)

    def became(self, what: Became, trajectory: Trajectory) -> None:
        """Count what became of an attempt according to `rollout.on_outcome`."""
        self._counts[what] += 1
        self._counts[f"{what}/{trajectory.outcome.value}"] += 1

    def group_dropped(self, reason: str) -> None:
        self._counts["dropped_groups"] += 1
        self._counts[f"dropped_groups/{reason}"] += 1

    def group_withdrawn(self) -> None:
        self._counts["withdrawn_groups"] += 1

    def snapshot(self) -> dict[str, float]:
        """Return all counters. Thread-safe."""
        return {"in_flight": float(self._in_flight)} | dict(self._counts)
