"""Tasks, attempts and trajectories: a test names what it is about, the rest is filled in."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import AttemptFiles
from agentrl.plugins import Attempted
from agentrl.types import NO_VERSION, Group, Lease, Message, Outcome, RewardEvent, Task, Trajectory

DTYPES = {"token_ids": np.int32, "behavior_logprobs": np.float32, "versions": np.int32}


def make_task(question: str = "?", truth: object = None, **fields: Any) -> Task:
    """Return a task of one question of the user; `fields` are those of Task."""
    defaults = {"task_id": "t:0", "data_source": "s", "agent_name": "a", "ground_truth": truth}
    return Task(**{**defaults, "messages": (Message("user", question),), **fields})


def attempted(task: Task, *answers: str | Message, tokens: int = 1, limit: int = 100) -> Attempted:
    """Return what a reward sees of a completed attempt at `task` with these answers of the model."""
    turns = [Message("assistant", answer) if isinstance(answer, str) else answer for answer in answers]
    messages = (*task.messages, *turns)
    return Attempted(task, messages, Outcome.COMPLETED, len(turns), tokens, tokens, limit)


def make_trajectory(
    turn_ids: Sequence[int], *, version: int = 0, reward: float | None = None, **fields: Any
) -> Trajectory:
    """Return a completed trajectory of len(turn_ids) tokens.

    Args:
        turn_ids: the turn of each token; -1 for prompt and context.
        version: of all action tokens.
        reward: earned on the last token, by the name "r"; None for no reward event.
        fields: those of Trajectory; arrays are cast to its types.
    """
    turns = np.asarray(turn_ids, np.int16)
    is_action, size = turns >= 0, len(turns)
    values = {
        "group_id": 0, "member": 0, "task_id": "t:0", "data_source": "s", "agent_name": "a",
        "token_ids": np.zeros(size), "action_mask": is_action, "behavior_logprobs": np.zeros(size),
        "versions": np.where(is_action, version, NO_VERSION), "turn_ids": turns, "messages": (),
        "rewards": () if reward is None else (RewardEvent("r", reward, size - 1),),
        "outcome": Outcome.COMPLETED, **fields,
    }  # fmt: skip
    arrays = {name: np.asarray(values[name], dtype) for name, dtype in DTYPES.items()}
    return Trajectory(**{**values, **arrays})


def play(
    lease: Lease, member: int, *, length: int = 4, reward: float | None = 0.0, **fields: Any
) -> Trajectory:
    """Return an attempt at a lease's task: a token of prompt and `length` - 1 of one turn, of the lease's
    version unless `fields` has another. The tokens tell where they came from.
    """
    task = lease.task
    own = {
        "group_id": lease.group_id, "member": member, "task_id": task.task_id, "version": lease.version,
        "data_source": task.data_source, "agent_name": task.agent_name,
        "token_ids": np.full(length, 100 * lease.group_id + member),
        "messages": (*task.messages, Message("assistant", "ok")),
    }  # fmt: skip
    return make_trajectory([-1] + [0] * (length - 1), reward=reward, **{**own, **fields})


class Rows:
    """A dataset of `num_rows` questions, in order and again and again; endless by default."""

    def __init__(self, num_rows: int | None = None) -> None:
        self._num_rows = num_rows

    def task(self, position: int) -> Task:
        number = position % self._num_rows if self._num_rows else position
        return make_task(str(number), task_id=f"t:{number}", agent_name="single_turn_agent")


ATTEMPTS = Path(tempfile.mkdtemp(prefix="agentrl-attempts-"))
"""Where `stored` writes, for a buffer without a run folder."""
atexit.register(shutil.rmtree, ATTEMPTS, ignore_errors=True)


def stored(*trajectories: Trajectory, folder: Path = ATTEMPTS) -> list[AttemptFacts]:
    """Return the facts of trajectories, and write these to a file, as a rollout actor does."""
    refs = AttemptFiles(folder, is_synced=False).write(trajectories)
    return [AttemptFacts.of(t, ref) for t, ref in zip(trajectories, refs, strict=True)]


def facts(*groups: Group[Trajectory]) -> list[Group[AttemptFacts]]:
    """Return groups of the facts of their trajectories, which stay in memory."""
    return [
        Group(
            group.group_id,
            tuple(AttemptFacts.of(t) for t in group.trajectories),
            None if group.greedy is None else AttemptFacts.of(group.greedy),
        )
        for group in groups
    ]
