"""Two rewards that chaos.py gives a run, so that it has the processes in which rewards run."""

from __future__ import annotations

from collections.abc import Sequence

import agentrl.plugins as rl


class KillProcess(rl.Reward):
    """Runs in a process of its own."""

    name = "kill_process"
    runs_in = "process"

    def score(self, attempt: rl.Attempted) -> rl.RewardResult:
        return rl.RewardResult(float(attempt.num_turns))


class KillBatch(rl.BatchReward):
    """Runs in the scorer of batches."""

    name = "kill_batch"

    def score(self, attempts: Sequence[rl.Attempted]) -> list[rl.RewardResult]:
        return [rl.RewardResult(float(attempt.num_turns)) for attempt in attempts]
