"""The data types that components exchange: tasks, leases, trajectories, groups, generations, counts.

They are frozen dataclasses and need only the standard library and numpy. Every module and process can import
them cheaply.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = Mapping[str, Any]

NO_VERSION = -1
"""Version of a token that no policy sampled: prompt, tool output, user turn."""


Lags = Callable[[NDArray[np.int32]], NDArray[np.int32]]
"""Maps token versions, i32[T], to their lag behind the learner's weights in versions, i32[T].

NO_VERSION has lag 0.
"""


class Outcome(enum.StrEnum):
    """Why an attempt stopped.

    The first three are scored. The others are failures: recorded, never scored as wrong.
    """

    COMPLETED = "completed"  # the agent loop returned
    TRUNCATED = "truncated"  # token budget or context exhausted
    TURN_LIMIT = "turn_limit"  # the model wanted another turn
    TIMEOUT = "timeout"  # the trajectory's deadline passed
    TOOL_ERROR = "tool_error"  # a tool's or an interaction's infrastructure failed
    ENVIRONMENT_ERROR = "environment_error"  # the attempt's environment could not start, or say its facts
    MODEL_ERROR = "model_error"  # the inference servers failed
    REWARD_ERROR = "reward_error"  # the reward could not be computed
    ABORTED = "aborted"  # the agent loop itself raised, or the run was stopped


SCORED_OUTCOMES = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.TURN_LIMIT})
"""Outcomes that receive a reward. A failure has none: it is not the policy's fault."""


PluginKind = Literal["agent", "tool", "interaction", "environment", "reward"]


@dataclass(frozen=True, slots=True, order=True)
class PluginId:
    """Kind and name of a plugin, for errors and counts."""

    kind: PluginKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt has no score. `str(failure)` is one readable line.

    text: what went wrong, and whose fault it was.
    plugin: the plugin that failed; None if no plugin is to blame.
    error: type name of the exception; "" if none was raised.
    place: `path:line` in the user's file; "" if no user code was running.
    traceback: the frames from the user's file onward, without the message; "" if no user code was running.
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
    """A tool call that the model requested.

    `arguments` is None if it could not be parsed; `error` then says why.
    """

    id: str
    name: str
    arguments: JsonObject | None
    error: str | None = None


IMAGE_MARK = "<image>"
"""Stands in the content of a message where an image of it is."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as plugins give it: the bytes of a PNG, JPEG or WebP file."""

    data: bytes


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A stored image: its identity and size in pixels. The bytes stay in a file, which is written once.

    sha256: hex, of the file's bytes.
    path: of the file; "" if it is not stored, as in checks of a dataset.
    """

    sha256: str
    width: int
    height: int
    path: str = field(default="", compare=False)

    def read(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            OSError: there is no such file, or it has other bytes.
        """
        with open(self.path, "rb") as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise OSError(f"{self.path} does not match its checksum")
        return data


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image among tokens: it takes `rows` x `columns` placeholders from `position` on.

    cell_pixels: width and height of the part of the resized image that one placeholder stands for.
    """

    image: ImageRef
    position: int
    rows: int
    columns: int
    cell_pixels: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def width(self) -> int:
        """Of the resized image, in pixels."""
        return self.columns * self.cell_pixels

    @property
    def height(self) -> int:
        """Of the resized image, in pixels."""
        return self.rows * self.cell_pixels

    def moved(self, by: int) -> PlacedImage:
        """Return the image `by` tokens further on."""
        return dataclasses.replace(self, position=self.position + by)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. It is derived from tokens; tokens are never derived from it.

    `reasoning` holds the assistant's thinking, which `content` does not include. `images`, if any, are those
    at the IMAGE_MARKs of the content, in order; without images, an IMAGE_MARK is plain text.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""
    images: tuple[ImageRef, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):  # agent loops make messages
            kind = type(self.content).__name__
            raise TypeError(f"Message.content is {kind} {str(self.content)[:80]}; it must be a text")


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row to attempt.

    `task_id` is stable across runs (dataset, file and row). `agent_name` is resolved: never empty, never an
    alias. `environment_kwargs` has the name of its environment; None: the task has none.
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
    environment_kwargs: JsonObject | None = None

    @property
    def chat_template_kwargs(self) -> JsonObject:
        """Arguments of the chat template for this row; they win over `model.chat_template_kwargs`."""
        found: JsonObject = self.extra_info.get("chat_template_kwargs") or {}
        return found


@dataclass(frozen=True, slots=True)
class Lease:
    """The assignment of one group to a rollout actor.

    version: the newest published version when the lease was given.
    group_size: number of sampled attempts.
    has_greedy: whether one more attempt is played at temperature 0, as member `group_size`.
    """

    group_id: int
    task: Task
    group_size: int
    version: int
    has_greedy: bool = False

    @property
    def num_attempts(self) -> int:
        """Number of attempts in the group, including the greedy one."""
        return self.group_size + self.has_greedy


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn, as the agent loop sees it."""

    index: int
    message: Message
    is_truncated: bool  # stopped by a token limit, not by the model

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.message.tool_calls


