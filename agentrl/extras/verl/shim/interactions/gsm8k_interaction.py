"""The simulated user of verl's GSM8K example: asks for another answer until it is right."""

from __future__ import annotations

from typing import Any

from agentrl.extras.verl.shim.utils.reward_score import gsm8k

from .base import BaseInteraction


class Gsm8kInteraction(BaseInteraction):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._answers: dict[str, tuple[str, Any]] = {}  # id -> last answer, ground truth

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        instance_id = await super().start_interaction(instance_id)
        self._answers[instance_id] = ("", ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = next(
            (message["content"] for message in reversed(messages) if message["role"] == "assistant"), ""
        )
        self._answers[instance_id] = (answer, self._answers[instance_id][1])
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Your response is correct!", score, {}
        return (
            False,
            "Your response is incorrect! You need to reflect on your answer and try again.",
            score,
            {},
        )

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:  # type: ignore[override]
        answer, ground_truth = self._answers[instance_id]
        return gsm8k.compute_score(answer, ground_truth, method="strict")

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        del self._answers[instance_id]
