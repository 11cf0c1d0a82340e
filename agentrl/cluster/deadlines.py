"""Deadlines of calls to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.learner.dispatch import Dispatch


@dataclass(frozen=True, slots=True)
class CallDeadlines:
    """Time limits of calls: `collective_s` for each item of a rank, plus two more.

    Each item contains at least one collective, and a rank aborts by itself in a collective that takes longer.
    reading_s: what the start gets in addition, in which a rank reads its model.
    key: config key that the limit comes from.
    times: factor on all deadlines.
    of_threads: limits of calls on other threads (see `dispatch`), where they differ; by thread name.
    """

    collective_s: float
    key: str = "learner.collective_timeout_s"
    times: float = 1.0
    reading_s: float = 0.0
    of_threads: Mapping[str, CallDeadlines] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The config key and its value, for messages."""
        return f"{self.key}={self.collective_s:g}"

    @property
    def start_s(self) -> float:
        """The seconds in which all ranks must be ready."""
        return self.deadline_s(0) + self.reading_s

    @property
    def start_limit(self) -> str:
        """The origin of `start_s`, for messages."""
        return self.limit + (f", and {self.reading_s:.0f} s to read the model" if self.reading_s else "")

    def of(self, how: Dispatch) -> CallDeadlines:
        """Return the deadlines of a call with this dispatch."""
        return self if how.thread is None else self.of_threads.get(how.thread, self)

    def deadline_s(self, num_items: int) -> float:
        """Return the seconds that a call with `num_items` items per rank may take."""
        return self.collective_s * self.times * (num_items + 2)