@dataclass(frozen=True, slots=True)
class RewardEvent:
    """A named reward on one token.

    `position` is the token's index in the trajectory, always an action token.
    """

    name: str
    value: float
    position: int


MAIN_CONVERSATION = "main"
"""Name of the conversation that a session begins with."""


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """One conversation of an attempt that has several.

    name: equal names are compared with each other (`algorithm.conversation_credit`).
    messages: those whose turns were sampled; () if it never spoke.
    opponent: the frozen model that spoke in it, whose tokens are not recorded; None: the policy.
    opponent_versions: the versions of the policy that spoke as the opponent, in order, each once; 0: the
        model that it was started as.
    """

    name: str
    messages: tuple[Message, ...]
    opponent: str | None = None
    opponent_versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, for those who watch it being played. It is not stored.

    limit: the limit that ended it, such as `max_response_tokens=400`; "": none did.
    unseen: the last messages, which no turn followed: the model saw none of them.
    farewell: how the interaction partner ended the conversation; "": it did not.
    """

    limit: str = ""
    unseen: tuple[Message, ...] = ()
    farewell: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The finished result of an attempt. All per-token arrays have length T and are aligned with `token_ids`.

    token_ids: i32[T].
    action_mask: bool[T], True where the policy sampled the token.
    behavior_logprobs: f32[T], 0.0 where action_mask is False.
    versions: i32[T], NO_VERSION where action_mask is False.
    turn_ids: i16[T], index of the assistant turn from 0; -1 for prompt and context tokens.
    segment_starts: index of each segment's first token. There is one segment unless the context was edited: a
        template dropped earlier thinking, or an agent rewrote its history. Tokens that do not extend the
        previous ones then begin a new segment (a fork).
    metrics: facts about the attempt (num_turns, num_tool_calls, generate_s, ...); each name has one unit.
    failure: why there is no score; None if the outcome is scored.
    is_greedy: played at temperature 0. Its reward is a baseline; its tokens are never trained on.
    anchors: i64[K], one per assistant turn: a hash of the state before the turn (docs/algorithms.md). K=0 if
        not recorded.
    experts: i16[T * W], which experts computed each token on the server: W numbers per token, those of its
        first layer, then those of the second, and so on; -1 where none is recorded. Empty if nothing is.
    conversations: all conversations of the attempt, the session's own first; `messages` are those of the
        first, or, if it never spoke, of the one that spoke last. Empty if there was only one.
    segment_conversations: of each segment, the index of its conversation. Empty if there was only one.
    segment_prompts: of each segment, how many of its first tokens are no response: the prompt, or the history
        that a fork repeats. Empty if there is one segment: all that precedes its first action token.
    teacher_logprobs: f32[A], log-probabilities of the action tokens by a teacher on servers. Empty if none
        was asked.
    images: by their positions in `token_ids`. Their placeholders are context.
    ending: how it ended, in the process that played it; None: it was read from a file.
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
    experts: NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))
    conversations: tuple[ConversationRecord, ...] = ()
    segment_conversations: tuple[int, ...] = ()
    segment_prompts: tuple[int, ...] = ()
    teacher_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    images: tuple[PlacedImage, ...] = ()
    ending: Ending | None = None

    def __post_init__(self) -> None:
        lengths = {
            len(a)
            for a in (self.token_ids, self.action_mask, self.behavior_logprobs, self.versions, self.turn_ids)
        }
        assert len(lengths) == 1, f"per-token arrays disagree in length: {sorted(lengths)}"

    @property
    def experts_of_tokens(self) -> NDArray[np.int16] | None:
        """`experts` as i16[T, W]; None if nothing is recorded."""
        return self.experts.reshape(self.num_tokens, -1) if len(self.experts) else None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_mask.sum())

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt in the segment that has most of them, including context.

        The prompt is that of the conversation's first segment, or the own one of a segment that begins with a
        shorter one. So what a fork or `Session.restart` repeats of the history counts. Without a restart,
        `agent.max_response_tokens` bounds it.
        """
        if not self.action_mask.any():
            return 0
        segments = itertools.pairwise((*self.segment_starts, self.num_tokens))
        owners = self.segment_conversations or itertools.repeat(0)
        prompts = {} if self.segment_conversations else {0: int(self.action_mask.argmax())}
        longest = 0
        for (start, end), owner in zip(segments, owners, strict=False):
            own = int(self.action_mask[start:end].argmax())
            longest = max(longest, end - start - min(prompts.setdefault(owner, own), own))
        return longest

    @property
    def reward(self) -> float:
        """Sum of all reward events."""
        return float(sum(event.value for event in self.rewards))

    @property
    def min_version(self) -> int:
        """Version of the oldest action token; NO_VERSION if there are no action tokens."""
        return int(self.versions[self.action_mask].min()) if self.action_mask.any() else NO_VERSION

    def replace(self, **changes: Any) -> Trajectory:
        return dataclasses.replace(self, **changes)


