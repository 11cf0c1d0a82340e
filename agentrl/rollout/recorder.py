"""The recorder of an attempt's tokens with their per-token data, in segments.

Within a segment, tokens are in the order in which the model saw or sampled them.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl.rollout.scopes import Scope
from agentrl.types import NO_VERSION, Failure, Generation, Message, Outcome, RewardEvent, Task, Trajectory

CONTEXT_TURN = -1
CALLS_OF = "num_calls/"
"""Prefix of the trajectory metrics that count the calls of each tool."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Identity of an attempt: member `member` of the group that plays `task`, sampled or greedy.

    key: identifies the attempt in routing and request ids. It is random because group ids are not unique:
        validation numbers its groups from 0, and several processes share the servers.
    scope: reports what the attempt waits for. The player attaches it to the tree of live scopes.
    survived: tool failures that did not end the attempt.
    """

    group_id: int
    member: int
    task: Task
    is_greedy: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    scope: Scope = field(default_factory=Scope, compare=False, repr=False)
    survived: list[Failure] = field(default_factory=list, compare=False, repr=False)


@dataclass(slots=True)
class AttemptTurns:
    """Counts shared by all segments of an attempt: the anchor of each turn, and the number of action
    tokens.
    """

    anchors: list[int] = field(default_factory=list)
    num_action_tokens: int = 0


class Segment:
    """One segment of an attempt. It is append-only; `TrajectoryRecorder.begin_segment` creates it.

    Invariant: all lists cover the same tokens after every call, so an attempt can stop at any moment.
    """

    def __init__(self, turns: AttemptTurns) -> None:
        self.token_ids: list[NDArray[np.int32]] = []
        self.logprobs: list[NDArray[np.float32]] = []
        self.versions: list[NDArray[np.int32]] = []
        self.pieces: list[tuple[int, int]] = []  # (turn, number of tokens)
        self.num_tokens = 0
        self._turns = turns  # not the recorder: a reference cycle would wait for the garbage collector

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: prompt, tool output, user turns, template."""
        count = len(ids)
        self._append(
            np.asarray(ids, np.int32),
            np.zeros(count, np.float32),
            np.full(count, NO_VERSION, np.int32),
            CONTEXT_TURN,
        )

    def append_generation(self, generation: Generation, *, anchor: int) -> int:
        """Append one assistant turn exactly as the server sampled it and return its index within the attempt.

        `anchor`: hash of the state before the turn.
        """
        assert self.num_tokens > 0, "a segment begins with context: nothing predicts its first token"
        turn = len(self._turns.anchors)
        self._append(generation.token_ids, generation.logprobs, generation.versions, turn)
        self._turns.anchors.append(anchor)
        self._turns.num_action_tokens += len(generation.token_ids)
        return turn

    def _append(
        self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], versions: NDArray[np.int32], turn: int
    ) -> None:
        assert len(ids) == len(logprobs) == len(versions), "a generation's arrays disagree in length"
        self.token_ids.append(ids)
        self.logprobs.append(logprobs)
        self.versions.append(versions)
        self.pieces.append((turn, len(ids)))
        self.num_tokens += len(ids)


class TrajectoryRecorder:
    """Records the segments of one attempt. The trajectory joins them in the order in which they began.

    There is one segment unless the context was edited or the attempt has several conversations, whose
    segments can grow alternately. Turns are counted over the whole attempt, in the order in which they were
    sampled.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._turns = AttemptTurns()

    def begin_segment(self) -> Segment:
        """Begin a segment. It is part of the trajectory as soon as it has a token."""
        self._segments.append(Segment(self._turns))
        return self._segments[-1]

    @property
    def num_turns(self) -> int:
        return len(self._turns.anchors)

    @property
    def num_action_tokens(self) -> int:
        return self._turns.num_action_tokens

    @property
    def num_segments(self) -> int:
        return len(self._begun())

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self._segments)

    def trajectory(
        self,
        attempt: Attempt,
        *,
        messages: tuple[Message, ...],
        outcome: Outcome,
        failure: Failure | None,
        metrics: Mapping[str, float],
    ) -> Trajectory:
        """Return everything recorded so far as a trajectory without rewards."""
        segments = self._begun()
        pieces = [piece for segment in segments for piece in segment.pieces]
        turn_ids = np.repeat(
            np.array([turn for turn, _ in pieces], np.int16),
            np.array([count for _, count in pieces], np.int64),
        )
        starts = itertools.accumulate((segment.num_tokens for segment in segments[:-1]), initial=0)
        task = attempt.task
        return Trajectory(
            group_id=attempt.group_id,
            member=attempt.member,
            task_id=task.task_id,
            data_source=task.data_source,
            agent_name=task.agent_name,
            token_ids=_joined([piece for segment in segments for piece in segment.token_ids], np.int32),
            action_mask=turn_ids != CONTEXT_TURN,
            behavior_logprobs=_joined(
                [piece for segment in segments for piece in segment.logprobs], np.float32
            ),
            versions=_joined([piece for segment in segments for piece in segment.versions], np.int32),
            turn_ids=turn_ids,
            messages=messages,
            rewards=(),
            outcome=outcome,
            failure=failure,
            metrics=dict(metrics),
            extra_info=task.extra_info,
            segment_starts=tuple(starts),
            is_greedy=attempt.is_greedy,
            anchors=np.array(self._turns.anchors, np.int64),
        )

    def _begun(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.num_tokens]


def reward_event(trajectory: Trajectory, name: str, value: float, *, turn: int | None = None) -> RewardEvent:
    """Return a reward on the last action token of assistant turn `turn` (None: the turn sampled last).

    This is not always the last action token in the arrays: with several segments, the segment that began last
    may not be the one sampled last.
    """
    where = trajectory.turn_ids == (trajectory.turn_ids.max(initial=CONTEXT_TURN) if turn is None else turn)
    where &= trajectory.action_mask
    positions = np.flatnonzero(where)
    assert len(positions), f"reward {name!r} on a trajectory or turn without action tokens"
    return RewardEvent(name, value, int(positions[-1]))


def _joined(pieces: list[NDArray], dtype: type[np.generic]) -> NDArray:
    # The empty first piece sets the dtype if nothing was recorded. casting="no" rejects a wrong dtype.
    return np.concatenate([np.empty(0, dtype), *pieces], dtype=dtype, casting="no")
