"""OpenAI's chat completions: parses and checks requests, and writes replies, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
import pydantic

from agentrl.chat.openai_messages import written_call, written_calls
from agentrl.extras.gateway.bodies import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Object,
    Stops,
    Strict,
    event,
    named_results,
    read_arguments,
    read_json,
    set_fields,
    stops_of,
    validated,
)
from agentrl.extras.gateway.turns import Asked, RequestError, TurnReply, TurnRequest
from agentrl.types import Message, ToolCall

SAMPLING_FIELDS = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
    "chat_template_kwargs",
)
"""Fields of requests about sampling and the prompt's form.

Training ignores them: the behavior log-probabilities need the run's own settings.
"""

# --------------------------------------------------------------------------------------------------- requests


class _Part(Strict):
    type: Literal["text"]
    text: str


class _Function(Strict):
    name: str
    arguments: str


class _Call(Strict):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], pydantic.Field(max_length=MAX_PARTS)] | None = None
    tool_calls: list[_Call] | None = pydantic.Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Tool(Strict):
    type: Literal["function"]
    function: Object


class _StreamOptions(Strict):
    include_usage: bool = False


class _ResponseFormat(Strict):
    type: Literal["text"]


class _Body(Strict):
    messages: list[_Message] = pydantic.Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[_Tool] | None = pydantic.Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | Object | None = None
    n: Literal[1] | None = None
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: _ResponseFormat | None = None


def ask(body: bytes, *, model: str) -> Asked:
    """Read the body of POST /v1/chat/completions; see `read_request`. `model`: the name to answer under."""
    request, parsed = _read(body)
    with_usage = parsed.stream_options is not None and parsed.stream_options.include_usage
    return Asked(request, ChatWriter(model=model, with_usage=with_usage))


def read_request(body: bytes) -> TurnRequest:
    """Read the body of POST /v1/chat/completions.

    Raises:
        RequestError: the body is malformed, or asks for something unsupported: n > 1, images, a response
            format, top_logprobs.
    """
    return _read(body)[0]


def _read(body: bytes) -> tuple[TurnRequest, _Body]:
    raw = read_json(body)
    parsed = validated(_Body, raw)
    request = TurnRequest(
        messages=_messages(parsed.messages),
        tools=tuple(raw["tools"]) if parsed.tools else (),  # unparsed: the template shows every key
        calls_tools=bool(parsed.tools) and parsed.tool_choice != "none",
        max_tokens=min(
            (limit for limit in (parsed.max_tokens, parsed.max_completion_tokens) if limit is not None),
            default=None,
        ),
        stop=stops_of(parsed.stop),
        is_stream=bool(parsed.stream),
        wants_logprobs=bool(parsed.logprobs),
        sampling=set_fields(raw, SAMPLING_FIELDS),
        is_tool_choice_forced=parsed.tool_choice not in (None, "auto", "none"),
    )
    return request, parsed


def _messages(parsed: Sequence[_Message]) -> tuple[Message, ...]:
    messages = []
    for index, message in enumerate(parsed):
        calls = (
            read_arguments(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        )
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
                tool_calls=tuple(calls),
                tool_call_id=message.tool_call_id,
                reasoning=message.reasoning_content or "",
            )
        )
    return named_results(messages)


# ---------------------------------------------------------------------------------------------------- replies


class ChatWriter:
    """Writes the answer to one request."""

    def __init__(self, *, model: str, with_usage: bool = False) -> None:
        """`with_usage`: a stream ends with the usage."""
        self._model = model
        self._with_usage = with_usage
        self._head = _head("chat.completion.chunk", model)
        self._num_calls = 0

    def whole(self, reply: TurnReply) -> bytes:
        return write_reply(reply, model=self._model)

    def begin(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def reasoning(self, text: str) -> bytes:
        return self._delta({"reasoning_content": text})

    def text(self, text: str) -> bytes:
        return self._delta({"content": text})

    def call(self, call: ToolCall) -> bytes:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return self._delta({"tool_calls": [{"index": index, **written_call(call)}]})

    def waiting(self) -> bytes:
        return b": waiting\n\n"

    def end(self, reply: TurnReply) -> bytes:
        data = self._choice({}, finish_reason=reply.finish_reason, logprobs=_logprobs(reply.logprobs))
        if self._with_usage:
            data += event(self._head | {"choices": [], "usage": _usage(reply)})
        return data + b"data: [DONE]\n\n"

    def fail(self, error: RequestError) -> bytes:
        return b"data: " + write_error(error) + b"\n\n"

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._choice(delta)

    def _choice(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._head | {"choices": [choice]})


def write_reply(reply: TurnReply, *, model: str) -> bytes:
    """Return the body of a non-streamed answer."""
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            **_content(reply.message),
            "tool_calls": written_calls(reply.message),
        },
        "logprobs": _logprobs(reply.logprobs),
        "finish_reason": reply.finish_reason,
    }
    if not reply.message.tool_calls:
        del choice["message"]["tool_calls"]  # type: ignore[attr-defined]
    return orjson.dumps(_head("chat.completion", model) | {"choices": [choice], "usage": _usage(reply)})


def write_error(error: RequestError) -> bytes:
    """Return the body of an error, as both of OpenAI's dialects have it."""
    return orjson.dumps(
        {"error": {"message": str(error), "type": error.type, "param": None, "code": error.code}}
    )


def write_model(model: str) -> dict[str, Any]:
    """Return one model of GET /v1/models."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "agentrl"}


def write_models(model: str) -> bytes:
    """Return the body of GET /v1/models."""
    return orjson.dumps({"object": "list", "data": [write_model(model)]})


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _content(message: Message) -> dict[str, Any]:
    content: dict[str, Any] = {"content": message.content or (None if message.tool_calls else "")}
    return content | ({"reasoning_content": message.reasoning} if message.reasoning else {})


def _usage(reply: TurnReply) -> dict[str, int]:
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
