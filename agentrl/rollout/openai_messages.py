"""The wire format of OpenAI's chat completions: parses and checks requests, and writes replies, whole or
streamed.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
import pydantic

from agentrl.types import JsonObject, Message, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]

SAMPLING_FIELDS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
"""Sampling fields of requests.

Training ignores them: the behavior log-probabilities need the run's own settings.
"""

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
"""OpenAI accepts 128."""
MAX_CALLS = 1024
"""Tool calls in one message."""
MAX_PARTS = 4096
"""Parts of one message's text."""
MAX_KEYS = 1024
"""Keys of a tool's top-level object. Its nested schema is not limited."""
MAX_STOPS = 64
"""Stop strings; OpenAI accepts 4."""
MAX_BRACKETS = 100_000
"""Opening brackets in a body, including those in texts. Three million empty lists fit into 8 MiB, and parsing
them holds the GIL for four seconds."""


class RequestError(Exception):
    """An error to be sent to the program in OpenAI's form."""

    def __init__(
        self, message: str, *, status: int = 400, type: str = "invalid_request_error", code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One parsed request.

    `tools` are shown to the model. `calls_tools` is False if tool calls must be returned as text.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    calls_tools: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    is_stream: bool
    streams_usage: bool
    wants_logprobs: bool
    sampling: Mapping[str, Any]  # the SAMPLING_FIELDS that the request sets
    is_tool_choice_forced: bool  # the request demands a call; this is ignored


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One answer.

    `logprobs`: (token text, log-probability) of each sampled token; None if they were not requested.
    """

    message: Message
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    logprobs: Sequence[tuple[str, float]] | None = None


# --------------------------------------------------------------------------------------------------- requests


def _small(value: Any) -> Any:
    """Reject a large object before pydantic copies it: pydantic copies before it checks the length."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise ValueError(f"it has {len(value)} keys; send at most {MAX_KEYS}")
    return value


_Object = Annotated[dict[str, Any], pydantic.BeforeValidator(_small)]


class _Strict(pydantic.BaseModel):
    """Parses a part of a request. Unknown fields are ignored, as OpenAI-compatible servers do."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Function(_Strict):
    name: str
    arguments: str


class _Call(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], pydantic.Field(max_length=MAX_PARTS)] | None = None
    tool_calls: list[_Call] | None = pydantic.Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: _Object


class _StreamOptions(_Strict):
    include_usage: bool = False


class _ResponseFormat(_Strict):
    type: Literal["text"]


class _Body(_Strict):
    messages: list[_Message] = pydantic.Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[_Tool] | None = pydantic.Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | _Object | None = None
    n: Literal[1] | None = None
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    stop: str | Annotated[list[str], pydantic.Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: _ResponseFormat | None = None


def read_request(body: bytes) -> ChatRequest:
    """Read the body of POST /v1/chat/completions.

    Raises:
        RequestError: the body is malformed, or asks for something unsupported: n > 1, images, a response
            format, top_logprobs.
    """
    if (num_brackets := body.count(b"[") + body.count(b"{")) > MAX_BRACKETS:
        raise RequestError(f"the body has {num_brackets} opening brackets; send at most {MAX_BRACKETS}")
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    try:
        parsed = _Body.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from error
    stop = (parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop or ())
    return ChatRequest(
        messages=_messages(parsed.messages),
        tools=tuple(raw["tools"]) if parsed.tools else (),  # unparsed: the template shows every key
        calls_tools=bool(parsed.tools) and parsed.tool_choice != "none",
        max_tokens=min(
            (limit for limit in (parsed.max_tokens, parsed.max_completion_tokens) if limit is not None),
            default=None,
        ),
        stop=tuple(text for text in stop if text),
        is_stream=bool(parsed.stream),
        streams_usage=parsed.stream_options is not None and parsed.stream_options.include_usage,
        wants_logprobs=bool(parsed.logprobs),
        sampling={name: raw[name] for name in SAMPLING_FIELDS if raw.get(name) is not None},
        is_tool_choice_forced=parsed.tool_choice not in (None, "auto", "none"),
    )


def _messages(parsed: Sequence[_Message]) -> tuple[Message, ...]:
    """Convert parsed messages to Messages. A tool message gets the name of the function that was called."""
    names: dict[str, str] = {}
    messages = []
    for index, message in enumerate(parsed):
        calls = tuple(_tool_call(call) for call in message.tool_calls or ())
        names |= {call.id: call.name for call in calls}
        if message.role == "tool" and message.tool_call_id is None:
            raise RequestError(f"messages.{index}: a tool message needs a tool_call_id")
        content = (
            message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content or ())
        )
        messages.append(
            Message(
                "system" if message.role == "developer" else message.role,
                content,
                tool_calls=calls,
                tool_call_id=message.tool_call_id,
                name=names.get(message.tool_call_id or ""),
                reasoning=message.reasoning_content or "",
            )
        )
    return tuple(messages)


def _tool_call(call: _Call) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"the arguments of tool call {call.id!r} are not a JSON object")
    return ToolCall(call.id, call.function.name, arguments)


# ---------------------------------------------------------------------------------------------------- replies


def write_reply(reply: ChatReply, *, model: str) -> bytes:
    """Return the body of a non-streamed answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **_content(reply.message), "tool_calls": _calls(reply.message)},
        "logprobs": _logprobs(reply.logprobs),
        "finish_reason": reply.finish_reason,
    }
    if not reply.message.tool_calls:
        del choice["message"]["tool_calls"]  # type: ignore[attr-defined]
    return orjson.dumps(_head("chat.completion", model) | {"choices": [choice], "usage": _usage(reply)})


def write_stream(reply: ChatReply, *, model: str, with_usage: bool) -> bytes:
    """Return the answer as server-sent events: role, reasoning and text; each call; the end; the usage if
    requested.
    """
    head = _head("chat.completion.chunk", model)
    deltas: list[dict[str, Any]] = [{"role": "assistant", **_content(reply.message)}]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_calls(reply.message))]
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
        for delta in deltas
    ]
    chunks[0]["choices"][0]["logprobs"] = _logprobs(reply.logprobs)
    chunks.append(
        head
        | {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": reply.finish_reason}]}
    )
    if with_usage:
        chunks.append(head | {"choices": [], "usage": _usage(reply)})
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def write_message(message: Message) -> dict[str, Any]:
    """Return one message in the form that requests use."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        return written | {"tool_call_id": message.tool_call_id}
    return written | ({"tool_calls": _calls(message)} if message.tool_calls else {})


def write_error(error: RequestError) -> bytes:
    """Return the body of an error."""
    return orjson.dumps(
        {"error": {"message": str(error), "type": error.type, "param": None, "code": error.code}}
    )


def write_models(model: str) -> bytes:
    """Return the body of GET /v1/models."""
    return orjson.dumps(
        {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "agentrl"}]}
    )


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _content(message: Message) -> dict[str, Any]:
    content: dict[str, Any] = {"content": message.content or (None if message.tool_calls else "")}
    return content | ({"reasoning_content": message.reasoning} if message.reasoning else {})


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = ((call, json.dumps(call.arguments or {}, ensure_ascii=False)) for call in message.tool_calls)
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
        for call, arguments in calls
    ]


def _usage(reply: ChatReply) -> dict[str, int]:
    prompt, completion = reply.num_prompt_tokens, reply.num_completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(logprobs: Sequence[tuple[str, float]] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    tokens = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in logprobs
    ]
    return {"content": tokens, "refusal": None}
