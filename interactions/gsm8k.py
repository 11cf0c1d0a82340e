"""A partner who knows the answer of a word problem: says when it is wrong, ends the conversation when it is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.plugins import Interaction, InteractionReply
from agentrl.rewards.gsm8k import extract_answer, is_correct, parse_number
from agentrl.types import Message

FEEDBACK = "Wrong. Try again."
PRAISE = "Correct."


class Gsm8k(Interaction):
    """Checks the last assistant message's final answer against the row's `ground_truth`.

    Each reply rewards its turn with 1 or 0; the final score is that of the last answer.
    """

    name: ClassVar[str] = "gsm8k"
    runtime = "trio"

    async def start(self, *, ground_truth: Any = None, query: str = "", **_: Any) -> None:
        """Take the row's ground truth; `query` and whatever else the row carries are not needed.

        Raises:
            DataError: the row's interaction_kwargs have no number as `ground_truth`.
        """
        if parse_number(ground_truth) is None:
            raise DataError(f"interaction 'gsm8k' needs interaction_kwargs.ground_truth, a number (got {ground_truth!r})")
        self._ground_truth = ground_truth
        self._is_right = False

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        answer = extract_answer(messages[-1].content, strict=False)
        self._is_right = is_correct(answer, self._ground_truth)
        if self._is_right:
            return InteractionReply(PRAISE, is_done=True, reward=1.0)
        return InteractionReply(FEEDBACK, is_done=False, reward=0.0)

    async def score(self) -> float:
        return float(self._is_right)
