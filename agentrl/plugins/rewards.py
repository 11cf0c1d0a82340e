"""The contract of rewards: one class for each scope, all of them registered under one kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from agentrl.types import JsonObject, Message, Outcome, Task


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`value` is learned from; `metrics` (format, accuracy, ...) are only reported."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)


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
    def answer(self) -> str:
        """Text of the last assistant message; "" when there is none."""
        return next((message.content for message in reversed(self.messages) if message.role == "assistant"), "")

    @property
    def response(self) -> tuple[Message, ...]:
        """The messages after the prompt."""
        first = next((i for i, message in enumerate(self.messages) if i >= len(self.task.messages) and message.role == "assistant"), None)
        return self.messages[first:] if first is not None else ()


class AnyReward(ABC):
    """What all rewards share. Subclass one of the four below."""

    name: ClassVar[str]
    runs_in: ClassVar[Literal["thread", "process", "asyncio"]] = "thread"
    """thread: `score` may block; process: it is heavy and gets a process of its own, killed at the deadline; asyncio: `score` is async."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    def check(self, task: Task) -> None:
        """Raise DataError when the task lacks what this reward needs; called before any rollout."""


class Reward(AnyReward):
    """Scores one finished attempt; the value lies on its last action token."""

    @abstractmethod
    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None when it does not apply to this attempt. Raise when it cannot tell."""


class TurnReward(AnyReward):
    """Scores every assistant turn of an attempt; each value lies on the last token of its turn."""

    @abstractmethod
    def score(self, attempt: Attempted) -> Sequence[float | None]:
        """Return one value per assistant turn, None where it does not apply."""


class GroupReward(AnyReward):
    """Scores all attempts at one task together, by comparing them."""

    @abstractmethod
    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        """Return one result per attempt."""


class BatchReward(AnyReward):
    """Scores all attempts of a training batch together, where the learner takes them."""

    @abstractmethod
    def score(self, attempts: Sequence[Attempted]) -> Sequence[RewardResult | None]:
        """Return one result per attempt."""
