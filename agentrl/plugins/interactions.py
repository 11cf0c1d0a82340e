"""The contract of interactions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.plugins.fields import check_answer
from agentrl.plugins.tools import Runtime
from agentrl.types import Image, JsonObject, Message


@dataclass(frozen=True, slots=True)
class InteractionReply:
    """The partner's reply, with an optional reward for the assistant's last turn.

    is_done: the conversation is over; the text is not appended.
    metrics: summed over the trajectory.
    state: describes the environment before the next turn, as in ToolResult.
    images: shown to the model before the text, if it sees (docs/models.md).

    Raises:
        TypeError, ValueError: a field has a wrong type, or a number is not finite.
    """

    text: str
    is_done: bool
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        check_answer(
            "InteractionReply",
            text=self.text,
            flags={"is_done": self.is_done},
            reward=self.reward,
            metrics=self.metrics,
            state=self.state,
            images=self.images,
        )


class Interaction(ABC):
    """A conversation partner. Each attempt gets its own instance.

    Order of calls: start, respond (any number of times), score, finalize.
    """

    name: ClassVar[str]
    runtime: ClassVar[Runtime] = "asyncio"

    environment: Any = None
    """The attempt's environment; None if the row has none. Set before `start`."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    async def start(self, **interaction_kwargs: Any) -> None:
        """Prepare for one attempt. Receives the row's `interaction_kwargs` without `name`."""

    @abstractmethod
    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Reply to the conversation so far. Its last message is the assistant's."""

    async def score(self) -> float | None:
        """Return the final score of the conversation, or None. Called once, after the agent loop is done."""
        return None

    async def finalize(self) -> None:
        """Release the resources of `start`. Always runs."""
