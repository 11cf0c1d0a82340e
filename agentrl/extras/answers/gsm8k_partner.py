"""An interaction partner for math word problems: rejects wrong answers and ends the conversation at the right
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from agentrl.errors import DataError
from agentrl.extras.answers.gsm8k import extract_answer, is_correct, parse_number
from agentrl.plugins import Interaction, InteractionReply
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject, Message

FEEDBACK = "Wrong. Try again."
PRAISE = "Correct."


class Gsm8kPartnerOptions(Options):
    """Options in `agent.interaction_config.gsm8k`."""

    reward: Literal["turn", "final"] = "turn"


class Gsm8k(Interaction):
    """Checks the final answer of the last assistant message against the row's `ground_truth`: 1 if it is
    right, else 0.

    Config `reward`: turn (each turn is rewarded for its answer) or final (only the last answer counts, as the
        final score).
    """

    name: ClassVar[str] = "gsm8k"
    runtime = "trio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(Gsm8kPartnerOptions, self.config, plugin="interaction 'gsm8k'")

    async def start(self, *, ground_truth: Any = None, query: str = "", **_: Any) -> None:
        """Store the row's ground truth. `query` and other fields of the row are ignored.

        Raises:
            DataError: `ground_truth` in the row's interaction_kwargs is not a number.
        """
        if parse_number(ground_truth) is None:
            raise DataError(
                f"interaction 'gsm8k' needs interaction_kwargs.ground_truth, a number (got {ground_truth!r})"
            )
        self._ground_truth = ground_truth
        self._is_right = False

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        answer = extract_answer(messages[-1].content, strict=False)
        self._is_right = is_correct(answer, self._ground_truth)
        reward = float(self._is_right) if self._options.reward == "turn" else None
        return InteractionReply(PRAISE if self._is_right else FEEDBACK, is_done=self._is_right, reward=reward)

    async def score(self) -> float | None:
        return float(self._is_right) if self._options.reward == "final" else None
