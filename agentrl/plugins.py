"""The four kinds of plugin (agent loop, tool, interaction, reward) and the registry that finds them by name.

A plugin is found in this order: a file or module named in `agent.plugins`, then the entry-point groups
`agentrl.agents | agentrl.tools | agentrl.interactions | agentrl.rewards`. The built-in ones are registered through the
same entry points as a third party's; nothing here imports one by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from agentrl.errors import PluginError
from agentrl.types import JsonObject, Message, Task, Turn

Runtime = Literal["asyncio", "trio"]

AGENT_ALIASES: Mapping[str, str] = {
    "single_turn": "single_turn_agent",
    "tool": "tool_agent",
    "interaction": "interaction_agent",
}


# ---------------------------------------------------------------------------------------------------- agent loops


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """What an agent loop may spend: assistant turns, tool calls run per turn."""

    turns: int
    tool_calls_per_turn: int


class Session(Protocol):
    """What an agent loop holds. It alone writes tokens; every method may raise what ends the trajectory.

    `generate` samples one assistant turn. `call_tools` runs the turn's calls side by side and appends one tool message
    for each call. `interact` passes the conversation to the row's interaction partner and appends its answer unless
    it ended the conversation.
    """

    @property
    def limits(self) -> TurnLimits: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def has_interaction(self) -> bool: ...

    async def generate(self) -> Turn: ...

    async def call_tools(self, turn: Turn) -> Sequence[Message]: ...

    async def interact(self) -> InteractionReply: ...

    def stop_at_turn_limit(self) -> None:
        """Record that the model wanted another turn than `limits.turns` allows."""


class AgentLoop(ABC):
    """Plays one attempt at a task. Stateless: one instance serves one trajectory."""

    name: ClassVar[str]
    uses_tools: ClassVar[bool] = True
    """Whether the model is shown tools; False keeps configured tools and the row's out of the prompt."""

    @abstractmethod
    async def run(self, task: Task, session: Session) -> None:
        """Talk until done; the session records everything. Runs under trio."""


# ---------------------------------------------------------------------------------------------------------- tools


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gives back: `text` for the model, an optional turn reward, metrics for the trajectory.

    `is_error` marks a call the model got wrong (bad arguments, division by zero): the text tells it how to do better.
    A tool whose infrastructure breaks raises ToolError instead.
    """

    text: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False


class Tool(ABC):
    """A tool with the lifetime of one trajectory: state survives between its calls; `close` always runs."""

    name: ClassVar[str]
    description: ClassVar[str]
    parameters: ClassVar[JsonObject]
    """JSON schema of the arguments object."""
    runtime: ClassVar[Runtime] = "asyncio"

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    async def start(self, **create_kwargs: Any) -> None:
        """Prepare for one trajectory; receives the row's `tools_kwargs[name].create_kwargs`."""

    @abstractmethod
    async def call(self, arguments: JsonObject) -> ToolResult:
        """Run one call. Raise ToolError when the tool itself is broken."""

    async def close(self) -> None:
        """Free what `start` took."""

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI function schema that the chat template shows to the model."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tools_for(task: Task, agent: type[AgentLoop], configured: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tools offered in `task`: the configured ones, then the row's own, each once.

    An agent with `uses_tools = False` is offered none.
    """
    return tuple(dict.fromkeys((*configured, *task.tools_kwargs))) if agent.uses_tools else ()


# --------------------------------------------------------------------------------------------------- interactions


@dataclass(frozen=True, slots=True)
class InteractionReply:
    """The partner's answer. When `is_done`, the text is not appended and the trajectory ends."""

    text: str
    is_done: bool
    reward: float | None = None


class Interaction(ABC):
    """A conversation partner with the lifetime of one trajectory."""

    name: ClassVar[str]
    runtime: ClassVar[Runtime] = "asyncio"

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    async def start(self, **interaction_kwargs: Any) -> None:
        """Prepare; receives the row's `interaction_kwargs` without `name`."""

    @abstractmethod
    async def reply(self, messages: Sequence[Message]) -> InteractionReply:
        """Answer the conversation so far; its last message is the assistant's."""

    async def close(self) -> None:
        """Free what `start` took."""


# -------------------------------------------------------------------------------------------------------- rewards


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`value` is learned from; `metrics` (format, accuracy, ...) are only reported."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Reward(ABC):
    """Scores one finished attempt. May block: it runs outside of the event loop. Raises when it cannot tell."""

    name: ClassVar[str]

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    @abstractmethod
    def score(self, task: Task, messages: Sequence[Message]) -> RewardResult:
        """Score the conversation `messages` (prompt included) as an attempt at `task`."""

    def check(self, task: Task) -> None:
        """Raise DataError when the task lacks what this reward needs; called before any rollout."""


# ------------------------------------------------------------------------------------------------------- registry

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
    rewards: Registry[Reward]

    def add_module(self, module: object) -> None:
        """Register every plugin class that `module` itself defines."""
        for cls in vars(module).values():
            if not inspect.isclass(cls) or inspect.isabstract(cls) or cls.__module__ != getattr(module, "__name__", None):
                continue
            for registry, base in (
                (self.agents, AgentLoop),
                (self.tools, Tool),
                (self.interactions, Interaction),
                (self.rewards, Reward),
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
        rewards=Registry("reward", Reward, group="agentrl.rewards"),  # type: ignore[type-abstract]
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
        name = f"agentrl_user_{path.stem}_{abs(hash(str(path))):x}"
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
