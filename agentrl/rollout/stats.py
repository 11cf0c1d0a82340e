"""Counters of one rollout process. All only grow, but for `in_flight`, so that a reader takes differences."""

from __future__ import annotations

from collections import defaultdict

import trio

from agentrl.types import Trajectory

SUMMED = ("num_turns", "num_tool_calls", "num_tool_errors", "num_interruptions", "generate_s", "tool_s", "interaction_s", "reward_s")


class RolloutStats:
    """Counts attempts. `idle_s`: seconds with no attempt in flight, since the first was begun."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._in_flight = 0
        self._idle_since: float | None = None

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def begin(self) -> None:
        """An attempt starts."""
        if self._in_flight == 0 and self._idle_since is not None:
            self._counts["idle_s"] += trio.current_time() - self._idle_since
        self._in_flight += 1

    def end(self) -> None:
        """An attempt is over, finished or cancelled."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle_since = trio.current_time()

    def finished(self, trajectory: Trajectory) -> None:
        """An attempt gave a trajectory, of whatever outcome."""
        self._counts["finished"] += 1
        self._counts[f"outcome/{trajectory.outcome.value}"] += 1
        self._counts["tokens"] += trajectory.num_tokens
        self._counts["action_tokens"] += trajectory.num_action_tokens
        for name in SUMMED:
            self._counts[name] += trajectory.metrics.get(name, 0.0)

    def retried(self, trajectory: Trajectory) -> None:
        self._counts["retried"] += 1
        self._counts[f"retried/{trajectory.outcome.value}"] += 1

    def group_dropped(self, reason: str) -> None:
        self._counts["dropped_groups"] += 1
        self._counts[f"dropped_groups/{reason}"] += 1

    def snapshot(self) -> dict[str, float]:
        """Return all counters; safe to call from another thread."""
        return {"in_flight": float(self._in_flight)} | dict(self._counts)
