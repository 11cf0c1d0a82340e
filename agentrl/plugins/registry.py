"""Finding plugins by name: entry points, and the user's files and modules.

A plugin is found in this order: a file or module named in `agent.plugins`, then the entry-point groups
`agentrl.agents | agentrl.tools | agentrl.interactions | agentrl.rewards`. The built-in ones are registered through the
same entry points as a third party's; nothing here imports one by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl.errors import PluginError
from agentrl.plugins.agents import AGENT_ALIASES, AgentLoop
from agentrl.plugins.interactions import Interaction
from agentrl.plugins.rewards import AnyReward
from agentrl.plugins.tools import Tool

P = TypeVar("P")


class Registry(Generic[P]):
    """Name -> class of one kind of plugin; classes load when first asked for."""

    def __init__(self, kind: str, base: type[P], *, group: str, aliases: Mapping[str, str] | None = None) -> None:
        self._kind = kind
        self._base = base
        self._aliases = dict(aliases or {})
        self._classes: dict[str, type[P]] = {}
        self._entry_points = {ep.name: ep for ep in entry_points(group=group)}

    def names(self) -> list[str]:
        return sorted({*self._classes, *self._entry_points})

    def resolve(self, name: str) -> str:
        """Return the registered name behind an alias; raise PluginError with the list when unknown."""
        name = self._aliases.get(name, name)
        if name not in self._classes and name not in self._entry_points:
            raise PluginError(f"unknown {self._kind} {name!r}; registered: {', '.join(self.names()) or 'none'}")
        return name

    def get(self, name: str) -> type[P]:
        name = self.resolve(name)
        if name not in self._classes:
            entry = self._entry_points[name]
            try:
                self.add(entry.load(), name=name)
            except ImportError as error:
                raise PluginError(f"{self._kind} {name!r} ({entry.value}) cannot be imported: {error}") from error
        return self._classes[name]

    def add(self, cls: type[P], *, name: str | None = None) -> None:
        if not (inspect.isclass(cls) and issubclass(cls, self._base)):
            raise PluginError(f"{self._kind} {name or cls!r} must be a subclass of agentrl.plugins.{self._base.__name__}")
        self._classes[name or cls.name] = cls  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Plugins:
    """The four registries of one process."""

    agents: Registry[AgentLoop]
    tools: Registry[Tool]
    interactions: Registry[Interaction]
    rewards: Registry[AnyReward]

    def add_module(self, module: object) -> None:
        """Register every plugin class that `module` itself defines."""
        for cls in vars(module).values():
            if not inspect.isclass(cls) or inspect.isabstract(cls) or cls.__module__ != getattr(module, "__name__", None):
                continue
            for registry, base in (
                (self.agents, AgentLoop),
                (self.tools, Tool),
                (self.interactions, Interaction),
                (self.rewards, AnyReward),
            ):
                if issubclass(cls, base):
                    registry.add(cls)  # type: ignore[attr-defined, arg-type]


def load_plugins(sources: Iterable[str] = ()) -> Plugins:
    """Return the registries, with the user's files (`path/to/file.py`) and modules (`package.module`) added.

    Raises:
        PluginError: a source does not exist or fails to import.
    """
    plugins = Plugins(
        agents=Registry("agent", AgentLoop, group="agentrl.agents", aliases=AGENT_ALIASES),  # type: ignore[type-abstract]
        tools=Registry("tool", Tool, group="agentrl.tools"),  # type: ignore[type-abstract]
        interactions=Registry("interaction", Interaction, group="agentrl.interactions"),  # type: ignore[type-abstract]
        rewards=Registry("reward", AnyReward, group="agentrl.rewards"),  # type: ignore[type-abstract]
    )
    for source in sources:
        plugins.add_module(import_source(source))
    return plugins


def import_source(source: str) -> Any:
    """Import `path/to/file.py` or `package.module`; a file is imported once per process.

    Raises:
        PluginError: it does not exist or fails to import.
    """
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source).resolve()
        name = f"agentrl_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
        if name in sys.modules:
            return sys.modules[name]
        if not path.is_file():
            raise PluginError(f"plugin file {source!r} does not exist")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except PluginError:
        raise
    except Exception as error:  # user code runs at import: whatever it raises is a broken plugin
        raise PluginError(f"plugin source {source!r} fails to import: {type(error).__name__}: {error}") from error
