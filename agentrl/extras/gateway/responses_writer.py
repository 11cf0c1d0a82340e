"""OpenAI's responses: writes answers, whole or streamed, and keeps them for `previous_response_id`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentrl.chat.openai_messages import written_arguments
from agentrl.extras.gateway.bodies import event
from agentrl.extras.gateway.turns import TEXT_ARGUMENT, RequestError, TurnReply
from agentrl.types import Message, ToolCall


class StoredResponses:
    """The answers of one attempt that later requests may name, each with the conversation before it."""

    def __init__(self) -> None:
        self._conversations: dict[str, tuple[Message, ...]] = {}

    def keep(self, id: str, messages: Sequence[Message]) -> None:
        self._conversations[id] = tuple(messages)

    def messages(self, id: str) -> tuple[Message, ...]:
        """Return the conversation up to and including an answer, without instructions.

        Raises:
            RequestError: no answer of this attempt has the id.
        """
        if id not in self._conversations:
            raise RequestError(
                f"previous_response_id: no stored response of this attempt is {id[:100]!r}",
                code="previous_response_not_found",
            )
        return self._conversations[id]


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """What an answer repeats of its request."""

    model: str
    instructions: str | None
    tools: Sequence[Any]
    previous_response_id: str | None
    max_output_tokens: int | None
    is_stored: bool


class ResponseWriter:
    """Writes the answer to one request, as items: thoughts, a message, calls."""

    def __init__(
        self,
        facts: ResponseFacts,
        text_tools: frozenset[str],
        stored: StoredResponses,
        said: Sequence[Message],
    ) -> None:
        """`said`: the conversation before the answer, without instructions."""
        self._facts = facts
        self._text_tools = text_tools
        self._stored = stored
        self._said = said
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # the items that the program has been told whole
        self._open: _OpenItem | None = None

    # -------------------------------------------------------------------------------------------------- whole

    def whole(self, reply: TurnReply) -> bytes:
        message = reply.message
        items = []
        if message.reasoning:
            items.append(_reasoning_item(_new_id("rs"), message.reasoning))
        if message.content or not (items or message.tool_calls):
            items.append(_message_item(_new_id("msg"), message.content))
        items += [self._call_item(call) for call in message.tool_calls]
        self._keep(reply)
        return orjson.dumps(self._finished(reply, items))

    # ------------------------------------------------------------------------------------------------- events

    def begin(self) -> bytes:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self.waiting()

    def waiting(self) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress", self._items))

    def reasoning(self, text: str) -> bytes:
        return self._part("reasoning", text)

    def text(self, text: str) -> bytes:
        return self._part("message", text)

    def call(self, call: ToolCall) -> bytes:
        item = self._call_item(call)
        is_text = item["type"] == "custom_tool_call"
        key, name = (
            ("input", "custom_tool_call_input") if is_text else ("arguments", "function_call_arguments")
        )
        before = self._closed()
        index = len(self._items)
        place = {"item_id": item["id"], "output_index": index}
        self._items.append(item)
        started = {**item, key: "", "status": "in_progress"}
        return (
            before
            + self._event("response.output_item.added", output_index=index, item=started)
            + self._event(f"response.{name}.delta", **place, delta=item[key])
            + self._event(f"response.{name}.done", **place, **{key: item[key]})
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def end(self, reply: TurnReply) -> bytes:
        data = self._closed()
        if not self._items:
            data += self.text("") + self._closed()
        self._keep(reply)
        finished = self._finished(reply, self._items)
        return data + self._event(f"response.{finished['status']}", response=finished)

    def fail(self, error: RequestError) -> bytes:
        problem = {"code": error.code or "server_error", "message": str(error)}
        return self._event(
            "response.failed", response=self._response("failed", self._items) | {"error": problem}
        )

    def _part(self, kind: str, text: str) -> bytes:
        """Return the events of more text, and those that open its item."""
        before = b""
        if self._open is None or self._open.kind != kind:
            before = self._closed()
            self._open = _OpenItem(kind, len(self._items))
            before += self._event(
                "response.output_item.added",
                output_index=self._open.index,
                item={**self._open.item(), "status": "in_progress", "content": []},
            )
            before += self._event("response.content_part.added", **self._open.place, part=self._open.part(""))
        self._open.texts.append(text)
        if not text:
            return before
        return before + self._event(
            f"response.{self._open.event}.delta", **self._open.place, delta=text, **self._open.extra
        )

    def _closed(self) -> bytes:
        """Return the events that close the open item."""
        done, self._open = self._open, None
        if done is None:
            return b""
        item = done.item()
        self._items.append(item)
        return (
            self._event(f"response.{done.event}.done", **done.place, text=done.text, **done.extra)
            + self._event("response.content_part.done", **done.place, part=done.part(done.text))
            + self._event("response.output_item.done", output_index=done.index, item=item)
        )

    def _event(self, type: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": type, "sequence_number": number, **fields}, name=type)

    # ------------------------------------------------------------------------------------------------- shared

    def _keep(self, reply: TurnReply) -> None:
        if self._facts.is_stored:
            self._stored.keep(self._id, [*self._said, reply.message])

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        common = {"call_id": call.id, "name": call.name, "status": "completed"}
        if call.name in self._text_tools:
            text = (call.arguments or {})[TEXT_ARGUMENT]
            return {"type": "custom_tool_call", "id": _new_id("ctc"), **common, "input": text}
        arguments = written_arguments(call)
        return {"type": "function_call", "id": _new_id("fc"), **common, "arguments": arguments}

    def _finished(self, reply: TurnReply, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        is_cut = reply.finish_reason == "length"
        prompt, completion = reply.num_prompt_tokens, reply.num_completion_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        return self._response("incomplete" if is_cut else "completed", items) | {
            "usage": usage,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        }

    def _response(self, status: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        facts = self._facts
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": facts.instructions,
            "max_output_tokens": facts.max_output_tokens,
            "metadata": {},
            "model": facts.model,
            "output": list(items),
            "parallel_tool_calls": True,
            "previous_response_id": facts.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": facts.is_stored,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": list(facts.tools),
            "truncation": "disabled",
            "usage": None,
        }


class _OpenItem:
    """An item whose text is being told."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.texts: list[str] = []
        is_message = kind == "message"
        self.event = "output_text" if is_message else "reasoning_text"
        self.extra: dict[str, Any] = {"logprobs": []} if is_message else {}
        self._id = _new_id("msg" if is_message else "rs")
        self.place = {"item_id": self._id, "output_index": index, "content_index": 0}

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def item(self) -> dict[str, Any]:
        return (_message_item if self.kind == "message" else _reasoning_item)(self._id, self.text)

    def part(self, text: str) -> dict[str, Any]:
        return (_text_part if self.kind == "message" else _thought_part)(text)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _message_item(id: str, text: str) -> dict[str, Any]:
    content = [_text_part(text)]
    return {"type": "message", "id": id, "status": "completed", "role": "assistant", "content": content}


def _reasoning_item(id: str, text: str) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": id,
        "summary": [],
        "content": [_thought_part(text)],
        "status": "completed",
    }
