"""A tool that checks the answer to a math word problem and penalizes turns that bring no improvement."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.extras.answers.gsm8k import extract_answer, is_correct, parse_number
from agentrl.plugins import Tool, ToolResult
from agentrl.types import JsonObject

PENALTY = -0.05


class Gsm8kReward(Tool):
    """Says whether `answer` is right.

    An answer has value 1 if it is right, else 0. The turn's reward is 0 if the value is higher than that of
    the previous call (0 before the first call), else the config's `penalty`: repeated calls cost a little,
    even with the right answer. The value of the last answer is the tool's final score. Same rules as verl's
    `Gsm8kTool`.
    """

    name: ClassVar[str] = "calc_gsm8k_reward"
    description: ClassVar[str] = (
        "Check whether an answer to the problem is right. The reward is 1.0 for the right answer and 0.0 for "
        "a wrong one."
    )
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer: a number."}},
        "required": ["answer"],
    }
    runtime = "trio"

    async def start(self, *, ground_truth: Any = None, **_: Any) -> None:
        """Store the row's `tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`.

        Raises:
            DataError: it is not a number.
        """
        if parse_number(ground_truth) is None:
            raise DataError(
                f"tool 'calc_gsm8k_reward' needs create_kwargs.ground_truth, a number (got {ground_truth!r})"
            )
        self._ground_truth = ground_truth
        self._value = 0.0

    async def call(self, arguments: JsonObject) -> ToolResult:
        answer = arguments["answer"]
        value = float(is_correct(extract_answer(answer, strict=False), self._ground_truth))
        penalty = 0.0 if value > self._value else float(self.config.get("penalty", PENALTY))
        self._value = value
        return ToolResult(f"answer: {answer[:100]}, reward: {value}", reward=penalty)

    async def score(self) -> float | None:
        return self._value
