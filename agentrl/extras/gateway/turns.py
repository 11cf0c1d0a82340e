"""What all dialects translate to and from: one request for a turn, and one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentrl.types import JsonObject, Message, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


class RequestError(Exception):
    """An error to be sent to the program, in the form of its dialect."""

    def __init__(
        self, message: str, *, status: int = 400, type: str = "invalid_request_error", code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One parsed request.

    `tools` are shown to the model, as OpenAI function schemas. `calls_tools` is False if tool calls must be
    returned as text.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    calls_tools: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    is_stream: bool = False
    wants_logprobs: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters that the request sets
    is_tool_choice_forced: bool = False  # the request demands a call; this is ignored
    num_tools_left_out: int = 0  # tools that the API's own servers would run
    text_tools: frozenset[str] = frozenset()  # tools that take one text, in the argument TEXT_ARGUMENT


@dataclass(frozen=True, slots=True)
class TurnReply:
    """One answer, as the program is told it.

    `logprobs`: (token text, log-probability) of each sampled token; None if they were not requested.
    `stop`: the stop string of the request that ended the turn.
    """

    message: Message
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    logprobs: Sequence[tuple[str, float]] | None = None
    stop: str | None = None


TEXT_ARGUMENT = "input"
"""The argument of a tool that takes one text: OpenAI's `custom` tools."""


class Listener(Protocol):
    """Is told a turn, piece by piece: its thoughts, then its text, then its calls."""

    def reasoning(self, text: str) -> None: ...

    def text(self, text: str) -> None: ...

    def call(self, call: ToolCall) -> None: ...


class Writer(Protocol):
    """Writes the answer to one request: `whole`, or as server-sent events from `begin` to `end` or `fail`."""

    def whole(self, reply: TurnReply) -> bytes: ...

    def begin(self) -> bytes: ...

    def reasoning(self, text: str) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def call(self, call: ToolCall) -> bytes: ...

    def waiting(self) -> bytes:
        """Return an event without content, which shows the program that its turn is still being sampled."""

    def end(self, reply: TurnReply) -> bytes: ...

    def fail(self, error: RequestError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what writes its answer."""

    request: TurnRequest
    writer: Writer
