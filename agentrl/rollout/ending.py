"""The exception with which a session ends its attempt."""

from __future__ import annotations

from agentrl.types import Outcome


class TrajectoryEnd(Exception):
    """The attempt is over with `outcome`.

    If an agent loop catches it, every further call of the session raises it again.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"the trajectory ended: {outcome.value}")
        self.outcome = outcome
