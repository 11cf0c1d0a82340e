"""How long calls of ranks may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.workers.dispatch import Dispatch


@dataclass(frozen=True, slots=True)
class CallDeadlines:
    """How long a call may take: `collective_s` per item of a rank, and two more.

    Each item holds at least one collective, and a rank in a collective that takes longer gives up by itself. key: of the config.
    of_threads: that of calls on threads of their own (see `dispatch`), where it is another.
    """

    collective_s: float
    key: str = "learner.collective_timeout_s"
    times: float = 1.0
    of_threads: Mapping[str, CallDeadlines] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        return f"{self.key}={self.collective_s:g}"

    def of(self, how: Dispatch) -> CallDeadlines:
        """Return the deadlines of a call that is dispatched so."""
        return self if how.thread is None else self.of_threads.get(how.thread, self)

    def deadline_s(self, num_items: int) -> float:
        return self.collective_s * self.times * (num_items + 2)
