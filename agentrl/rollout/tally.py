"""Metrics, waiting times and rewards collected during one attempt.

`Trajectory.metrics` of every attempt (numbers; seconds end in `_s`):
    num_turns, num_tool_calls, num_tool_errors (calls answered with an error),
    num_interruptions (how often a generation was interrupted and continued),
    num_tool_retries, num_tool_timeouts, num_tool_failures, num_cut_outputs (see Toolbox; absent when 0),
    num_forks (segments of a conversation after its first, because the context was edited),
    num_restarts (how often the agent restarted from other messages; absent when 0),
    num_opponent_turns, num_opponent_tokens, opponent_s (what opponents said; absent without one),
    generate_s, tool_s, interaction_s (waiting for servers, tools, the partner), reward_s (scoring),
    environment_s (starting the environment; absent without one),
    <tool>/<metric> of tools (sums), and the metrics that scoring adds (see scoring.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import trio

from agentrl.plugins.fields import check_number, check_type

_ALWAYS = ("num_tool_calls", "num_tool_errors", "num_interruptions", "generate_s", "tool_s", "interaction_s")
"""Metrics that an attempt reports even if they are 0."""


@dataclass(frozen=True, slots=True)
class GivenReward:
    """A reward that a tool, the partner or the agent loop itself gave for one assistant turn."""

    source: Literal["tool", "interaction", "agent"]
    name: str
    value: float
    turn: int

    def __post_init__(self) -> None:
        check_type(f"reward {self.name!r}", self.value, Real, "it must be a number")
        check_number(f"reward {self.name!r}", self.value)


class Tally:
    """Sums by metric name, and rewards in the order in which they were given. Create it within a trio run."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float, dict.fromkeys(_ALWAYS, 0.0))
        self._now = trio.lowlevel.current_clock().current_time  # `trio.current_time` looks it up at each call
        self.rewards: list[GivenReward] = []

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._sums

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a metric."""
        self._sums[name] += value

    def add(self, plugin: str, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a tool or the partner, as `<plugin>/<metric>`."""
        for name, value in metrics.items():
            self._sums[f"{plugin}/{name}"] += value

    def timed(self, name: str) -> _Timed:
        """Return a context that adds its seconds to a metric."""
        return _Timed(self._sums, name, self._now)


class _Timed:
    """Adds the duration of a block to a metric.

    A class, because a generator would cost more than a quick turn.
    """

    __slots__ = ("_name", "_now", "_started", "_sums")

    def __init__(self, sums: defaultdict[str, float], name: str, now: Callable[[], float]) -> None:
        self._sums = sums
        self._name = name
        self._now = now

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self._sums[self._name] += self._now() - self._started
