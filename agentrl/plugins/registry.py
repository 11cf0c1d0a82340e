"""Finding plugins by name.

A plugin is named in one of three ways:
    `name`                                registered: by a file or module of `agent.plugins`, else by an entry point of the groups
                                          `agentrl.agents | agentrl.tools | agentrl.interactions | agentrl.rewards`
    `path/to/file.py:Class`               a file of the user's
    `package.module:Class`                whatever can be imported
The built-in ones are registered through the same entry points as a third party's; nothing here imports one by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from agentrl.errors import PluginError
from agentrl.plugins.agents import AGENT_ALIASES, AgentLoop
from agentrl.plugins.functions import function_tool, tool_of
from agentrl.plugins.interactions import Interaction
from agentrl.plugins.rewards import AnyReward
from agentrl.plugins.sources import Reference, import_source
from agentrl.plugins.tools import Tool, tools_for
from agentrl.types import JsonObject, Task


class Named(Protocol):
    """What every plugin class has: a name, and a constructor that takes its config."""

    name: ClassVar[str]

    def __init__(self, config: JsonObject | None = None) -> None: ...


P = TypeVar("P", bound=Named)


class Registry(Generic[P]):
    """Name -> class of one kind of plugin; classes load when first asked for.

    `from_function` makes a class of a plain function, for kinds that can be written as one.
    """

    def __init__(
        self,
        kind: str,
        base: type[P],
        *,
        group: str,
        aliases: Mapping[str, str] | None = None,
        from_function: Callable[[Callable[..., Any]], type[P]] | None = None,
    ) -> None:
        self.kind = kind
        self._base = base
        self._aliases = dict(aliases or {})
        self._from_function = from_function
        self._classes: dict[str, type[P]] = {}
        self._references: dict[str, type[P]] = {}
        self._origins: dict[str, str] = {}  # of classes that came by no entry point
        self._entry_points: dict[str, EntryPoint] = {ep.name: ep for ep in entry_points(group=group)}

    def names(self) -> list[str]:
        return sorted({*self._classes, *self._entry_points})

    def resolve(self, name: str) -> str:
        """Return the name under which every process finds the plugin: what an alias stands for; a reference stays as it is.

        Raises:
            PluginError: nothing is registered by that name (with the list), or the reference leads nowhere.
        """
        name = self._aliases.get(name, name)
        if name in self._classes or name in self._entry_points:
            return name
        if Reference.parse(name) is None:
            raise PluginError(f"unknown {self.kind} {name!r}; registered: {', '.join(self.names()) or 'none'}")
        self._load_reference(name)
        return name

    def get(self, name: str) -> type[P]:
        """Return the class.

        Raises:
            PluginError: it is unknown, cannot be imported, or is no plugin of this kind.
        """
        name = self.resolve(name)
        if name in self._references:
            return self._references[name]
        if name not in self._classes:
            entry = self._entry_points[name]
            try:
                found = entry.load()
            except Exception as error:  # a third party's code runs at import
                raise PluginError(f"{self.kind} {name!r} ({entry.value}) cannot be imported: {error}") from error
            self._classes[name] = self._as_class(found, shown=f"{name!r} ({entry.value})")
        return self._classes[name]

    def own_name(self, name: str) -> str:
        """Return the name that the plugin gives itself, by which a model calls it; a registered name is its own."""
        name = self.resolve(name)
        return self.get(name).name if name in self._references else name

    def create(self, name: str, configs: Mapping[str, JsonObject]) -> P:
        """Return an instance with its config: what stands under the plugin's own name."""
        return self.get(name)(configs.get(self.own_name(name)))

    def add(self, plugin: type[P] | Callable[..., Any], *, name: str | None = None) -> type[P]:
        """Register a class (or a function, where the kind allows it) and return the class.

        Raises:
            PluginError: it is neither.
        """
        cls = self._as_class(plugin, shown=name or repr(plugin))
        name = name or cls.name
        self._classes[name] = cls
        self._origins[name] = getattr(inspect.getmodule(cls), "__file__", None) or cls.__module__
        return cls

    def source(self, name: str) -> str:
        """Return where a registered plugin comes from: its file or module, else the package of its entry point."""
        if name in self._origins:
            return self._origins[name]
        entry = self._entry_points[name]
        return f"{entry.dist.name} {entry.dist.version}: {entry.value}" if entry.dist else entry.value

    def _load_reference(self, text: str) -> None:
        """Load the plugin behind a reference, and register it under its own name too."""
        if text in self._references:
            return
        reference = Reference.parse(text)
        assert reference is not None, text
        self._references[text] = self.add(self._as_class(reference.load(), shown=text))

    def _as_class(self, plugin: Any, *, shown: str) -> type[P]:
        if inspect.isclass(plugin) and issubclass(plugin, self._base):
            return plugin
        if self._from_function is not None and inspect.isroutine(plugin):
            return self._from_function(plugin)
        article = "an" if self.kind[0] in "aeiou" else "a"
        or_function = " or a typed function" if self._from_function else ""
        raise PluginError(
            f"{shown} is not {article} {self.kind}: it must be a subclass of agentrl.plugins.{self._base.__name__}{or_function}"
        )


@dataclass(frozen=True)
class Plugins:
    """The four registries of one process."""

    agents: Registry[AgentLoop]
    tools: Registry[Tool]
    interactions: Registry[Interaction]
    rewards: Registry[AnyReward]
    served_tools: tuple[str, ...] = ()
    """Names of tools that are offered as if `agent.tools` named them: of MCP servers, of verl's files."""

    def offered_tools(self, task: Task, configured: Sequence[str]) -> tuple[str, ...]:
        """Return the names by which the model may call tools in `task`: see `tools_for`; references become the tools' own names."""
        names = tools_for(task, self.agents.get(task.agent_name), (*configured, *self.served_tools))
        return tuple(dict.fromkeys(map(self.tools.own_name, names)))

    def add_module(self, module: ModuleType) -> None:
        """Register every plugin that `module` itself defines: classes, and functions under `@tool`."""
        for value in vars(module).values():
            cls = tool_of(value) or value
            if not inspect.isclass(cls) or inspect.isabstract(cls) or value.__module__ != module.__name__:
                continue
            for registry, base in (
                (self.agents, AgentLoop),
                (self.tools, Tool),
                (self.interactions, Interaction),
                (self.rewards, AnyReward),
            ):
                if issubclass(cls, base):
                    registry.add(cls)  # type: ignore[attr-defined, arg-type]  # issubclass says what mypy cannot follow through the loop


def load_plugins(sources: Iterable[str] = ()) -> Plugins:
    """Return the registries, with the user's files (`path/to/file.py`) and modules (`package.module`) added.

    Raises:
        PluginError: a source does not exist or fails to import.
    """
    # Registries hold subclasses of what is abstract; mypy takes the argument for a class to be called.
    plugins = Plugins(
        agents=Registry("agent", AgentLoop, group="agentrl.agents", aliases=AGENT_ALIASES),  # type: ignore[type-abstract]
        tools=Registry("tool", Tool, group="agentrl.tools", from_function=function_tool),  # type: ignore[type-abstract]
        interactions=Registry("interaction", Interaction, group="agentrl.interactions"),  # type: ignore[type-abstract]
        rewards=Registry("reward", AnyReward, group="agentrl.rewards"),  # type: ignore[type-abstract]
    )
    for source in sources:
        plugins.add_module(import_source(source))
    return plugins
