"""Anthropic's messages: parses and checks requests, and writes replies, whole or streamed.

Blocks of a system prompt, of a user's message and of a tool's result are paragraphs: a line break joins
them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
import pydantic

from agentrl.chat.openai_messages import written_arguments
from agentrl.extras.gateway.bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Object,
    Strict,
    checked_call,
    event,
    function_schema,
    named_results,
    read_json,
    set_fields,
    stops_of,
    validated,
)
from agentrl.extras.gateway.turns import Asked, RequestError, TurnReply, TurnRequest
from agentrl.types import JsonObject, Message, ToolCall

SAMPLING_FIELDS = ("temperature", "top_p", "top_k")
OWN_TYPES = (None, "custom")
"""Types of tools that the program runs; Anthropic's servers run all others."""
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ERROR_TYPES |= {413: "request_too_large", 500: "api_error", 502: "api_error"}
"""By status; all others are invalid_request_error. Clients know these types only."""

# --------------------------------------------------------------------------------------------------- requests


class _Text(Strict):
    type: Literal["text"]
    text: str


class _Thinking(Strict):
    type: Literal["thinking"]
    thinking: str


class _Redacted(Strict):
    type: Literal["redacted_thinking"]


class _ToolUse(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


_Texts = str | Annotated[list[_Text], pydantic.Field(max_length=MAX_PARTS)]


class _ToolResult(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None


_Block = Annotated[
    _Text | _Thinking | _Redacted | _ToolUse | _ToolResult, pydantic.Field(discriminator="type")
]


class _Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], pydantic.Field(max_length=MAX_PARTS)]


class _Tool(Strict):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: Object = pydantic.Field(default_factory=dict)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_type_alone(cls, tool: Any) -> Any:
        """Leave out the fields of tools that are left out: they may have any, or no name."""
        is_left_out = isinstance(tool, dict) and tool.get("type") not in OWN_TYPES
        return {"type": tool["type"], "name": ""} if is_left_out else tool


class _ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]


class _Body(Strict):
    messages: list[_Message] = pydantic.Field(min_length=1, max_length=MAX_MESSAGES)
    system: _Texts | None = None
    tools: list[_Tool] | None = pydantic.Field(None, max_length=MAX_TOOLS)
    tool_choice: _ToolChoice | None = None
    max_tokens: int | None = pydantic.Field(None, ge=1)
    stop_sequences: Annotated[list[str], pydantic.Field(max_length=64)] | None = None
    stream: bool | None = None


def ask(body: bytes, *, model: str) -> Asked:
    """Read the body of POST /v1/messages or of POST /v1/messages/count_tokens.

    `model`: the name to answer under.

    Raises:
        RequestError: the body is malformed, or asks for something unsupported: images, documents, results of
            server tools.
    """
    raw = read_json(body)
    parsed = validated(_Body, raw)
    tools = tuple(_schema(tool) for tool in parsed.tools or () if tool.type in OWN_TYPES)
    choice = "auto" if parsed.tool_choice is None else parsed.tool_choice.type
    system = () if parsed.system is None else (Message("system", _joined(parsed.system)),)
    said = (part for message in parsed.messages for part in _messages(message))
    request = TurnRequest(
        messages=named_results([*system, *said]),
        tools=tools,
        calls_tools=bool(tools) and choice != "none",
        max_tokens=parsed.max_tokens,
        stop=stops_of(parsed.stop_sequences),
        is_stream=bool(parsed.stream),
        sampling=set_fields(raw, SAMPLING_FIELDS),
        is_tool_choice_forced=choice in ("any", "tool"),
        num_tools_left_out=len(parsed.tools or ()) - len(tools),
    )
    return Asked(request, MessagesWriter(model=model))


def _schema(tool: _Tool) -> JsonObject:
    return function_schema(tool.name, tool.description, tool.input_schema)


