"""The tokens of one attempt with their per-token facts, in the order in which the model saw or sampled them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl.types import NO_VERSION, Generation, Message, Outcome, RewardEvent, Task, Trajectory

CONTEXT_TURN = -1


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt this is: member `member` of the group that plays `task`.

    `key` names it in routing and request ids. It is unique: validation counts its groups anew, and several processes ask
    the same servers.
    """

    group_id: int
    member: int
    task: Task
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])


class TrajectoryRecorder:
    """Appends only. Lengths agree after every call, so that an attempt may stop at any moment."""

    def __init__(self) -> None:
        self._token_ids: list[NDArray[np.int32]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._versions: list[NDArray[np.int32]] = []
        self._turns: list[tuple[int, int]] = []  # (turn, number of tokens) per piece
        self.num_tokens = 0
        self.num_turns = 0
        self.num_action_tokens = 0

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens the policy did not sample: prompt, tool output, user turns, template."""
        count = len(ids)
        self._append(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.full(count, NO_VERSION, np.int32), CONTEXT_TURN)

    def append_generation(self, generation: Generation) -> None:
        """Append one assistant turn exactly as the server sampled it."""
        self._append(generation.token_ids, generation.logprobs, generation.versions, self.num_turns)
        self.num_turns += 1
        self.num_action_tokens += len(generation.token_ids)

    def trajectory(
        self,
        attempt: Attempt,
        *,
        messages: tuple[Message, ...],
        outcome: Outcome,
        failure: str | None,
        metrics: Mapping[str, float],
    ) -> Trajectory:
        """Return what was recorded so far, without rewards."""
        turn_ids = np.repeat(np.array([turn for turn, _ in self._turns], np.int16), np.array([count for _, count in self._turns], np.int64))
        task = attempt.task
        return Trajectory(
            group_id=attempt.group_id,
            member=attempt.member,
            task_id=task.task_id,
            data_source=task.data_source,
            agent_name=task.agent_name,
            token_ids=_joined(self._token_ids, np.int32),
            action_mask=turn_ids != CONTEXT_TURN,
            behavior_logprobs=_joined(self._logprobs, np.float32),
            versions=_joined(self._versions, np.int32),
            turn_ids=turn_ids,
            messages=messages,
            rewards=(),
            outcome=outcome,
            failure=failure,
            metrics=dict(metrics),
            extra_info=task.extra_info,
        )

    def _append(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], versions: NDArray[np.int32], turn: int) -> None:
        assert len(ids) == len(logprobs) == len(versions), "a generation's arrays disagree in length"
        self._token_ids.append(ids)
        self._logprobs.append(logprobs)
        self._versions.append(versions)
        self._turns.append((turn, len(ids)))
        self.num_tokens += len(ids)


def reward_event(trajectory: Trajectory, name: str, value: float, *, turn: int | None = None) -> RewardEvent:
    """Place a reward on the last action token of the trajectory, or of assistant turn `turn`.

    The trajectory may end in a tool's or a user's message: the loss never sees those tokens, and a reward there were lost.
    """
    where = trajectory.action_mask if turn is None else trajectory.turn_ids == turn
    positions = np.flatnonzero(where)
    assert len(positions), f"reward {name!r} on a trajectory or turn without action tokens"
    return RewardEvent(name, value, int(positions[-1]))


def _joined(pieces: list[NDArray], dtype: type[np.generic]) -> NDArray:
    # The empty first piece gives the dtype when nothing was recorded; "no" refuses a wrong one instead of rounding it.
    return np.concatenate([np.empty(0, dtype), *pieces], dtype=dtype, casting="no")
