"""Reward for arithmetic tasks: the final number is right or wrong."""

from __future__ import annotations

from typing import ClassVar

from agentrl.extras.answers.gsm8k import read_number, require_number
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn
from agentrl.types import Task


class Arithmetic(Reward):
    """1 if the last assistant message's `#### N`, or the number submitted by `finish`, equals the ground
    truth, else 0.

    Metrics: accuracy, accuracy_strict, accuracy_flexible, format. Details: answer.
    """

    name: ClassVar[str] = "arithmetic"
    runs_in: RunsIn = "inline"

    def check(self, task: Task) -> None:
        require_number(task, self.name)

    def score(self, attempt: Attempted) -> RewardResult:
        return read_number(attempt, strict=True).result(wrong=0.0)
