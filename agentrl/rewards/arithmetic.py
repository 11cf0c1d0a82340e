"""Sums: correctness of the final number, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agentrl.plugins import Reward, RewardResult
from agentrl.rewards.gsm8k import extract_answer, is_correct, last_answer, require_number
from agentrl.types import Message, Task


class Arithmetic(Reward):
    """1 when the last assistant message's `#### N` equals the ground truth, else 0. Metrics: accuracy, format."""

    name: ClassVar[str] = "arithmetic"

    def check(self, task: Task) -> None:
        require_number(task, self.name)

    def score(self, task: Task, messages: Sequence[Message]) -> RewardResult:
        answer = extract_answer(last_answer(messages), strict=True)
        accuracy = float(is_correct(answer, task.ground_truth))
        return RewardResult(accuracy, {"accuracy": accuracy, "format": float(answer is not None)})
