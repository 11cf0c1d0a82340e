"""The carriers: every noun that travels from one station of a trajectory's way to the next.

Frozen dataclasses, stdlib and numpy only, so that any module (and any process) may import them cheaply.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = Mapping[str, Any]

NO_VERSION = -1
"""Version of a token that no policy sampled: prompt, tool output, user turn."""


Lags = Callable[[NDArray[np.int32]], NDArray[np.int32]]
"""Versions of tokens -> how far each is from the weights that learn, in versions, i32[T] both; 0 for NO_VERSION."""


class Outcome(enum.StrEnum):
    """Why an attempt stopped. Anything but the first three is a failure, recorded and never scored as wrong."""

    COMPLETED = "completed"  # the agent loop returned
    TRUNCATED = "truncated"  # token budget or context exhausted
    TURN_LIMIT = "turn_limit"  # the model wanted another turn
    TIMEOUT = "timeout"  # the trajectory's deadline passed
    TOOL_ERROR = "tool_error"  # a tool's or an interaction's infrastructure failed
    MODEL_ERROR = "model_error"  # no server answered
    REWARD_ERROR = "reward_error"  # the reward could not be computed
    ABORTED = "aborted"  # the agent loop itself raised, or the run was stopped


SCORED_OUTCOMES = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.TURN_LIMIT})
"""Outcomes whose reward says something about the policy."""


@dataclass(frozen=True, slots=True, order=True)
class PluginId:
    """One plugin, as errors and counts name it."""

    kind: Literal["agent", "tool", "interaction", "reward"]
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt has no score; `str` of it is one line for a person.

    text: what went wrong, and whose fault it was. plugin: the one that failed; None: no plugin is to blame.
    error: type of the exception; "" if none was raised. place: `path:line` in the user's own file; "" if nothing of the user's ran.
    traceback: the frames from that file on, without the message; "" likewise.
    """

    text: str
    plugin: PluginId | None = None
    error: str = ""
    place: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.place.rpartition('/')[2]})" if self.place else self.text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model asked for. `arguments` is None when it could not be parsed; then `error` says why."""

    id: str
    name: str
    arguments: JsonObject | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: a view of tokens, never their source. `reasoning` is what the assistant thought, outside of `content`."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row to attempt.

    `task_id` is stable over runs (dataset, file and row); `agent_name` is resolved (never empty, never an alias).
    """

    task_id: str
    data_source: str
    messages: tuple[Message, ...]
    agent_name: str
    ground_truth: Any = None
    ability: str = ""
    extra_info: JsonObject = field(default_factory=dict)
    tools_kwargs: Mapping[str, JsonObject] = field(default_factory=dict)
    interaction_kwargs: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right and duty to play one group; `version` is the learner's at the moment of leasing.

    group_size: attempts to sample. has_greedy: one more is played, at temperature 0, as member `group_size`.
    """

    group_id: int
    task: Task
    group_size: int
    version: int
    has_greedy: bool = False

    @property
    def num_attempts(self) -> int:
        """All attempts of the group, the greedy one included."""
        return self.group_size + self.has_greedy


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant generation, as the agent loop sees it."""

    index: int
    message: Message
    is_truncated: bool  # cut at a token limit, not ended by the model

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.message.tool_calls


@dataclass(frozen=True, slots=True)
class RewardEvent:
    """A named reward received on one token: index `position` into the trajectory, always an action token."""

    name: str
    value: float
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished attempt. All arrays have length T and are aligned with `token_ids`.

    token_ids: i32[T]; action_mask: bool[T], True where the policy sampled the token;
    behavior_logprobs: f32[T], 0.0 off the mask; versions: i32[T], NO_VERSION off the mask;
    turn_ids: i16[T], counts assistant turns from 0, -1 for tokens outside of them (prompt and context).
    segment_starts: where each training row begins. One row, unless the context was edited (a template that drops earlier
    thinking, an agent that rewrites its history): then tokens that no longer extend the former ones begin a new row, a fork.
    `metrics` are facts about the attempt (num_turns, num_tool_calls, generate_s, ...), one name one unit.
    `failure` says why there is no score; None when the outcome is scored.
    is_greedy: played at temperature 0; its reward is a baseline, and nothing is ever learned from its tokens.
    anchors: i64[K], one per assistant turn: a hash of the state that the turn was taken in (docs/algorithms.md); K=0: not recorded.
    """

    group_id: int
    member: int
    task_id: str
    data_source: str
    agent_name: str
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turn_ids: NDArray[np.int16]
    messages: tuple[Message, ...]
    rewards: tuple[RewardEvent, ...]
    outcome: Outcome
    failure: Failure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra_info: JsonObject = field(default_factory=dict)
    segment_starts: tuple[int, ...] = (0,)
    is_greedy: bool = False
    anchors: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        lengths = {len(a) for a in (self.token_ids, self.action_mask, self.behavior_logprobs, self.versions, self.turn_ids)}
        assert len(lengths) == 1, f"per-token arrays disagree in length: {sorted(lengths)}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_mask.sum())

    @property
    def num_response_tokens(self) -> int:
        """Tokens behind the first prompt in the longest row, context included: what `agent.max_response_tokens` bounds."""
        if not self.action_mask.any():
            return 0
        longest = max(end - start for start, end in itertools.pairwise((*self.segment_starts, self.num_tokens)))
        return longest - int(self.action_mask.argmax())

    @property
    def reward(self) -> float:
        """Sum of all reward events."""
        return float(sum(event.value for event in self.rewards))

    @property
    def min_version(self) -> int:
        """Version of the oldest action token; NO_VERSION when there is none."""
        return int(self.versions[self.action_mask].min()) if self.action_mask.any() else NO_VERSION

    def replace(self, **changes: Any) -> Trajectory:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All trajectories of one Task taken in one visit, ordered by member; `greedy` is not one of them, and nobody learns from it."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None

    @property
    def attempts(self) -> tuple[Trajectory, ...]:
        """All that was played, the greedy attempt last."""
        return self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)

    @property
    def min_version(self) -> int:
        versions = [t.min_version for t in self.attempts if t.min_version != NO_VERSION]
        return min(versions, default=NO_VERSION)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the server samples one turn; `max_new_tokens` in tokens, temperature 0 is greedy, top_k -1 is off.

    ignore_eos: no end-of-sequence token ends the turn, `max_new_tokens` alone does.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What a server sampled for one turn: token_ids i32[N], logprobs f32[N], versions i32[N], aligned.

    num_cached_tokens: of the prompt, found in the server's prefix cache. num_retractions: how often the server itself gave up its
    cache of the request and computed all of it again.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: Literal["stop", "length", "abort"]
    num_interruptions: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype ("float32", ...) and shape of one published weight, by its Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SendTimes:
    """What rank 0 spent on the buckets of a publish: gathering them, and waiting for one to arrive before the next could leave."""

    gather_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Groups by state. At any moment drawn == queued + leased + ready + consumed + sum(dropped.values())."""

    drawn: int
    queued: int
    leased: int
    ready: int
    consumed: int
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> groups
    discarded: Mapping[str, int] = field(default_factory=dict)  # reason -> single trajectories (late, owner_lost, retried)

    @property
    def is_balanced(self) -> bool:
        return self.drawn == self.queued + self.leased + self.ready + self.consumed + sum(self.dropped.values())

    def __str__(self) -> str:
        """Return the counts in words: `44 drawn, 30 learned from, 6 played, 4 ready, 4 dropped (reward_error 3, stale 1)`."""
        parts = [f"{self.drawn} drawn", f"{self.consumed} learned from"]
        waiting = {"being played": self.leased, "queued": self.queued, "ready": self.ready}
        parts += [f"{count} {state}" for state, count in waiting.items() if count]
        for what, reasons in (("dropped", self.dropped), ("single attempts discarded", self.discarded)):
            if total := sum(reasons.values()):
                parts.append(f"{total} {what} ({', '.join(f'{reason} {count}' for reason, count in sorted(reasons.items()) if count)})")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A group that `owner` plays for `age_s` seconds; `num_members` of its attempts are there."""

    group_id: int
    owner: str
    age_s: float
    num_members: int


def member_tuple(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Return trajectories of one group ordered by member."""
    return tuple(sorted(trajectories, key=lambda t: t.member))


# ------------------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a pool of nodes reserves of Ray: groups of bundles, each bundle {resource: amount}, all of one kind.

    strategy: the bundles of a group stand on one node (`STRICT_PACK`), or each on a node of its own (`STRICT_SPREAD`).
    """

    groups: tuple[tuple[Mapping[str, float], ...], ...]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]
