"""Counters of one rollout process. All except `in_flight` only grow; readers take differences."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from agentrl.types import Trajectory

Became = Literal["retried", "replaced", "masked", "left_out"]

SUMMED = (
    *("num_turns", "num_tool_calls", "num_tool_errors", "num_interruptions"),
    *("num_tool_retries", "num_tool_timeouts", "num_tool_failures", "num_cut_outputs"),
    *("generate_s", "tool_s", "interaction_s", "reward_s"),
)


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
