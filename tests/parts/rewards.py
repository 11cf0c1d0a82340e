"""Rewards and a partner of the tests of the core: those that read answers are extras."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.plugins import Attempted, Interaction, InteractionReply, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn
from agentrl.types import Message, Task

FEEDBACK = "Wrong. Try again."
PRAISE = "Correct."


def stated(text: str) -> str | None:
    """Return the number behind the last `####` of a text; None if there is none."""
    found = re.findall(r"#### (-?\d+)", text)
    return found[-1] if found else None


class Number(Reward):
    """1 if the answer states the number that is the truth, else 0."""

    name: ClassVar[str] = "number"
    runs_in: RunsIn = "inline"

    def check(self, task: Task) -> None:
        if not str(task.ground_truth).lstrip("-").isdecimal():
            raise DataError(
                f"task {task.task_id}: the ground truth must be a number, is {task.ground_truth!r}"
            )

    def score(self, attempt: Attempted) -> RewardResult:
        is_right = float(stated(attempt.answer) == str(attempt.task.ground_truth))
        return RewardResult(is_right, {"accuracy": is_right}, {"answer": stated(attempt.answer)})


class Evenness(Reward):
    """1 if the response has an even number of characters: an untrained policy earns it half of the time."""

    name: ClassVar[str] = "evenness"
    runs_in: RunsIn = "inline"

    def score(self, attempt: Attempted) -> RewardResult:
        return RewardResult(float(len(attempt.response_text) % 2 == 0))


class Tutor(Interaction):
    """Says whether the number is right until it is; each turn earns 1 for the right one, else 0."""

    name: ClassVar[str] = "tutor"
    runtime = "trio"

    async def start(self, *, ground_truth: Any = None, **_: Any) -> None:
        self._truth = str(ground_truth)

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        is_right = stated(messages[-1].content) == self._truth
        return InteractionReply(PRAISE if is_right else FEEDBACK, is_done=is_right, reward=float(is_right))
