"""The contract of agent loops, and what they hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from agentrl.plugins.interactions import InteractionReply
from agentrl.plugins.tools import ToolResult
from agentrl.types import JsonObject, Message, Task, ToolCall, Turn

T = TypeVar("T")

AGENT_ALIASES: Mapping[str, str] = {
    "single_turn": "single_turn_agent",
    "tool": "tool_agent",
    "interaction": "interaction_agent",
    "react": "react_agent",
    "openai": "openai_agent",
}


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """What an agent loop may spend: assistant turns, user turns after the prompt (None: any number), tool calls run per turn."""

    turns: int
    tool_calls_per_turn: int
    user_turns: int | None = None


@dataclass(frozen=True, slots=True)
class OpenAIEndpoint:
    """Where somebody else's agent finds the policy: an OpenAI-compatible server that knows one trajectory by its key."""

    base_url: str
    api_key: str
    model: str


class Session(Protocol):
    """What an agent loop holds. It alone writes tokens; every method may raise what ends the trajectory."""

    @property
    def limits(self) -> TurnLimits: ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, the prompt included."""

    @property
    def tools(self) -> Sequence[JsonObject]:
        """The OpenAI function schemas of the tools offered in this trajectory."""

    @property
    def has_interaction(self) -> bool: ...

    @property
    def is_finished(self) -> bool:
        """Whether a tool ended the trajectory (`ToolResult.is_final`); the agent loop should return."""

    async def generate(self) -> Turn:
        """Sample one assistant turn."""

    async def call_tools(self, turn: Turn) -> Sequence[Message]:
        """Run the turn's calls side by side, and append one tool message for each call."""

    async def run_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run calls that the agent loop found by itself, under the same rules, and append nothing."""

    def add_user_message(self, text: str) -> None:
        """Append a message that the model reads before its next turn: an observation, feedback."""

    def add_reward(self, name: str, value: float) -> None:
        """Give the last turn a reward by the agent loop itself, reported as `agent/<name>`."""

    async def interact(self) -> InteractionReply:
        """Pass the conversation to the row's interaction partner, and append its answer unless it ended the conversation."""

    def serve_openai(self) -> AbstractAsyncContextManager[OpenAIEndpoint]:
        """Let any OpenAI client play this trajectory while the context lasts."""

    async def run_asyncio(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Await `function(*args)` in the process's asyncio loop, for code that does not run under trio."""

    def stop_at_turn_limit(self) -> None:
        """Record that the model wanted another turn than `limits.turns` allows."""


class AgentLoop(ABC):
    """Plays one attempt at a task. One instance serves one trajectory."""

    name: ClassVar[str]
    uses_tools: ClassVar[bool] = True
    """Whether the model may call tools; False keeps configured tools and the row's out of the prompt."""
    template_shows_tools: ClassVar[bool] = True
    """Whether the chat template shows the tools' schemas; False for agents that describe them in `prompt`."""
    required_tools: ClassVar[tuple[str, ...]] = ()
    """Tools without which it cannot play: a row that offers fewer is refused before anything starts."""
    needs_interaction: ClassVar[bool] = False
    """Whether it cannot play a row without an interaction partner."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    def prompt(self, task: Task, tools: Sequence[JsonObject]) -> Sequence[Message]:
        """Return the messages that the model sees first; must depend on nothing but the arguments and `config`."""
        return task.messages

    @abstractmethod
    async def run(self, task: Task, session: Session) -> None:
        """Talk until done; the session records everything. Runs under trio."""
