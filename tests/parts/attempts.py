"""Finished attempts for tests that read stored ones."""

from pathlib import Path
from typing import Any

from agentrl.data.trajectories import encode, write_parquet
from agentrl.figures.attempts import EvaluatedAttempt
from agentrl.types import Message, Outcome, Trajectory
from parts.trajectories import make_trajectory


def attempt(
    question: str,
    accuracy: float | None,
    *,
    reward: float = 0.0,
    outcome: Outcome = Outcome.COMPLETED,
    known: bool = True,
) -> Trajectory:
    return make_trajectory(
        [-1, 0],
        task_id="eval:0",
        agent_name="single_turn_agent",
        token_ids=[1, 2],
        messages=(Message("system", "S"), Message("user", question), Message("assistant", "1")),
        reward=reward,
        outcome=outcome,
        metrics={} if accuracy is None else {"accuracy": accuracy},
        extra_info={"question": question} if known else {},
    )


def evaluated(problem: str, member: int, accuracy: float | None = 1.0, **fields: Any) -> EvaluatedAttempt:
    """Return what an evaluation's figures know of one attempt; it failed if `accuracy` is None."""
    values: dict[str, Any] = {
        "source": "gsm8k",
        "problem": problem,
        "member": member,
        "accuracy": accuracy,
        "reward": accuracy,
        "answer": None if accuracy is None else str(accuracy),
        "format": None if accuracy is None else 1.0,
        "is_truncated": False,
        "num_tokens": 10,
        "num_turns": 1,
        "num_tool_calls": 0,
        "num_tool_errors": 0,
        "failure": "no server answered" if accuracy is None else None,
        "difficulty": None,
        "agent": "tool_agent",
    }
    return EvaluatedAttempt(**{**values, **fields})


def attempts(path: Path, *trajectories: Trajectory) -> Path:
    write_parquet(path, encode(trajectories))
    return path
