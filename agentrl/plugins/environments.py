"""The contract of environments: the state that the tools, partner, agent and rewards of one attempt share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from agentrl.errors import PluginError
from agentrl.plugins.functions import MethodTool, tool_of
from agentrl.plugins.tools import Runtime, Tool
from agentrl.types import JsonObject


class Environment:
    """The state of one attempt. Each attempt gets its own instance.

    Order of calls: start, the attempt's turns, facts, the rewards of the attempt, close. Methods under
    `@tool` are tools of the attempt; their calls run one at a time, in the order of the calls.
    """

    name: ClassVar[str]
    runtime: ClassVar[Runtime] = "asyncio"
    """Where `start`, `facts`, `close` and async methods under `@tool` run."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    async def start(self, **environment_kwargs: Any) -> None:
        """Prepare for one attempt. Receives the row's `environment_kwargs` without `name`."""

    async def facts(self) -> JsonObject:
        """Return what is true at the end of the agent loop, as plain JSON data, for rewards that do not see
        the environment itself, and for the record.

        Not called if the attempt failed.
        """
        return {}

    async def snapshot(self) -> Any:
        """Return the state, for `restore` in the same attempt. Optional.

        Raises:
            PluginError: this environment has no snapshots.
        """
        raise PluginError(f"environment {self.name!r} has no snapshots: it does not override `snapshot`")

    async def restore(self, snapshot: Any) -> None:
        """Return to the state of a snapshot. Optional; tools and partner keep what they remember.

        Raises:
            PluginError: this environment has no snapshots.
        """
        raise PluginError(f"environment {self.name!r} has no snapshots: it does not override `restore`")

    async def close(self) -> None:
        """Release the resources of `start`. Runs once for each `start`, even if `start` failed."""


class Unreachable:
    """Stands for an environment that a reward cannot see; using it raises an error that says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by pickle and copy
            raise AttributeError(name)
        raise PluginError(f"attempt.environment.{name}: {self._why}; use attempt.facts")


_KNOWN: dict[type[Environment], Mapping[str, type[Tool]]] = {}
"""Tools of the classes seen so far. Every attempt asks for them."""


def environment_tools(environment: type[Environment]) -> Mapping[str, type[Tool]]:
    """Return the tools that an environment's methods are: name -> class, in the order of their definitions.

    Raises:
        PluginError: two methods make tools of the same name.
    """
    if environment not in _KNOWN:
        _KNOWN[environment] = _tools_of(environment)
    return _KNOWN[environment]


def _tools_of(environment: type[Environment]) -> Mapping[str, type[Tool]]:
    tools: dict[str, type[Tool]] = {}
    names = dict.fromkeys(name for cls in reversed(environment.__mro__) for name in vars(cls))
    for member in names:
        found = inspect.getattr_static(environment, member)
        tool = tool_of(found.__func__ if isinstance(found, staticmethod) else found)
        if tool is None:
            continue
        if tool.name in tools:
            raise PluginError(
                f"environment {environment.name!r}: two of its methods are tools with the name "
                f"{tool.name!r}; rename one by @tool(name=...)"
            )
        tools[tool.name] = tool.of(environment) if issubclass(tool, MethodTool) else tool
    return tools
