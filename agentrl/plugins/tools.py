"""The contract of tools."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from agentrl.plugins.fields import check_answer
from agentrl.types import Image, JsonObject

Runtime = Literal["asyncio", "trio"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call.

    text: shown to the model.
    reward: optional reward for the turn.
    metrics: summed over the trajectory.
    is_error: the model made a wrong call (bad arguments, division by zero); `text` says how to correct it. A
        tool can also raise `WrongCall`. If its infrastructure is broken, it raises ToolError instead.
    is_final: the trajectory ends with this turn.
    state: describes the environment after the call, for estimators that compare turns taken in the same state
        (gigpo).
        None: the messages shown to the model identify the state.
    images: shown to the model before the text, if it sees (docs/models.md).

    Raises:
        TypeError, ValueError: a field has a wrong type, or a number is not finite.
    """

    text: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False
    is_final: bool = False
    state: str | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        check_answer(
            "ToolResult",
            text=self.text,
            flags={"is_error": self.is_error, "is_final": self.is_final},
            reward=self.reward,
            metrics=self.metrics,
            state=self.state,
            images=self.images,
        )


class WrongCall(Exception):
    """The model called the tool wrongly. The model sees the message and can correct the call.

    Any other exception means that the tool itself is broken.
    """


class Tool(ABC):
    """A tool. Each attempt gets its own instance, which may keep state between calls; `close` always runs."""

    name: ClassVar[str]
    description: ClassVar[str]
    parameters: ClassVar[JsonObject]
    """JSON schema of the arguments object."""
    runtime: ClassVar[Runtime] = "asyncio"
    is_idempotent: ClassVar[bool] = False
    """Whether a failed call can safely be retried."""

    trajectory_key: str = ""
    """Key of the attempt, shared by all of its tools. Set before `start`."""
    environment: Any = None
    """The attempt's environment; None if the row has none. Set before `start`."""
    row_kwargs: JsonObject = MappingProxyType({})
    """The row's complete `tools_kwargs[name]`. Set before `start`."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    async def start(self, **create_kwargs: Any) -> None:
        """Prepare for one attempt. Receives the row's `tools_kwargs[name].create_kwargs`."""

    @abstractmethod
    async def call(self, arguments: JsonObject) -> ToolResult:
        """Run one call.

        Raise WrongCall if the model called the tool wrongly, ToolError if the tool itself is broken.
        """

    async def score(self) -> float | None:
        """Return a reward for the overall use of the tool, or None.

        Called once, after the agent loop is done.
        """
        return None

    async def close(self) -> None:
        """Release the resources of `start`. Runs once for each `start`, even if `start` failed."""

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI function schema that the chat template shows to the model."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def not_run(problem: str, parameters: JsonObject | None = None) -> ToolResult:
    """Return the result of a call that was not run: what was wrong, and the expected arguments."""
    if parameters is not None:
        problem += (
            f"; expected arguments: {json.dumps(dict(parameters), ensure_ascii=False, separators=(',', ':'))}"
        )
    return ToolResult(f"not run: {problem}", is_error=True)
