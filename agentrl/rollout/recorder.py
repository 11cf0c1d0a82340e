"""The recorder of an attempt's tokens with their per-token data, in segments.

Within a segment, tokens are in the order in which the model saw or sampled them.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl.rollout.scopes import Scope
from agentrl.types import (
    NO_VERSION,
    ConversationRecord,
    Ending,
    Failure,
    Generation,
    Message,
    Outcome,
    PlacedImage,
    RewardEvent,
    Task,
    Trajectory,
)

CONTEXT_TURN = -1
CALLS_OF = "num_calls/"
"""Prefix of the trajectory metrics that count the calls of each tool."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Identity of an attempt: member `member` of the group that plays `task`, sampled or greedy.

    key: identifies the attempt in routing and request ids. It is random because group ids are not unique:
        validation numbers its groups from 0, and several processes share the servers.
    scope: reports what the attempt waits for. The player attaches it to the tree of live scopes.
    survived: failures of tools, and of the environment's `close`, that did not end the attempt.
    """

    group_id: int
    member: int
    task: Task
    is_greedy: bool = False
    key: str = field(default_factory=lambda: secrets.token_hex(8))
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

    pieces: its tokens in order: the turn's index and generation; for context, CONTEXT_TURN and ids.
    conversation: index of the conversation that it belongs to.
    num_prompt_tokens: how many of its first tokens are no response; see `Trajectory.segment_prompts`.
    images: by their positions among its tokens.
    """

    def __init__(self, turns: AttemptTurns, conversation: int = 0) -> None:
        self.conversation = conversation
        self.images: Sequence[PlacedImage] = ()
        self.pieces: list[tuple[int, Generation | Sequence[int]]] = []
        self.num_tokens = self.num_prompt_tokens = 0
        self.experts: list[NDArray[np.int16]] = []  # i16[., W], of its first `num_known_experts` tokens
        self.num_known_experts = 0
        self._turns = turns  # not the recorder: a reference cycle would wait for the garbage collector

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: prompt, tool output, user turns, template."""
        self.pieces.append((CONTEXT_TURN, ids))
        self.num_tokens += len(ids)

    def append_generation(self, generation: Generation, *, anchor: int) -> int:
        """Append one assistant turn exactly as the server sampled it and return its index within the attempt.

        `anchor`: hash of the state before the turn.
        """
        assert self.num_tokens > 0, "a segment begins with context: nothing predicts its first token"
        count = len(generation.token_ids)
        assert count == len(generation.logprobs) == len(generation.versions), (
            "a generation's arrays disagree in length"
        )
        turn = len(self._turns.anchors)
        self.pieces.append((turn, generation))
        self.num_tokens += count
        self._turns.anchors.append(anchor)
        self._turns.num_action_tokens += count
        if generation.experts is not None:
            # Without those of tokens that were cut off, and of the last token, which no forward has seen.
            known = generation.experts[: self.num_tokens - 1 - self.num_known_experts]
            self.experts.append(known)
            self.num_known_experts += len(known)
        return turn


class TrajectoryRecorder:
    """Records the segments of one attempt. The trajectory joins them in the order in which they began.

    There is one segment unless the context was edited or the attempt has several conversations, whose
    segments can grow alternately. Turns are counted over the whole attempt, in the order in which they were
    sampled.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._turns = AttemptTurns()

    def begin_segment(self, conversation: int = 0) -> Segment:
        """Begin a segment of a conversation. It is part of the trajectory as soon as it has a token."""
        self._segments.append(Segment(self._turns, conversation))
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
    def num_conversations(self) -> int:
        """Number of conversations that have a segment."""
        return len({segment.conversation for segment in self._begun()})

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
        conversations: tuple[ConversationRecord, ...] = (),
        ending: Ending | None = None,
    ) -> Trajectory:
        """Return everything recorded so far as a trajectory without rewards.

        conversations: in the order of their indices; () if there is only one.
        """
        segments = self._begun()
        tokens = _Tokens(sum(segment.num_tokens for segment in segments))
        for segment in segments:
            for turn, piece in segment.pieces:
                tokens.add(turn, piece)
        starts = tuple(itertools.accumulate((segment.num_tokens for segment in segments[:-1]), initial=0))
        task = attempt.task
        return Trajectory(
            group_id=attempt.group_id,
            member=attempt.member,
            task_id=task.task_id,
            data_source=task.data_source,
            agent_name=task.agent_name,
            token_ids=tokens.ids,
            action_mask=tokens.turns != CONTEXT_TURN,
            behavior_logprobs=tokens.logprobs,
            versions=tokens.versions,
            turn_ids=tokens.turns,
            messages=messages,
            rewards=(),
            outcome=outcome,
            failure=failure,
            metrics=dict(metrics),
            extra_info=task.extra_info,
            segment_starts=starts,
            is_greedy=attempt.is_greedy,
            anchors=np.array(self._turns.anchors, np.int64),
            experts=_joined_experts(segments),
            conversations=conversations,
            ending=ending,
            segment_conversations=tuple(s.conversation for s in segments) if conversations else (),
            segment_prompts=tuple(s.num_prompt_tokens for s in segments) if len(segments) > 1 else (),
            images=tuple(
                image.moved(start)
                # Without segments, there is a start.
                for segment, start in zip(segments, starts, strict=False)
                for image in segment.images
            ),
        )

    def _begun(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.num_tokens]