class FinishedAttempt(Protocol):
    """What a `Trajectory` has in common with its `AttemptFacts` (agentrl.data.attempt_facts)."""

    @property
    def group_id(self) -> int: ...
    @property
    def member(self) -> int: ...
    @property
    def task_id(self) -> str: ...
    @property
    def data_source(self) -> str: ...
    @property
    def agent_name(self) -> str: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def failure(self) -> Failure | None: ...
    @property
    def is_greedy(self) -> bool: ...
    @property
    def reward(self) -> float: ...
    @property
    def min_version(self) -> int: ...
    @property
    def num_response_tokens(self) -> int: ...


A_co = TypeVar("A_co", bound=FinishedAttempt, covariant=True)
A = TypeVar("A", bound=FinishedAttempt)


@dataclass(frozen=True, slots=True, eq=False)
class Group(Generic[A_co]):
    """All attempts at one task in one visit, ordered by member: their trajectories, or only their facts.

    `trajectories` does not include `greedy`, the greedy attempt, which is never trained on.
    """

    group_id: int
    trajectories: tuple[A_co, ...]
    greedy: A_co | None = None

    @property
    def attempts(self) -> tuple[A_co, ...]:
        """All trajectories of the group, the greedy one last."""
        return self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)

    @property
    def min_version(self) -> int:
        versions = [t.min_version for t in self.attempts if t.min_version != NO_VERSION]
        return min(versions, default=NO_VERSION)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the server samples one turn. Temperature 0 is greedy; top_k -1 disables top-k.

    ignore_eos: end-of-sequence tokens do not end the turn; only `max_new_tokens` does.
    experts_from: return the experts of the tokens from this index on (of prompt and answer together); None:
        of no token.
    adapter: the LoRA adapter to sample with, if it is not the one of all requests; None: it is.
    images: of the prompt, by their positions in it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    experts_from: int | None = None
    adapter: str | None = None
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What a server sampled for one turn: token_ids i32[N], logprobs f32[N], versions i32[N], aligned.

    num_cached_tokens: prompt tokens found in the server's prefix cache.
    num_retractions: how often the server evicted the request's KV cache and recomputed it.
    experts: i16[R, W], of the tokens from `SamplingParams.experts_from` to the last but one, of which some at
        the end may be missing; see `Trajectory.experts`. None: not asked for.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: Literal["stop", "length", "abort"]
    num_interruptions: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Hugging Face name, dtype ("float32", ...), shape and size in bytes of one published weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SendTimes:
    """Seconds that rank 0 spent on the buckets of a publish.

    gather_s: gathering them. wait_s: waiting for one bucket to arrive before the next could be sent.
    """

    gather_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class ServerPause:
    """The server at `url` did not sample between two times, in nanoseconds since the epoch."""

    url: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Number of groups by state.

    Invariant: drawn == queued + leased + ready + consumed + sum(dropped.values()).
    """

    drawn: int
    queued: int
    leased: int
    ready: int
    consumed: int
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> groups
    discarded: Mapping[str, int] = field(
        default_factory=dict
    )  # reason -> single trajectories (late, outrun, ...)

    @property
    def is_balanced(self) -> bool:
        return self.drawn == self.queued + self.leased + self.ready + self.consumed + sum(
            self.dropped.values()
        )

    def __str__(self) -> str:
        """Return the counts in words.

        Example: `44 drawn, 30 trained on, 6 being played, 4 ready, 4 dropped (reward_error 3, stale 1)`.
        """
        parts = [f"{self.drawn} drawn", f"{self.consumed} trained on"]
        waiting = {"being played": self.leased, "queued": self.queued, "ready": self.ready}
        parts += [f"{count} {state}" for state, count in waiting.items() if count]
        for what, reasons in (("dropped", self.dropped), ("single attempts discarded", self.discarded)):
            if total := sum(reasons.values()):
                parts.append(
                    f"{total} {what} "
                    f"({', '.join(f'{reason} {count}' for reason, count in sorted(reasons.items()) if count)})"  # noqa: E501
                )
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A group that `owner` has played for `age_s` seconds so far; `num_members` of its trajectories have
    arrived.
    """

    group_id: int
    owner: str
    age_s: float
    num_members: int


def member_tuple(attempts: Sequence[A]) -> tuple[A, ...]:
    """Return the attempts of one group ordered by member."""
    return tuple(sorted(attempts, key=lambda t: t.member))


# -------------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True, slots=True)
class Reservation:
    """The Ray placement groups of a node pool. Each group is a tuple of bundles; a bundle maps a resource to
    its amount.

    strategy: `STRICT_PACK` places all bundles of a group on one node; `STRICT_SPREAD` places each on its own
        node.
    """

    groups: tuple[tuple[Mapping[str, float], ...], ...]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]
