"""The plugins of one process: a registry of each kind, and what the tools of a task are."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from agentrl.errors import DataError, PluginError
from agentrl.plugins.agents import AGENT_ALIASES, AgentLoop, tools_for
from agentrl.plugins.environments import Environment, environment_tools
from agentrl.plugins.functions import MethodTool, function_tool, tool_of
from agentrl.plugins.interactions import Interaction
from agentrl.plugins.registry import Registry
from agentrl.plugins.rewards import AnyReward
from agentrl.plugins.sources import Reference, import_source
from agentrl.plugins.tools import Tool
from agentrl.types import Task


@dataclass(frozen=True)
class Plugins:
    """The registries of one process."""

    agents: Registry[AgentLoop]
    tools: Registry[Tool]
    interactions: Registry[Interaction]
    environments: Registry[Environment]
    rewards: Registry[AnyReward]
    served_tools: tuple[str, ...] = ()
    """Names of tools from MCP servers and verl's files. They are offered as if `agent.tools` named them."""
    _known: set[type[Environment]] = field(default_factory=set, repr=False, compare=False)
    """Environments whose methods are registered as tools."""

    def environment(self, name: str) -> type[Environment]:
        """Return the class of an environment. Its methods become known as the tools `<environment>.<tool>`.

        Raises:
            PluginError: the environment is unknown or malformed.
        """
        cls = self.environments.get(name)
        if cls not in self._known:
            for tool in environment_tools(cls).values():
                self.tools.add(tool, name=f"{cls.name}.{tool.name}")
            self._known.add(cls)
        return cls

    def environment_of(self, task: Task) -> type[Environment] | None:
        """Return the class of the task's environment; None if it has none.

        Raises:
            DataError: `environment_kwargs` have no name.
            PluginError: the environment is unknown or malformed.
        """
        if task.environment_kwargs is None:
            return None
        name = task.environment_kwargs.get("name")
        if not isinstance(name, str):
            raise DataError(
                f"{task.task_id}: environment_kwargs.name is {name!r}; write one of "
                f"{', '.join(self.environments.names()) or 'your environments'}"
            )
        return self.environment(name)

    def methods_named(self, name: str) -> list[str]:
        """Return the tools of environments that `name` means, as `<environment>.<tool>`. It is that, or only
        `<tool>`. [] if it is the name of another tool.
        """
        is_other = name in self.tools.names() and not issubclass(self.tools.get(name), MethodTool)
        if is_other or Reference.parse(name) is not None:
            return []
        found: list[tuple[str, str]] = []
        for environment in self.environments.names():
            with suppress(PluginError):  # of a package that is not installed
                found += [(environment, tool) for tool in environment_tools(self.environment(environment))]
        return [f"{of}.{tool}" for of, tool in found if name in (tool, f"{of}.{tool}")]

    def offered_tools(self, task: Task, configured: Sequence[str]) -> tuple[str, ...]:
        """Return the registered names of the tools that `task` offers (see `tools_for`), with references
        resolved. Tools of its environment come after the configured ones, as `<environment>.<tool>`.

        Raises:
            DataError: the row selects a tool that is not offered.
            PluginError: a tool is unknown, the agent needs a tool that is not offered, or a tool and a method
                of the environment have the same name.
        """
        agent, environment = self.agents.get(task.agent_name), self.environment_of(task)
        methods = () if environment is None else tuple(environment_tools(environment))
        known_as = "" if environment is None else environment.name
        names = tools_for(task, agent, (*configured, *self.served_tools, *methods), environment=known_as)
        owned = {} if environment is None else {name: f"{environment.name}.{name}" for name in methods}
        for given in (*configured, *self.served_tools, *task.tools_kwargs) if agent.uses_tools else ():
            self._check_ownership(given, owned, environment)
        names = tuple(dict.fromkeys(owned.get(name) or self.tools.own_name(name) for name in names))
        for name in agent.required_tools:
            if name not in names and name not in owned:
                raise PluginError(
                    f"agent {agent.name!r} needs the tool {name!r}, but {task.task_id} is offered "
                    f"{', '.join(names) or 'none'}: write agent.tools=[{', '.join((*configured, name))}]"
                )
        return names

    def _check_ownership(
        self, given: str, owned: Mapping[str, str], environment: type[Environment] | None
    ) -> None:
        """Check that a tool of the config or the row is neither a method of an environment, nor named like
        one of this task's environment.
        """
        if environment is not None and (given in owned or self.tools.own_name(given) in owned):
            raise PluginError(
                f"the tool {given!r} and a method of the environment {environment.name!r} have the same "
                "name; remove the tool from agent.tools and the row's tools_kwargs, or rename the method by "
                "@tool(name=...)"
            )
        if issubclass(self.tools.get(given), MethodTool):
            raise PluginError(of_environment(given))

    def add_module(self, module: ModuleType) -> None:
        """Register every plugin that `module` itself defines: classes, and functions under `@tool`.

        A class without a name or with abstract methods is skipped if other classes of the module derive from
        it.

        Raises:
            PluginError: a plugin violates the contract of its kind, or has the name of another one.
        """
        for value in vars(module).values():
            cls = tool_of(value) or value
            if (
                not (inspect.isclass(cls) or inspect.isfunction(cls))
                or value.__module__ != module.__name__
                or _is_base(cls, module)
            ):
                continue
            for registry in self.registries:
                if registry.has(cls):
                    registry.add(cls)
                else:
                    registry.note_stray(cls)

    @property
    def registries(self) -> tuple[Registry[Any], ...]:
        """All registries, in display order."""
        return self.tools, self.interactions, self.environments, self.agents, self.rewards

    def may_come_from(self, module: ModuleType) -> bool:
        """Return whether `module` defines a plugin, or a function that rows can name as a tool."""
        functions = (
            value
            for value in vars(module).values()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        return any(registry.is_from(module) for registry in self.registries) or any(functions)


def of_environment(given: str) -> str:
    """Return what is wrong with a method of an environment in a list of tools."""
    return (
        f"the tool {given!r} is a method of an environment: rows with the environment offer it by "
        "themselves; remove it from agent.tools and the row's tools_kwargs"
    )


def load_plugins(sources: Iterable[str] = ()) -> Plugins:
    """Return the registries, including the plugins of the user's files (`path/to/file.py`) and modules
    (`package.module`).

    Raises:
        PluginError: a source does not exist, fails to import or defines no plugin, or a plugin is malformed.
    """
    # type-abstract: mypy assumes that the base classes are instantiated, but only their subclasses are.
    plugins = Plugins(
        agents=Registry("agent", AgentLoop, group="agentrl.agents", aliases=AGENT_ALIASES),  # type: ignore[type-abstract]
        tools=Registry("tool", Tool, group="agentrl.tools", from_function=function_tool),  # type: ignore[type-abstract]
        interactions=Registry("interaction", Interaction, group="agentrl.interactions"),  # type: ignore[type-abstract]
        environments=Registry("environment", Environment, group="agentrl.environments"),
        rewards=Registry("reward", AnyReward, group="agentrl.rewards"),  # type: ignore[type-abstract]
    )
    for source in sources:
        module = import_source(source)
        plugins.add_module(module)
        if not plugins.may_come_from(module):
            classes = ", ".join(value.__name__ for value in vars(module).values() if inspect.isclass(value))
            raise PluginError(
                f"{source!r} defines no plugin{f' ({classes})' if classes else ''}: a plugin is a "
                "subclass of agentrl.plugins.Tool, Interaction, Environment, AgentLoop or Reward, or a "
                "function decorated with @tool; name the module that defines it, not one that "
                "imports it"
            )
    return plugins


def _is_base(value: Any, module: ModuleType) -> bool:
    """Return whether a class is only a base: it is abstract or unnamed, and private or subclassed in
    `module`.
    """
    if not inspect.isclass(value) or not (inspect.isabstract(value) or getattr(value, "name", None) is None):
        return False
    others = (other for other in vars(module).values() if inspect.isclass(other) and other is not value)
    return value.__name__.startswith("_") or any(issubclass(other, value) for other in others)
