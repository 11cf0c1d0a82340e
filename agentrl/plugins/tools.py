"""The contract of tools."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agentrl.errors import DataError
from agentrl.types import JsonObject, Task

if TYPE_CHECKING:
    from agentrl.plugins.agents import AgentLoop

Runtime = Literal["asyncio", "trio"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gives back: `text` for the model, an optional turn reward, metrics for the trajectory.

    `is_error` marks a call the model got wrong (bad arguments, division by zero): the text tells it how to do better.
    A tool may raise `WrongCall` for that; one whose infrastructure breaks raises ToolError instead. `is_final` ends the
    trajectory with this turn. `state` describes the environment after the call, for estimators that compare turns taken in the same
    state (gigpo); None: it is told by what the model is shown.
    """

    text: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False
    is_final: bool = False
    state: str | None = None


class WrongCall(Exception):
    """Raised by a tool whose call makes no sense: the model reads the message, and may do better.

    Any other exception says that the tool itself is broken.
    """


class Tool(ABC):
    """A tool with the lifetime of one trajectory: state survives between its calls; `close` always runs."""

    name: ClassVar[str]
    description: ClassVar[str]
    parameters: ClassVar[JsonObject]
    """JSON schema of the arguments object."""
    runtime: ClassVar[Runtime] = "asyncio"
    is_idempotent: ClassVar[bool] = False
    """Whether a call that failed may simply be made again."""

    trajectory_key: str = ""
    """Names the trajectory: the same for all of its tools. Set before `start`."""
    row_kwargs: JsonObject = MappingProxyType({})
    """The row's `tools_kwargs[name]`, whole. Set before `start`."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    async def start(self, **create_kwargs: Any) -> None:
        """Prepare for one trajectory; receives the row's `tools_kwargs[name].create_kwargs`."""

    @abstractmethod
    async def call(self, arguments: JsonObject) -> ToolResult:
        """Run one call. Raise WrongCall when the model called it wrongly, ToolError when the tool itself is broken."""

    async def score(self) -> float | None:
        """Return a reward for the use of the tool as a whole, None when it gives none; asked once, when the agent loop is done."""
        return None

    async def close(self) -> None:
        """Free what `start` took; runs once for each `start`, also after one that failed."""

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI function schema that the chat template shows to the model."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def not_run(problem: str, parameters: JsonObject | None = None) -> ToolResult:
    """Return the answer to a call that was not run: what was wrong, and what arguments would be right."""
    if parameters is not None:
        problem += f"; expected arguments: {json.dumps(dict(parameters), ensure_ascii=False, separators=(',', ':'))}"
    return ToolResult(f"not run: {problem}", is_error=True)


def tools_for(task: Task, agent: type[AgentLoop], configured: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tools offered in `task`: the configured ones, then the row's own, each once.

    A row may choose among them by a list of names, `extra_info.tool_selection`. An agent with `uses_tools = False` is offered none.

    Raises:
        DataError: the row chooses a tool that is not offered.
    """
    if not agent.uses_tools:
        return ()
    offered = tuple(dict.fromkeys((*configured, *task.tools_kwargs)))
    chosen = task.extra_info.get("tool_selection")
    if not chosen:
        return offered
    for name in chosen:
        if name not in offered:
            raise DataError(f"{task.task_id}: tool_selection: {name!r} is not offered; offered: {', '.join(offered) or 'none'}")
    return tuple(dict.fromkeys(chosen))