def last_turn_of(trajectory: Trajectory, conversation: int) -> int | None:
    """Return the turn that the policy sampled last in a conversation; None if there is none."""
    ends = (*trajectory.segment_starts[1:], trajectory.num_tokens)
    own = [
        int(trajectory.turn_ids[start:end].max(initial=CONTEXT_TURN))
        for start, end, owner in zip(
            trajectory.segment_starts, ends, trajectory.segment_conversations, strict=True
        )
        if owner == conversation
    ]
    return max(own, default=None)


def conversation_of_turn(trajectory: Trajectory, turn: int) -> int:
    """Return the index of the conversation in which a turn was sampled."""
    position = int((trajectory.turn_ids == turn).argmax())
    segment = int(np.searchsorted(trajectory.segment_starts, position, side="right")) - 1
    return trajectory.segment_conversations[segment]


def reward_event(trajectory: Trajectory, name: str, value: float, *, turn: int | None = None) -> RewardEvent:
    """Return a reward on the last action token of assistant turn `turn`.

    None: of the turn sampled last; with several conversations, in the session's own if it spoke. This is not
    always the last action token in the arrays: with several segments, the segment that began last may not be
    the one sampled last.
    """
    if turn is None and trajectory.conversations:
        turn = last_turn_of(trajectory, 0)
    turns = trajectory.turn_ids[::-1]  # from the end: the position found first is the turn's last
    wanted = turns.max(initial=CONTEXT_TURN) if turn is None else turn
    where = (turns == wanted) & trajectory.action_mask[::-1]
    behind = int(where.argmax()) if len(where) else 0
    assert where[behind : behind + 1].any(), f"reward {name!r} on a trajectory or turn without action tokens"
    return RewardEvent(name, value, len(where) - 1 - behind)


def _joined_experts(segments: Sequence[Segment]) -> NDArray[np.int16]:
    """Return i16[T * W], -1 for tokens whose experts are not known; empty if none are."""
    width = next((part.shape[1] for segment in segments for part in segment.experts), 0)
    if not width:
        return np.empty(0, np.int16)
    experts = np.full((sum(segment.num_tokens for segment in segments), width), -1, np.int16)
    start = 0
    for segment in segments:
        if segment.experts:
            experts[start : start + segment.num_known_experts] = np.concatenate(segment.experts)
        start += segment.num_tokens
    return experts.reshape(-1)


class _Tokens:
    """The per-token arrays of a trajectory, filled from the front. Context is their initial value."""

    def __init__(self, num_tokens: int) -> None:
        self.ids = np.empty(num_tokens, np.int32)
        self.logprobs = np.zeros(num_tokens, np.float32)
        self.versions = np.full(num_tokens, NO_VERSION, np.int32)
        self.turns = np.full(num_tokens, CONTEXT_TURN, np.int16)
        self._position = 0

    def add(self, turn: int, piece: Generation | Sequence[int]) -> None:
        start = self._position
        if not isinstance(piece, Generation):
            self._position = end = start + len(piece)
            self.ids[start:end] = piece
            return
        self._position = end = start + len(piece.token_ids)
        # An assignment would convert other dtypes silently.
        np.copyto(self.ids[start:end], piece.token_ids, casting="no")
        np.copyto(self.logprobs[start:end], piece.logprobs, casting="no")
        np.copyto(self.versions[start:end], piece.versions, casting="no")
        self.turns[start:end] = turn
