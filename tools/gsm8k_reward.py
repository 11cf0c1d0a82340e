"""A tool that checks an answer to a word problem, and rewards the turn that found it."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.plugins import Tool, ToolResult
from agentrl.rewards.gsm8k import extract_answer, is_correct, parse_number
from agentrl.types import JsonObject

PENALTY = -0.05


class Gsm8kReward(Tool):
    """Says whether `answer` is right.

    The turn's reward is 0 for an answer that is better than the one before (wrong counts as 0 and right as 1; before the first
    call it is 0), else `penalty`: asking again and again costs a little, also with the right answer. As verl's `Gsm8kTool` does.
    The value of the last answer, 1 or 0, is the tool's final score.
    """

    name: ClassVar[str] = "calc_gsm8k_reward"
    description: ClassVar[str] = (
        "Check whether an answer to the problem is right. The reward is 1.0 for the right answer and 0.0 for a wrong one."
    )
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer: a number."}},
        "required": ["answer"],
    }
    runtime = "trio"

    async def start(self, *, ground_truth: Any = None, **_: Any) -> None:
        """Take the row's `tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`.

        Raises:
            DataError: it is no number.
        """
        if parse_number(ground_truth) is None:
            raise DataError(f"tool 'calc_gsm8k_reward' needs create_kwargs.ground_truth, a number (got {ground_truth!r})")
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