def _joined(content: str | Sequence[_Text]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _messages(message: _Message) -> list[Message]:
    """Return a message's tool results, each a message, then the message itself if it has other content."""
    blocks: Sequence[Any] = (
        [_Text(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    )
    if message.role == "assistant":
        return [_assistant(blocks)]
    results = [block for block in blocks if isinstance(block, _ToolResult)]
    texts = [block for block in blocks if isinstance(block, _Text)]
    if len(results) + len(texts) < len(blocks):
        raise RequestError(f"messages: a {message.role} message has text and tool_result blocks only")
    said = [Message("tool", _joined(r.content or ""), tool_call_id=r.tool_use_id) for r in results]
    return said if results and not texts else [*said, Message(message.role, _joined(texts))]


def _assistant(blocks: Sequence[Any]) -> Message:
    if any(isinstance(block, _ToolResult) for block in blocks):
        raise RequestError("messages: an assistant message has no tool_result blocks")
    return Message(
        "assistant",
        "".join(block.text for block in blocks if isinstance(block, _Text)),
        tool_calls=tuple(
            checked_call(block.id, block.name, block.input) for block in blocks if isinstance(block, _ToolUse)
        ),
        reasoning="".join(block.thinking for block in blocks if isinstance(block, _Thinking)),
    )


# ---------------------------------------------------------------------------------------------------- replies


class MessagesWriter:
    """Writes the answer to one request."""

    def __init__(self, *, model: str) -> None:
        self._model = model
        self._index = -1
        self._open: str | None = None  # the type of the block that is being written

    def whole(self, reply: TurnReply) -> bytes:
        message = reply.message
        blocks: list[Any] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not (blocks or message.tool_calls):
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            arguments = orjson.Fragment(written_arguments(call))  # whole numbers of any size
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return orjson.dumps(self._message(blocks) | _stop(reply) | {"usage": _usage(reply)})

    def begin(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=start)

    def reasoning(self, text: str) -> bytes:
        opening = self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return opening + self._delta({"type": "thinking_delta", "thinking": text})

    def text(self, text: str) -> bytes:
        opening = self._opened("text", {"type": "text", "text": ""})
        return opening + self._delta({"type": "text_delta", "text": text})

    def call(self, call: ToolCall) -> bytes:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        opening = self._closed() + self._opened("tool_use", block)
        return opening + self._delta({"type": "input_json_delta", "partial_json": written_arguments(call)})

    def waiting(self) -> bytes:
        return _event("ping")

    def end(self, reply: TurnReply) -> bytes:
        empty = self._opened("text", {"type": "text", "text": ""}) if self._index < 0 else b""
        stop = _event("message_delta", delta=_stop(reply), usage=_usage(reply))
        return empty + self._closed() + stop + _event("message_stop")

    def fail(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + write_error(error) + b"\n\n"

    def _message(self, blocks: Sequence[Any]) -> dict[str, Any]:
        id = f"msg_{uuid.uuid4().hex}"
        return {"id": id, "type": "message", "role": "assistant", "model": self._model, "content": blocks}

    def _opened(self, type: str, block: dict[str, Any]) -> bytes:
        """Return the events before a delta of a block: nothing if it is already open."""
        if self._open == type:
            return b""
        before = self._closed()
        self._index += 1
        self._open = type
        return before + _event("content_block_start", index=self._index, content_block=block)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._open == "thinking"
        self._open = None
        signature = self._delta({"type": "signature_delta", "signature": ""}) if signed else b""
        return signature + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def write_error(error: RequestError) -> bytes:
    """Return the body of an error. `code` and `outcome` are added to Anthropic's fields."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.code is not None:
        body |= {"code": error.code, "outcome": error.type}
    return orjson.dumps({"type": "error", "error": body})


def write_model(model: str) -> dict[str, Any]:
    """Return one model of GET /v1/models."""
    return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}


def write_models(model: str) -> bytes:
    """Return the body of GET /v1/models."""
    return orjson.dumps(
        {"data": [write_model(model)], "has_more": False, "first_id": model, "last_id": model}
    )


def write_count(num_tokens: int) -> bytes:
    """Return the body of POST /v1/messages/count_tokens."""
    return orjson.dumps({"input_tokens": num_tokens})


def _event(type: str, **fields: Any) -> bytes:
    return event({"type": type, **fields}, name=type)


def _stop(reply: TurnReply) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    if reply.stop is not None and reply.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": reasons[reply.finish_reason], "stop_sequence": None}


def _usage(reply: TurnReply) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {
        "input_tokens": reply.num_prompt_tokens,
        "output_tokens": reply.num_completion_tokens,
        **cached,
    }
