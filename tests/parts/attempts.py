"""Finished attempts for tests that read stored ones."""

from pathlib import Path

import numpy as np

from agentrl.data.trajectories import encode, write_parquet
from agentrl.types import NO_VERSION, Message, Outcome, RewardEvent, Trajectory


def attempt(
    question: str,
    accuracy: float | None,
    *,
    reward: float = 0.0,
    outcome: Outcome = Outcome.COMPLETED,
    known: bool = True,
):
    return Trajectory(
        group_id=0,
        member=0,
        task_id="eval:0",
        data_source="s",
        agent_name="single_turn_agent",
        token_ids=np.array([1, 2], np.int32),
        action_mask=np.array([False, True]),
        behavior_logprobs=np.zeros(2, np.float32),
        versions=np.array([NO_VERSION, 0], np.int32),
        turn_ids=np.array([-1, 0], np.int16),
        messages=(Message("system", "S"), Message("user", question), Message("assistant", "1")),
        rewards=(RewardEvent("r", reward, 1),),
        outcome=outcome,
        metrics={} if accuracy is None else {"accuracy": accuracy},
        extra_info={"question": question} if known else {},
    )


def attempts(path: Path, *trajectories: Trajectory) -> Path:
    write_parquet(path, encode(trajectories))
    return path
