"""The answer-checking tool of verl's GSM8K example: the model submits an answer and learns whether it is
right.
"""

from __future__ import annotations

from typing import Any

from agentrl.extras.verl.shim.utils.reward_score import gsm8k

from .base_tool import BaseTool
from .schemas import ToolResponse

PENALTY = -0.05
"""Reward of a submission that does not improve on the previous one."""


class Gsm8kTool(BaseTool):
    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._submitted: dict[str, tuple[str, Any, float]] = {}  # id -> last answer, ground truth, its reward

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        ground_truth = (
            kwargs.get("create_kwargs", {}).get("ground_truth") if ground_truth is None else ground_truth
        )
        self._submitted[instance_id] = ("", ground_truth, 0.0)
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        answer = str(parameters.get("answer", ""))
        marked = answer if answer.startswith("#### ") else f"#### {answer}"
        _, ground_truth, before = self._submitted[instance_id]
        self._submitted[instance_id] = (marked, ground_truth, before)
        reward = await self.calc_reward(instance_id)
        self._submitted[instance_id] = (marked, ground_truth, reward)
        return (
            ToolResponse(text=f"Current parsed {answer=} {reward=}"),
            0.0 if reward > before else PENALTY,
            {},
        )

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        answer, ground_truth, _ = self._submitted[instance_id]
        return gsm8k.compute_score(answer, ground_truth, method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._submitted[instance_id]
