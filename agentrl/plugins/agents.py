"""The contract of agent loops, and the session that they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from agentrl.errors import DataError
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
    """Limits of an agent loop: assistant turns, tool calls per turn, user turns after the prompt (None:
    unlimited).
    """

    turns: int
    tool_calls_per_turn: int
    user_turns: int | None = None


@dataclass(frozen=True, slots=True)
class OpenAIEndpoint:
    """An endpoint of the policy for external agents, in the dialects of OpenAI and Anthropic.

    Attributes:
        base_url: ends with /v1, as OpenAI's clients want it.
        api_key: identifies the trajectory.
        certificate: path of the gateway's self-signed certificate; None: it has none.
        trusted: path of a file with the certificates that this machine trusts and that one.
    """

    base_url: str
    api_key: str
    model: str
    certificate: str | None = None
    trusted: str | None = None

    @property
    def root_url(self) -> str:
        """The URL without /v1, as Anthropic's clients want it."""
        return self.base_url.removesuffix("/v1")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which clients and command-line agents find the endpoint."""
        found = {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.root_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }
        if self.certificate is not None and self.trusted is not None:
            found |= {"SSL_CERT_FILE": self.trusted, "NODE_EXTRA_CA_CERTS": self.certificate}
        return found


class Conversing(Protocol):
    """A conversation that an agent loop opened beside the session's own (`Session.conversation`).

    It has its own tokens; turns, deadline, tools and environment are those of the attempt.
    """

    @property
    def name(self) -> str: ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, including what it was opened with."""

    @property
    def has_spoken(self) -> bool:
        """Whether a turn was sampled in it."""

    @property
    def num_context_tokens(self) -> int:
        """Length of the conversation in tokens, with the messages that the model sees at its next turn."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens that the budgets leave for the next turn; below 1, `generate` ends the trajectory."""

    async def generate(self) -> Turn:
        """Sample one assistant turn."""

    async def call_tools(self, turn: Turn) -> Sequence[Message]:
        """Run the turn's calls concurrently and append one tool message for each."""

    async def run_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run calls under the same rules, and append nothing."""

    def add_user_message(self, text: str) -> None:
        """Append a user message that the model sees before its next turn."""

    def restart(self, messages: Sequence[Message]) -> None:
        """Go on from `messages` in place of the conversation so far."""

    def add_reward(self, name: str, value: float) -> None:
        """Give the last turn of this conversation a reward, reported as `agent/<name>`."""


class Session(Protocol):
    """The session passed to an agent loop.

    It alone writes tokens. Any method may raise the error that ends the trajectory.
    """

    @property
    def limits(self) -> TurnLimits: ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, including the prompt."""

    @property
    def tools(self) -> Sequence[JsonObject]:
        """The OpenAI function schemas of the tools offered in this trajectory."""

    @property
    def has_interaction(self) -> bool: ...

    @property
    def environment(self) -> Any:
        """The attempt's environment, started; None if the row has none."""

    @property
    def num_context_tokens(self) -> int:
        """Length of the conversation in tokens, with the messages that the model sees at its next turn."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens that the budgets leave for the next turn; below 1, `generate` ends the trajectory."""

    @property
    def is_finished(self) -> bool:
        """Whether a tool ended the trajectory (`ToolResult.is_final`); the agent loop should return."""

    async def generate(self) -> Turn:
        """Sample one assistant turn."""

    async def call_tools(self, turn: Turn) -> Sequence[Message]:
        """Run the turn's calls concurrently and append one tool message for each."""

    async def run_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run calls that the agent loop parsed itself, under the same rules, and append nothing."""

    def add_user_message(self, text: str) -> None:
        """Append a user message that the model sees before its next turn, such as an observation or
        feedback.
        """

    def restart(self, messages: Sequence[Message]) -> None:
        """Go on from `messages` in place of the conversation so far, for example from a summary of it or
        without old tool output. What was sampled stays; the next turn begins a new segment.
        """

    def conversation(
        self,
        name: str,
        messages: Sequence[Message],
        *,
        opponent: str | None = None,
        tools: Sequence[str] | None = None,
    ) -> Conversing:
        """Open another conversation of the attempt, which begins with `messages`.

        Args:
            name: equal names are compared with each other (`algorithm.conversation_credit=own`).
            opponent: the model of `agent.opponents` that speaks in it; None: the policy. What an opponent
                says is never trained on, and it calls no tools.
            tools: names of the attempt's tools that it shows and may call; None: all.
        """

    def add_reward(self, name: str, value: float) -> None:
        """Give the last turn of the session's own conversation a reward, reported as `agent/<name>`."""

    async def interact(self) -> InteractionReply:
        """Pass the conversation to the row's interaction partner and append its reply, unless the reply ends
        the conversation.
        """

    def serve_openai(self) -> AbstractAsyncContextManager[OpenAIEndpoint]:
        """Serve an endpoint while the context is open, so that any client of OpenAI or Anthropic can play
        this trajectory.
        """

    async def run_asyncio(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Await `function(*args)` on the process's asyncio loop, for code that does not run under trio."""

    def stop_at_turn_limit(self) -> None:
        """Record that the model wanted more turns than `limits.turns` allows."""


class AgentLoop(ABC):
    """Plays one attempt at a task. Each attempt gets its own instance."""

    name: ClassVar[str]
    uses_tools: ClassVar[bool] = True
    """Whether the model may call tools. False ignores the tools of the config and of the row."""
    template_shows_tools: ClassVar[bool] = True
    """Whether the chat template shows the tool schemas. False for agents that describe tools in `prompt`."""
    required_tools: ClassVar[tuple[str, ...]] = ()
    """Tools that the agent needs. A row that does not offer all of them is rejected before the run starts."""
    needs_interaction: ClassVar[bool] = False
    """Whether each row needs an interaction partner."""

    def __init__(self, config: JsonObject | None = None) -> None:
        self.config: JsonObject = dict(config or {})

    def prompt(self, task: Task, tools: Sequence[JsonObject]) -> Sequence[Message]:
        """Return the messages of the first prompt. They may depend only on the arguments and `config`."""
        return task.messages

    def opponents(self, task: Task) -> Sequence[str]:
        """Return the names of the opponents that the attempt needs. A row whose opponents have no server in
        `agent.opponents` is refused before the run starts.
        """
        return ()

    @abstractmethod
    async def run(self, task: Task, session: Session) -> None:
        """Play the attempt and return when it is done; the session records everything. Runs under trio."""


def tools_for(
    task: Task, agent: type[AgentLoop], configured: Sequence[str], *, environment: str = ""
) -> tuple[str, ...]:
    """Return the names of the tools offered in `task`: the configured ones (methods of its environment
    included), then the row's own, without duplicates.

    A row can select a subset with a list of names in `extra_info.tool_selection`; an empty list offers none.
    There, a method of its environment may also be called `<environment>.<tool>`.
    An agent with `uses_tools = False` is offered none.

    Raises:
        DataError: the row selects a tool that is not offered.
    """
    if not agent.uses_tools:
        return ()
    offered = tuple(dict.fromkeys((*configured, *task.tools_kwargs)))
    chosen = task.extra_info.get("tool_selection")
    if chosen is None:
        return offered
    names = [name if name in offered else name.removeprefix(f"{environment}.") for name in chosen]
    for name in names:
        if name not in offered:
            raise DataError(
                f"{task.task_id}: tool_selection: {name!r} is not offered; offered: "
                f"{', '.join(offered) or 'none'}"
            )
    return tuple(dict.fromkeys(names))
