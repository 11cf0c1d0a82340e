"""The reward that the tests of a terminal task gave."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn


class TerminalReward(Reward):
    """`reward` among the environment's facts, such as those of `terminal`. None if there is none."""

    name: ClassVar[str] = "terminal"
    runs_in: RunsIn = "inline"

    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if the attempt had no such environment."""
        value = attempt.facts.get("reward")
        return None if value is None else RewardResult(float(value))
