"""The contract of rewards: one base class per scope, all registered as one kind of plugin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from agentrl.types import MAIN_CONVERSATION, ConversationRecord, JsonObject, Message, Outcome, Task

FINISH = "finish"
"""Name of the tool whose argument `answer` is the final answer of the attempt."""

RunsIn = Literal["inline", "thread", "process", "asyncio", "trio"]
Scope = Literal["trajectory", "turn", "group", "batch"]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward.

    value: the reward to train on.
    metrics: reported numbers (format, accuracy, ...).
    details: JSON values stored with the trajectory.
    by_conversation: of an attempt with several conversations, the reward of each by name, such as
        {"first": 1.0, "second": -1.0}. If given, these are trained on, and `value` is only reported. Each
        lies on the last turn of its conversation, which must have spoken.
    """

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    details: JsonObject = field(default_factory=dict)
    by_conversation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempted:
    """The view of one finished attempt that a reward receives.

    messages: the conversation, including the prompt; of an attempt with several, the session's own, or the
        one that spoke last if that never spoke.
    num_response_tokens: tokens after the prompt, including context.
    num_action_tokens: tokens that the policy sampled.
    max_response_tokens: limit on num_response_tokens.
    environment: the attempt's environment, still open; None if the row has none. Rewards in processes and
        rewards of groups and batches get `Unreachable` in its place, and read `facts`.
    facts: what the environment's `facts` returned at the end of the agent loop; stored with the trajectory.
    conversations: all conversations of the attempt, the session's own first; () if there was only one.
    decoded: the response as verl decodes it (`reward.solution_str`); None if no reward of this attempt reads
        it.
    """

    task: Task
    messages: tuple[Message, ...]
    outcome: Outcome
    num_turns: int
    num_response_tokens: int
    num_action_tokens: int
    max_response_tokens: int
    environment: Any = None
    facts: JsonObject = field(default_factory=dict)
    conversations: tuple[ConversationRecord, ...] = ()
    decoded: str | None = None

    @property
    def spoke(self) -> tuple[str, ...]:
        """The names of the conversations in which the policy spoke, each once."""
        if not self.conversations:
            return (MAIN_CONVERSATION,)
        names = [one.name for one in self.conversations if one.messages and one.opponent is None]
        return tuple(dict.fromkeys(names))

    @property
    def handed_in(self) -> str | None:
        """The answer that the last assistant message passed to the tool `finish`; None if it did not call
        `finish`.
        """
        last = self._last_message
        return None if last is None else _handed_in(last)

    @property
    def answer(self) -> str:
        """`handed_in`, or else the text of the last assistant message; "" if there is no assistant
        message.
        """
        last, handed_in = self._last_message, self.handed_in
        return (last.content if last is not None else "") if handed_in is None else handed_in

    @property
    def _last_message(self) -> Message | None:
        return next((message for message in reversed(self.messages) if message.role == "assistant"), None)

    @property
    def response(self) -> tuple[Message, ...]:
        """The messages after the prompt."""
        first = next(
            (
                i
                for i, message in enumerate(self.messages)
                if i >= len(self.task.messages) and message.role == "assistant"
            ),
            None,
        )
        return self.messages[first:] if first is not None else ()

    @property
    def response_text(self) -> str:
        """The response as one text with a line break between messages; thinking is enclosed in `<think>`
        tags.
        """
        return "\n".join(
            text
            for message in self.response
            for text in (_with_thought(message), _handed_in(message))
            if text is not None
        )

    @property
    def solution_str(self) -> str:
        """The text for functions with verl's signature: `decoded`, or else `response_text`."""
        return self.response_text if self.decoded is None else self.decoded

    @property
    def assistant_texts(self) -> tuple[str, ...]:
        """The text of each assistant message of the response; thinking is enclosed in `<think>` tags."""
        return tuple(_with_thought(message) for message in self.response if message.role == "assistant")


class AnyReward(ABC):
    """Base of all rewards. Subclass `Reward`, `TurnReward`, `GroupReward` or `BatchReward`."""

    name: ClassVar[str]
    scope: ClassVar[Scope]
    runs_in: RunsIn = "thread"
    """Where `score` runs.

    thread: `score` may block.
    process: `score` is heavy. It runs in its own process, which is killed at the deadline. The reward is
        created again in that process, from its class and config.
    asyncio, trio: `score` is async.
    inline: `score` takes microseconds for any text. It runs in the event loop that plays all attempts: it
        blocks all of them, and no deadline can stop it.
    """
    max_concurrent: int | None = None
    """Concurrent calls per rollout actor; None: unlimited.

    Waiting for a slot does not count against the deadline.
    """
    max_answer_cpu_s: int | None = None
    """CPU seconds after which the kernel kills a `score`.

    Only for a `Reward` in a process that overrides `failed`.
    """
    reads_solution_str: ClassVar[bool] = False
    """Whether `score` reads `Attempted.solution_str`, the text for functions with verl's signature."""
    has_own_deadlines: bool = False
    """Whether the reward enforces its own deadlines; `reward.timeout_s` then does not apply."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    def check(self, task: Task) -> None:
        """Raise DataError if the task lacks something that this reward needs. Called before any rollout."""

    @abstractmethod
    def score(self, subject: Any) -> Any:
        """Score one attempt or several, depending on `scope`.

        Must be async if `runs_in` is asyncio or trio.
        """


class Reward(AnyReward):
    """Scores one finished attempt. The value is placed on its last action token."""

    scope: ClassVar[Scope] = "trajectory"

    @abstractmethod
    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if it does not apply to this attempt.

        Raise if it cannot be determined.
        """

    def rehearse(self, task: Task) -> None:
        """Score something independent of the answer, such as the ground truth against itself.

        Called before `score`, in the same process. If it raises or kills the process, the answer is not at
        fault, and the outcome is reward_error.
        """

    def failed(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward of an answer that made `score` exceed `max_answer_cpu_s` or kill its process.

        None: the outcome is reward_error.
        """
        return None


class TurnReward(AnyReward):
    """Scores every assistant turn of an attempt. Each value is placed on the last token of its turn."""

    scope: ClassVar[Scope] = "turn"

    @abstractmethod
    def score(self, attempt: Attempted) -> Sequence[float | None]:
        """Return one finite value per assistant turn; None for turns to which it does not apply."""


class GroupReward(AnyReward):
    """Scores all attempts of a group together by comparing them."""

    scope: ClassVar[Scope] = "group"

    @abstractmethod
    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        """Return one result per attempt, in the same order; None for attempts to which it does not apply."""


class BatchReward(AnyReward):
    """Scores all attempts of a training batch together, when the controller takes the batch."""

    scope: ClassVar[Scope] = "batch"

    @abstractmethod
    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        """Return one result per attempt, in the same order; None for attempts to which it does not apply."""


def _handed_in(message: Message) -> str | None:
    """Return the answer that a message passes to the tool `finish`, if any."""
    given = next(
        (call.arguments for call in message.tool_calls if call.name == FINISH and call.arguments is not None),
        {},
    )
    answer = given.get("answer")
    return answer if isinstance(answer, str) else None


def _with_thought(message: Message) -> str:
    return (
        f"<think>\n{message.reasoning}\n</think>\n{message.content}" if message.reasoning else message.content
    )
