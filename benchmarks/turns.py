"""A reward of batches for soak.py: the number of turns."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.plugins import Attempted, BatchReward, RewardResult


class Turns(BatchReward):
    """Counts turns."""

    name = "turns"

    def score(self, attempts: Sequence[Attempted]) -> list[RewardResult | None]:
        return [RewardResult(float(attempt.num_turns)) for attempt in attempts]
