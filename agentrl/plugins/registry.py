"""The plugin registry: finds plugins by name.

A plugin is named in one of three ways:
    `name`                      registered by a file or module of `agent.plugins`, or by an entry point in
                                `agentrl.agents | agentrl.tools | agentrl.interactions |
                                agentrl.environments | agentrl.rewards`
    `path/to/file.py:Class`     a class in a user's file
    `package.module:Class`      a class in any importable module
Built-in plugins use the same entry points as third-party ones; no code here imports a plugin by name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from agentrl.errors import AgentRLError, PluginError
from agentrl.plugins.checks import check_class, check_instance, place
from agentrl.plugins.sources import Reference, import_line
from agentrl.registered import registered
from agentrl.types import JsonObject


class Named(Protocol):
    """Interface of every plugin class: a name, and a constructor that takes a config."""

    name: ClassVar[str]

    def __init__(self, config: JsonObject | None = None) -> None: ...


P = TypeVar("P", bound=Named)


class Registry(Generic[P]):
    """Maps names to the plugin classes of one kind. Classes are loaded when first requested.

    `from_function` converts a plain function to a class, for kinds that can be written as functions.
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
        self._origins: dict[str, str] = {}  # name -> file or module, for classes added without an entry point
        self._entry_points = registered(group)
        self._made: set[type[P]] = set()  # classes with an instance that passed the checks
        self._strays: dict[str, str] = {}  # name in a plugin file -> why it is not a plugin of this kind

    def names(self) -> list[str]:
        return sorted({*self._classes, *self._entry_points})

    def resolve(self, name: str) -> str:
        """Return the name under which every process finds the plugin: aliases are resolved, references
        unchanged.

        Raises:
            PluginError: no plugin has this name (the message lists the registered ones), or the reference is
                invalid.
        """
        name = self._aliases.get(name, name)
        if name in self._classes or name in self._entry_points:
            return name
        if Reference.parse(name) is None:
            stray = f"; {self._strays[name]}" if name in self._strays else ""
            close = difflib.get_close_matches(name, self.names(), n=1)
            near = f" (did you mean {close[0]!r}?)" if close and not stray else ""
            raise PluginError(
                f"unknown {self.kind} {name!r}{stray}{near}; registered: {', '.join(self.names()) or 'none'}"
            )
        self._load_reference(name)
        return name

    def get(self, name: str) -> type[P]:
        """Return the plugin's class.

        Raises:
            PluginError: the plugin is unknown, cannot be imported, or is not of this kind.
        """
        name = self.resolve(name)
        if name in self._references:
            return self._references[name]
        if name not in self._classes:
            entry = self._entry_points[name]
            try:
                found = entry.load()
            except AgentRLError:
                raise
            except Exception as error:  # a third party's code runs at import
                problem = f"{type(error).__name__}: {error}{import_line(error)}"
                raise PluginError(
                    f"{self.kind} {name!r} ({entry.entry.value}) cannot be imported: {problem}"
                ) from error
            self._classes[name] = self._as_class(found, shown=f"{name!r} ({entry.entry.value})")
        return self._classes[name]

    def own_name(self, name: str) -> str:
        """Return the name by which a model calls the plugin: a reference gives the class's `name`, other
        names are kept.
        """
        name = self.resolve(name)
        return self.get(name).name if name in self._references else name

    def create(self, name: str, configs: Mapping[str, JsonObject]) -> P:
        """Return an instance with its config, which `configs` holds under the plugin's own name.

        Raises as `make`.
        """
        return self.make(name, configs.get(self.own_name(name)))

    def make(self, name: str, config: JsonObject | None) -> P:
        """Return an instance with this config.

        Raises:
            PluginError: the plugin cannot be loaded or created, or an attribute violates its contract.
            ConfigError: the plugin rejects the config.
        """
        cls = self.get(name)
        try:
            plugin = cls(config)
        except AgentRLError:
            raise
        except Exception as error:  # the user's code: whatever its constructor raises
            problem = f"{type(error).__name__}: {error}"
            shown = "without a config" if config is None else f"with its config {dict(config)}"
            raise PluginError(
                f"{self.kind} {cls.name!r} ({place(cls)}) cannot be constructed {shown}: {problem}"
            ) from error
        if cls not in self._made:
            check_instance(self.kind, plugin)
            self._made.add(cls)
        return plugin

    def add(self, plugin: type[P] | Callable[..., Any], *, name: str | None = None) -> type[P]:
        """Register a class (or a function, if the kind allows it) and return the class. It overrides an entry
        point.

        Raises:
            PluginError: `plugin` is neither, violates the contract of its kind, or another added plugin has
                its name.
        """
        cls = self._as_class(plugin, shown=name or repr(plugin))
        name = name or cls.name
        known = self._classes.get(name) if name in self._origins else None
        if known is not None and _identity(known) != _identity(cls):
            raise PluginError(
                f"two {self.kind}s have the name {name!r}: {place(known)} and {place(cls)}; rename one of "
                "them"
            )
        self._classes[name] = cls
        self._origins[name] = getattr(inspect.getmodule(cls), "__file__", None) or cls.__module__
        return cls

    def source(self, name: str) -> str:
        """Return where a registered plugin comes from: its file or module, or else the package of its entry
        point.
        """
        if name in self._origins:
            return self._origins[name]
        entry = self._entry_points[name].entry
        return f"{entry.dist.name} {entry.dist.version}: {entry.value}" if entry.dist else entry.value

    def has(self, value: Any) -> bool:
        """Return whether a value is a plugin class of this kind."""
        return inspect.isclass(value) and issubclass(value, self._base)

    def note_stray(self, value: Any) -> None:
        """Remember a class or function of a plugin file that is not a plugin, to explain it if a config names
        it.
        """
        if inspect.isclass(value):
            why = (
                f"class {value.__name__} ({place(value)}) is not a subclass of "
                f"agentrl.plugins.{self._base.__name__}"
            )
            self._strays |= {
                name: why for name in (value.__name__, getattr(value, "name", None)) if isinstance(name, str)
            }
        elif self._from_function is not None:
            self._strays[value.__name__] = (
                f"function {value.__name__} ({place(value)}) is not a tool without the decorator @tool"
            )

    def is_from(self, module: ModuleType) -> bool:
        """Return whether an added plugin is defined in `module`."""
        return any(self._classes[name].__module__ == module.__name__ for name in self._origins)

    def _load_reference(self, text: str) -> None:
        """Load the plugin behind a reference and also register it under its own name."""
        if text in self._references:
            return
        reference = Reference.parse(text)
        assert reference is not None, text
        self._references[text] = self.add(self._as_class(reference.load(), shown=text))

    def _as_class(self, plugin: Any, *, shown: str) -> type[P]:
        if inspect.isclass(plugin) and issubclass(plugin, self._base):
            check_class(self.kind, plugin)
            return plugin
        if self._from_function is not None and inspect.isroutine(plugin):
            return self._from_function(plugin)
        article = "an" if self.kind[0] in "aeiou" else "a"
        if isinstance(plugin, self._base):
            raise PluginError(
                f"{shown} is an instance; use its class, {type(plugin).__name__}: each trajectory gets its "
                "own instance"
            )
        or_function = " or a typed function" if self._from_function else ""
        raise PluginError(
            f"{shown} is not {article} {self.kind}: it must be a subclass of "
            f"agentrl.plugins.{self._base.__name__}{or_function}"
        )


def _identity(cls: type[Any]) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
