"""A reward for short turns."""

from collections.abc import Sequence
from typing import ClassVar

from agentrl.plugins import Attempted, TurnReward


class Brevity(TurnReward):
    """1 for a turn of at most `max_words` words, else 0; none for a turn without words."""

    name: ClassVar[str] = "brevity"

    def score(self, attempt: Attempted) -> Sequence[float | None]:
        limit = self.config.get("max_words", 10)
        turns = [message.content.split() for message in attempt.response if message.role == "assistant"]
        return [float(len(words) <= limit) if words else None for words in turns]
