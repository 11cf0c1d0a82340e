"""The reward `tau2`: the database is as the customer wanted it, and what had to be said was said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.extras.hubs.tau2_tasks import SCORED, ExpectedCall
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.types import JsonObject, Task

KEY = "tau2"
"""Name of the reward, and first part of the data source."""


class Tau2Reward(Reward):
    """1 if everything that the task's `basis` names is right, else 0. Metrics: database, told (the share of
    texts that were said), actions (the share of calls that were made).
    """

    name: ClassVar[str] = KEY

    def check(self, task: Task) -> None:
        goal_of(task)

    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if the attempt had no database.

        Raises:
            DataError: the task has no goal.
        """
        goal, facts = goal_of(attempt.task), attempt.facts
        if "database" not in facts:
            return None
        said = [said_text(message.content) for message in attempt.messages if message.role == "assistant"]
        calls = [
            call
            for message in attempt.messages
            for call in message.tool_calls
            if message.role == "assistant" and call.arguments is not None
        ]
        told = [any(said_text(text) in one for one in said) for text in goal["told"]]
        made = [
            any(action.is_made_by(call.name, call.arguments or {}) for call in calls)
            for action in map(ExpectedCall.model_validate, goal["actions"])
        ]
        shares = {
            "database": float(facts["database"] == goal["database"]),
            "told": sum(told) / len(told) if told else 1.0,
            "actions": sum(made) / len(made) if made else 1.0,
        }
        parts = {"DB": "database", "COMMUNICATE": "told", "ACTION": "actions"}
        return RewardResult(float(all(shares[parts[name]] == 1.0 for name in goal["basis"])), shares)


def said_text(text: str) -> str:
    """Return a text as it is compared: in small letters, without commas, as tau2-bench does."""
    return text.lower().replace(",", "")


def goal_of(task: Task) -> JsonObject:
    """Return the goal of a row: database, told, actions, basis.

    Raises:
        DataError: the row has none.
    """
    try:
        goal: Any = json.loads(task.ground_truth)
    except (TypeError, ValueError):
        goal = None
    if (
        not isinstance(goal, Mapping)
        or not {"database", "told", "actions", "basis"} <= goal.keys()
        or not set(goal["basis"]) <= SCORED
    ):
        raise DataError(
            f"task {task.task_id}: the ground truth of the reward {KEY!r} is a JSON text with database, "
            f"told, actions and basis, is {str(task.ground_truth)[:80]!r}; write rows with `agentrl data "
            "tau2`"
        )
    return goal
