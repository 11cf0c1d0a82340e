"""Tasks in the layout of tau2-bench: what the customer wants, and what must be true in the end.

Source: the classes of tau2-bench's `data_model/tasks.py`, as far as they concern the policy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentrl.errors import DataError
from agentrl.types import JsonObject

Basis = Literal["DB", "COMMUNICATE", "ACTION", "ENV_ASSERTION", "NL_ASSERTION"]
SCORED: frozenset[Basis] = frozenset({"DB", "COMMUNICATE", "ACTION"})
"""What a reward may rest on here. Assertions call methods of a domain's own, or ask a judge."""


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ExpectedCall(_Read):
    """A call of a tool. compare_args: the arguments that must agree; None: all."""

    name: str
    arguments: dict[str, Any] = {}
    requestor: Literal["assistant", "user"] = "assistant"
    compare_args: list[str] | None = None

    def is_made_by(self, name: str, arguments: JsonObject) -> bool:
        """Return whether a call is this action."""
        compared = (
            arguments.keys() | self.arguments.keys() if self.compare_args is None else self.compare_args
        )
        return name == self.name and all(arguments.get(key) == self.arguments.get(key) for key in compared)


class Instructions(_Read):
    """What the customer is told, in parts."""

    reason_for_call: str
    task_instructions: str = ""
    known_info: str | None = None
    unknown_info: str | None = None

    def __str__(self) -> str:
        parts = (
            ("", self.reason_for_call),
            ("You know: ", self.known_info),
            ("You do not know: ", self.unknown_info),
            ("", self.task_instructions),
        )
        return "\n".join(label + text.strip() for label, text in parts if text)


class Scenario(_Read):
    """Who the customer is, and what the customer is told."""

    persona: str | None = None
    instructions: Instructions | str


class InitialData(_Read):
    agent_data: dict[str, Any] | None = None
    user_data: dict[str, Any] | None = None


class InitialState(_Read):
    initialization_data: InitialData | None = None
    initialization_actions: list[Any] | None = None
    message_history: list[Any] | None = None


class Criteria(_Read):
    """What is true after an attempt that is worth a point.

    actions: one way to the right database. communicate_info: texts that the policy must say.
    """

    actions: list[ExpectedCall] | None = None
    communicate_info: list[str] | None = None
    reward_basis: list[Basis] = Field(default_factory=lambda: list[Basis](["DB", "COMMUNICATE"]))


class Tau2Task(_Read):
    """A task of a file `tasks.json`."""

    id: str
    user_scenario: Scenario
    initial_state: InitialState | None = None
    evaluation_criteria: Criteria | None = None

    @property
    def unplayable(self) -> str:
        """Why the task cannot be played or scored here; "": it can be."""
        criteria, begun = self.evaluation_criteria, self.initial_state or InitialState()
        if criteria is None:
            return "no evaluation_criteria"
        if others := sorted(set(criteria.reward_basis) - SCORED):
            return f"scored by {others[0]}"
        data = begun.initialization_data or InitialData()
        if data.user_data or any(action.requestor == "user" for action in criteria.actions or ()):
            return "tools of the customer"
        if begun.message_history or begun.initialization_actions:
            return "calls or messages before the first turn"
        return ""


def read_tasks(file: Path) -> list[Tau2Task]:
    """Read a file of tasks: a JSON list.

    Raises:
        DataError: it cannot be read, has a task that is none, or two tasks of one id.
    """
    try:
        tasks = _TASKS.validate_python(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise DataError(f"--tasks={file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"--tasks={file}: {place}: {first['msg']}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"--tasks={file}: is not valid JSON: {error}") from error
    ids: Sequence[str] = [task.id for task in tasks]
    if twice := next((id for id in ids if ids.count(id) > 1), None):
        raise DataError(f"--tasks={file}: two tasks have the id {twice!r}")
    return tasks


_TASKS = TypeAdapter(list[Tau2Task])
