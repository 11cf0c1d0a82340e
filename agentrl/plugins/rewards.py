"""The contract of rewards: one class for each scope, all of them registered under one kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from agentrl.types import JsonObject, Message, Outcome, Task

FINISH = "finish"
"""The tool whose argument `answer` is the answer of the attempt."""

RunsIn = Literal["inline", "thread", "process", "asyncio", "trio"]
Scope = Literal["trajectory", "turn", "group", "batch"]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`value` is learned from; `metrics` (format, accuracy, ...) are reported; `details` (JSON values) are kept with the trajectory."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    details: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempted:
    """What a reward sees of one finished attempt.

    messages: the conversation, prompt included. num_response_tokens: tokens after the prompt, context included;
    num_action_tokens: those the policy sampled; max_response_tokens: how many there might have been.
    """

    task: Task
    messages: tuple[Message, ...]
    outcome: Outcome
    num_turns: int
    num_response_tokens: int
    num_action_tokens: int
    max_response_tokens: int

    @property
    def handed_in(self) -> str | None:
        """What the last assistant message handed in through the tool `finish`; None when it did not."""
        last = self._last_message
        return None if last is None else _handed_in(last)

    @property
    def answer(self) -> str:
        """What the last assistant message handed in through the tool `finish`, else its text; "" when there is none."""
        last, handed_in = self._last_message, self.handed_in
        return (last.content if last is not None else "") if handed_in is None else handed_in

    @property
    def _last_message(self) -> Message | None:
        return next((message for message in reversed(self.messages) if message.role == "assistant"), None)

    @property
    def response(self) -> tuple[Message, ...]:
        """The messages after the prompt."""
        first = next((i for i, message in enumerate(self.messages) if i >= len(self.task.messages) and message.role == "assistant"), None)
        return self.messages[first:] if first is not None else ()

    @property
    def response_text(self) -> str:
        """The response as one text, a line break between messages; what the assistant thought stands in `<think>` tags."""
        return "\n".join(text for message in self.response for text in (_with_thought(message), _handed_in(message)) if text is not None)

    @property
    def assistant_texts(self) -> tuple[str, ...]:
        """The text of each assistant message of the response, with what it thought in `<think>` tags."""
        return tuple(_with_thought(message) for message in self.response if message.role == "assistant")


class AnyReward(ABC):
    """What all rewards share. Subclass one of the four below."""

    name: ClassVar[str]
    scope: ClassVar[Scope]
    runs_in: RunsIn = "thread"
    """Where `score` is called.

    thread: it may block. process: it is heavy, and gets a process of its own that is killed at the deadline; the reward is
    made there again from its class and config. asyncio, trio: `score` is async. inline: it takes microseconds, whatever the
    text; it is called in the loop that plays all attempts, no deadline can end it, and while it runs nothing else does.
    """
    max_concurrent: int | None = None
    """Calls at once per rollout actor; None: any number. Waiting for a free place does not count into the deadline."""
    max_answer_cpu_s: int | None = None
    """Of a `Reward` in a process that has `failed`: seconds of CPU after which the kernel ends a `score`, whatever it is doing."""
    has_own_deadlines: bool = False
    """Its calls end by deadlines of its own, whatever `reward.timeout_s` is."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    def check(self, task: Task) -> None:
        """Raise DataError when the task lacks what this reward needs; called before any rollout."""

    @abstractmethod
    def score(self, subject: Any) -> Any:
        """Score what the scope says: an attempt, or several. A coroutine function where `runs_in` is asyncio or trio."""


class Reward(AnyReward):
    """Scores one finished attempt; the value lies on its last action token."""

    scope: ClassVar[Scope] = "trajectory"

    @abstractmethod
    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None when it does not apply to this attempt. Raise when it cannot tell."""

    def rehearse(self, task: Task) -> None:
        """Score what does not depend on any answer, as the ground truth against itself; called first, in the process of `score`.

        What raises or ends the process here is no answer's fault, and a reward_error.
        """

    def failed(self, attempt: Attempted) -> RewardResult | None:
        """Return what an answer is worth that made `score` cost more than `max_answer_cpu_s` or end its process; None: a reward_error."""
        return None


class TurnReward(AnyReward):
    """Scores every assistant turn of an attempt; each value lies on the last token of its turn."""

    scope: ClassVar[Scope] = "turn"

    @abstractmethod
    def score(self, attempt: Attempted) -> Sequence[float | None]:
        """Return one finite value per assistant turn, None where it does not apply."""


class GroupReward(AnyReward):
    """Scores all attempts at one task together, by comparing them."""

    scope: ClassVar[Scope] = "group"

    @abstractmethod
    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        """Return one result per attempt, in their order; None where it does not apply."""


class BatchReward(AnyReward):
    """Scores all attempts of a training batch together, where the learner takes them."""

    scope: ClassVar[Scope] = "batch"

    @abstractmethod
    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        """Return one result per attempt, in their order; None where it does not apply."""


def _handed_in(message: Message) -> str | None:
    """Return the answer that a message gives to the tool `finish`."""
    given = next((call.arguments for call in message.tool_calls if call.name == FINISH and call.arguments is not None), {})
    answer = given.get("answer")
    return answer if isinstance(answer, str) else None


def _with_thought(message: Message) -> str:
    return f"<think>\n{message.reasoning}\n</think>\n{message.content}" if message.reasoning else message.content
