"""How a session ends its attempt from within."""

from __future__ import annotations

from agentrl.types import Outcome


class TrajectoryEnd(Exception):
    """The attempt is over with `outcome`; raised again by every further call, should an agent loop catch it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"the trajectory ended: {outcome.value}")
        self.outcome = outcome
