"""A partner who thinks of a thing."""

from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.plugins import Interaction, InteractionReply
from agentrl.types import Message


class TwentyQuestions(Interaction):
    """Says yes or no until the thing is named, or twenty questions are asked; fewer questions score
    higher.
    """

    name: ClassVar[str] = "twenty_questions"

    async def start(self, *, thing: str = "", facts: Sequence[str] = (), **_: Any) -> None:
        if not thing:
            raise DataError("interaction 'twenty_questions' needs a `thing`")
        self.thing, self.facts, self.num_asked, self.is_found = thing, facts, 0, False

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        said = messages[-1].content.lower()
        self.num_asked += 1
        self.is_found = self.thing in said
        if self.is_found or self.num_asked >= 20:
            return InteractionReply("", is_done=True, metrics={"questions": 1.0})
        answer = "Yes." if any(fact in said for fact in self.facts) else "No."
        return InteractionReply(answer, is_done=False, metrics={"questions": 1.0})

    async def score(self) -> float:
        return 1.0 - self.num_asked / 20 if self.is_found else 0.0
