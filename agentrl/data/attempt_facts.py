"""`AttemptFacts`: what decisions need of a finished attempt. Tokens and messages stay where they are stored.

The buffer decides by them which groups are trained on, the controller assigns credit and packs, and metrics
are computed from them. Their size does not depend on the length of the attempt.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.data.attempt_files import TrajectoryRef
from agentrl.data.prefix_marks import Mark, find_marks
from agentrl.errors import CheckpointError
from agentrl.fast_pickle import pickled_fast
from agentrl.types import (
    MAIN_CONVERSATION,
    NO_VERSION,
    SCORED_OUTCOMES,
    Failure,
    JsonObject,
    Outcome,
    PluginId,
    RewardEvent,
    Trajectory,
)

ConversationCredit = Literal["attempt", "own"]
"""`algorithm.conversation_credit`."""
Runs = tuple[tuple[int, int], ...]
"""Pairs (value, number of neighbors that have it)."""


@pickled_fast
@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """The facts of one attempt. Fields that are not explained here are those of `Trajectory`.

    segments: tokens of each segment, and how many of them are action tokens.
    turns: runs (turn, action tokens) in the order of positions.
    versions: pairs (version, number of action tokens that it sampled), ascending.
    reward_places: of each reward, the index of its token among the action tokens in the order of positions.
    marks: of each segment, see `find_marks`; empty with recorded experts, to which equal tokens may have gone
        differently, and with images, whose placeholders are equal.
    anchors: of each turn that has action tokens, in order; None if one of them has no anchor.
    needs_tool: `extra_info.needs_tool` of the task.
    conversation_names: the names of the attempt's conversations; () if there was only one.
    segment_conversations: of each segment, the index of its conversation; () if there was only one.
    opponents: name of each opponent, and the versions that spoke, ascending; () if none took part.
    added_info: what was added to `extra_info` since the trajectory was stored.
    source: where the trajectory is stored, or the trajectory itself.
    """

    group_id: int
    member: int
    task_id: str
    data_source: str
    agent_name: str
    outcome: Outcome
    failure: Failure | None
    rewards: tuple[RewardEvent, ...]
    metrics: Mapping[str, float]
    is_greedy: bool
    needs_tool: bool
    num_tool_calls: int
    num_response_tokens: int
    segments: tuple[tuple[int, int], ...]
    turns: Runs
    versions: Runs
    reward_places: tuple[int, ...]
    marks: tuple[tuple[Mark, ...], ...]
    anchors: tuple[int, ...] | None
    source: TrajectoryRef | Trajectory
    conversation_names: tuple[str, ...] = ()
    segment_conversations: tuple[int, ...] = ()
    opponents: tuple[tuple[str, tuple[int, ...]], ...] = ()
    added_info: JsonObject = field(default_factory=dict)

    @classmethod
    def of(cls, trajectory: Trajectory, source: TrajectoryRef | None = None) -> AttemptFacts:
        """Return the facts of `trajectory`. source: where it is stored; None: keep the trajectory itself."""
        t, mask = trajectory, trajectory.action_mask
        starts = np.asarray(t.segment_starts, np.int64)
        actions = np.flatnonzero(mask)
        num_actions = np.diff([*np.searchsorted(actions, starts), len(actions)])
        lengths = np.diff([*t.segment_starts, t.num_tokens])
        turns = _runs(t.turn_ids[actions])
        numbers = sorted({number for number, _ in turns})
        has_anchors = not numbers or numbers[-1] < len(t.anchors)
        for event in t.rewards:
            assert mask[event.position], f"reward {event.name!r} is placed on a context token"
        return cls(
            group_id=t.group_id,
            member=t.member,
            task_id=t.task_id,
            data_source=t.data_source,
            agent_name=t.agent_name,
            outcome=t.outcome,
            failure=t.failure,
            rewards=t.rewards,
            metrics=t.metrics,
            is_greedy=t.is_greedy,
            needs_tool=bool(t.extra_info.get("needs_tool")),
            num_tool_calls=num_tool_calls(t),
            num_response_tokens=t.num_response_tokens,
            segments=tuple(zip(lengths.tolist(), num_actions.tolist(), strict=True)),
            turns=turns,
            versions=_counts(t.versions[actions]),
            reward_places=reward_places(t),
            marks=_marks(t),
            anchors=tuple(t.anchors[numbers].tolist()) if has_anchors else None,
            source=t if source is None else source,
            conversation_names=tuple(one.name for one in t.conversations),
            segment_conversations=t.segment_conversations,
            opponents=_opponents(t),
        )

    @property
    def num_tokens(self) -> int:
        return sum(length for length, _ in self.segments)

    @property
    def segment_names(self) -> tuple[str, ...]:
        """The name of each segment's conversation."""
        names = self.conversation_names or (MAIN_CONVERSATION,)
        places = self.segment_conversations or (0,) * len(self.segments)
        return tuple(names[place] for place in places)

    @property
    def num_action_tokens(self) -> int:
        return sum(number for _, number in self.segments)

    @property
    def num_turns(self) -> int:
        """Turns up to the last one with an action token."""
        return 1 + max((turn for turn, _ in self.turns), default=-1)

    @property
    def reward(self) -> float:
        """Sum of all reward events."""
        return float(sum(event.value for event in self.rewards))

    @property
    def min_version(self) -> int:
        """Version of the oldest action token; NO_VERSION if there are none."""
        return self.versions[0][0] if self.versions else NO_VERSION

    def compared_rewards(self, credit: ConversationCredit) -> list[tuple[str, float]]:
        """Return what credit compares within a group: the attempt's reward, or that of each conversation,
        with its name.
        """
        if credit == "attempt":
            return [(MAIN_CONVERSATION, self.reward)]
        return [(part.name, part.attempt.reward) for part in self.parts()]

    def parts(self) -> list[ConversationFacts]:
        """Return the facts of each conversation that has action tokens, as of an attempt of its own; of an
        attempt with one conversation, its own facts.
        """
        if not self.conversation_names:
            return [self.as_part()]
        segment_ends = np.cumsum([num_actions for _, num_actions in self.segments])
        starts = np.cumsum([0, *(length for _, length in self.turns)])[:-1]
        segments = np.searchsorted(segment_ends, starts, side="right")
        owners = [self.segment_conversations[segment] for segment in segments.tolist()]
        return [
            self._part(name, tuple(run for run, owner in enumerate(owners) if owner == index))
            for index, name in enumerate(self.conversation_names)
            if index in owners
        ]

    def as_part(self) -> ConversationFacts:
        """Return the whole attempt as the session's own conversation."""
        return ConversationFacts(MAIN_CONVERSATION, self, tuple(range(len(self.turns))))

    def _part(self, name: str, runs: tuple[int, ...]) -> ConversationFacts:
        """Return the facts of the conversation with these runs of turns, of which it has at least one.

        Its `versions` and `marks` stay those of the attempt: credit reads neither.
        """
        turns = tuple(self.turns[run] for run in runs)
        length = sum(count for _, count in turns)
        ends = np.cumsum([count for _, count in self.turns])
        own_ends = dict(zip(runs, np.cumsum([count for _, count in turns]).tolist(), strict=True))
        rewards = [
            (event, own_ends[run] - int(ends[run]) + place)
            for event, place in zip(self.rewards, self.reward_places, strict=True)
            if (run := int(np.searchsorted(ends, place, side="right"))) in own_ends
        ]
        numbers = {number for number, _ in turns}
        anchors = self.anchors
        if anchors is not None:
            all_numbers = sorted({number for number, _ in self.turns})
            anchors = tuple(a for n, a in zip(all_numbers, anchors, strict=True) if n in numbers)
        attempt = self.replace(
            turns=turns,
            segments=((length, length),),
            rewards=tuple(event for event, _ in rewards),
            reward_places=tuple(place for _, place in rewards),
            anchors=anchors,
            conversation_names=(),
            segment_conversations=(),
        )
        return ConversationFacts(name, attempt, runs)

    @property
    def accuracy(self) -> float | None:
        """Accuracy in [0, 1]: the one that the reward reports, else 1.0 for a positive reward.

        None: the attempt failed or was greedy (sampled differently), or the reported one is not in [0, 1].
        """
        if self.is_greedy or self.outcome not in SCORED_OUTCOMES:
            return None
        accuracy = self.metrics.get("accuracy", float(self.reward > 0))
        return accuracy if 0.0 <= accuracy <= 1.0 else None

    def load(self) -> Trajectory:
        """Return the trajectory with what may have changed since it was stored (see `complete`).

        Raises:
            DiskError: its file is missing or damaged.
        """
        return self.complete(self.source if isinstance(self.source, Trajectory) else self.source.load())

    def complete(self, stored: Trajectory) -> Trajectory:
        """Return the stored trajectory with this outcome, and these rewards, metrics and information."""
        return stored.replace(
            outcome=self.outcome,
            failure=self.failure,
            rewards=self.rewards,
            metrics=self.metrics,
            extra_info={**stored.extra_info, **self.added_info},
        )

    def replace(self, **changes: Any) -> AttemptFacts:
        return dataclasses.replace(self, **changes)

    # ------------------------------------------------------------------------------------------------- stored

    def to_json(self) -> bytes:
        """Return the facts as they are stored in the journal. Only of a stored trajectory."""
        assert isinstance(self.source, TrajectoryRef), "a trajectory in memory cannot be referred to"
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["outcome"] = self.outcome.value
        values["rewards"] = [[event.name, event.value, event.position] for event in self.rewards]
        values["metrics"] = dict(self.metrics)
        values["failure"] = None if self.failure is None else _failure_fields(self.failure)
        source = self.source
        values["source"] = [Path(source.path).name, source.offset, source.num_bytes, source.checksum]
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, folder: Path) -> AttemptFacts:
        """Read what `to_json` wrote. folder: of the trajectories' files.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            return cls._of_values(json.loads(data), folder)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"the facts of an attempt cannot be read: {error!r}") from error

    @classmethod
    def _of_values(cls, values: dict[str, Any], folder: Path) -> AttemptFacts:
        name, *place = values["source"]
        if not isinstance(name, str) or os.path.basename(name) != name:  # it may come from object storage
            raise ValueError(f"source={name!r} is no name of a file")
        values["source"] = TrajectoryRef(os.path.join(folder, name), *place)
        values["outcome"] = Outcome(values["outcome"])
        values["rewards"] = tuple(RewardEvent(*event) for event in values["rewards"])
        values["failure"] = None if values["failure"] is None else _failure_of(values["failure"])
        for pairs in ("segments", "turns", "versions"):
            values[pairs] = tuple(tuple(pair) for pair in values[pairs])
        if "prompts" in values:  # an earlier version marked only the first action token
            values["marks"] = [[] if prompt is None else [prompt] for prompt in values.pop("prompts")]
        # Journals of earlier versions lack them.
        for names in ("conversation_names", "segment_conversations"):
            values[names] = tuple(values.get(names, ()))
        values["opponents"] = tuple((name, tuple(versions)) for name, versions in values.get("opponents", ()))
        values["marks"] = tuple(tuple((length, key) for length, key in own) for own in values["marks"])
        values["reward_places"] = tuple(values["reward_places"])
        values["anchors"] = None if values["anchors"] is None else tuple(values["anchors"])
        return cls(**values)


@dataclass(frozen=True, slots=True, eq=False)
class ConversationFacts:
    """One conversation of an attempt, for credit.

    attempt: the facts of its action tokens, as if they were an attempt of one segment.
    runs: which of the whole attempt's `turns` are its own.
    """

    name: str
    attempt: AttemptFacts
    runs: tuple[int, ...]


def _runs(values: NDArray[Any]) -> Runs:
    if not len(values):
        return ()
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    lengths = np.diff([*starts, len(values)])
    return tuple(zip(values[starts].tolist(), lengths.tolist(), strict=True))


def _counts(values: NDArray[Any]) -> Runs:
    found, counts = np.unique(values, return_counts=True)
    return tuple(zip(found.tolist(), counts.tolist(), strict=True))


def _opponents(t: Trajectory) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, set[int]] = {}
    for one in t.conversations:
        if one.opponent is not None:
            found.setdefault(one.opponent, set()).update(one.opponent_versions)
    return tuple((name, tuple(sorted(versions))) for name, versions in sorted(found.items()))


def _marks(t: Trajectory) -> tuple[tuple[Mark, ...], ...]:
    if t.experts_of_tokens is not None or t.images:
        return tuple(() for _ in t.segment_starts)
    return find_marks(t.token_ids, t.action_mask, t.segment_starts)


def reward_places(trajectory: Trajectory) -> tuple[int, ...]:
    """Return the index of each reward's token among the action tokens, in the order of positions."""
    actions = np.flatnonzero(trajectory.action_mask)
    return tuple(np.searchsorted(actions, [event.position for event in trajectory.rewards]).tolist())


def num_tool_calls(trajectory: Trajectory) -> int:
    """Return the number of tool calls of the policy, well-formed or not."""
    if "num_tool_calls" in trajectory.metrics:
        return int(trajectory.metrics["num_tool_calls"])
    return sum(len(message.tool_calls) for message in trajectory.messages if message.role == "assistant")


def _failure_fields(failure: Failure) -> list[str | None]:
    kind, name = (None, None) if failure.plugin is None else (failure.plugin.kind, failure.plugin.name)
    return [failure.text, kind, name, failure.error, failure.place, failure.traceback]


def _failure_of(fields: Sequence[Any]) -> Failure:
    text, kind, name, error, place, traceback = fields
    return Failure(text, None if kind is None else PluginId(kind, name), error, place, traceback)
