"""Programs that play attempts through the gateway, each in one dialect and with the vendor's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import anthropic
import openai

from agentrl.plugins import AgentLoop

CALCULATOR: dict[str, Any] = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


@dataclass(frozen=True)
class Heard:
    """One answer as the client told it: text, thoughts, (id, name, arguments) of each call, why it ended."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str, dict[str, Any]], ...]
    finish: str


def guest(program, *, name: str = "guest") -> type[AgentLoop]:
    """Return an agent class that lets the async function `program(endpoint, task)` play."""

    class Guest(AgentLoop):
        """Plays by a function of a test."""

        uses_tools: ClassVar[bool] = False

        async def run(self, task, session) -> None:
            async with session.serve_openai() as endpoint:
                await session.run_asyncio(program, endpoint, task)

    Guest.name = name
    return Guest


class _Way:
    """Closes its client. `first_text` is set by the first piece of text of a stream."""

    client: openai.AsyncOpenAI | anthropic.AsyncAnthropic

    @cached_property
    def first_text(self) -> asyncio.Future[str]:
        return asyncio.get_running_loop().create_future()

    def hear(self, text: str) -> None:
        if text and not self.first_text.done():
            self.first_text.set_result(text)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_) -> None:
        await self.client.close()


class ByChat(_Way):
    """OpenAI's chat completions."""

    def __init__(self, endpoint, system: str | None, *, is_stream: bool) -> None:
        self.client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        self.messages: list[Any] = [{"role": "system", "content": system}] if system else []
        self.is_stream = is_stream

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        for id, text in results:
            self.messages.append({"role": "tool", "tool_call_id": id, "content": text})

    async def ask(self, **options) -> Heard:
        asked = {"model": "m", "messages": self.messages, **options}
        asked |= {"tools": [{"type": "function", "function": CALCULATOR}]}
        if self.is_stream:
            message, finish = await self._streamed(asked)
        else:
            choice = (await self.client.chat.completions.create(**asked)).choices[0]
            message, finish = choice.message.model_dump(exclude_none=True), choice.finish_reason
        self.messages.append(message)
        calls = [(c["id"], c["function"]) for c in message.get("tool_calls", ())]
        return Heard(
            message.get("content") or "",
            message.get("reasoning_content", ""),
            tuple((id, call["name"], json.loads(call["arguments"])) for id, call in calls),
            finish,
        )

    async def _streamed(self, asked) -> tuple[dict[str, Any], str]:
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls, finish = [], ""
        async for chunk in await self.client.chat.completions.create(stream=True, **asked):
            delta, finish = chunk.choices[0].delta, chunk.choices[0].finish_reason or finish
            message["content"] += delta.content or ""
            self.hear(message["content"])
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            calls += [call.model_dump(exclude_none=True) for call in delta.tool_calls or ()]
        return message | ({"tool_calls": calls} if calls else {}), finish


class ByResponses(_Way):
    """OpenAI's responses; `by_id`: by the id of the last one instead of the whole conversation."""

    def __init__(self, endpoint, system: str | None, *, is_stream: bool, by_id: bool = False) -> None:
        self.client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        self.system = system
        self.items: list[Any] = []
        self.previous: str | None = None
        self.is_stream, self.by_id = is_stream, by_id

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        for id, text in results:
            self.items.append({"type": "function_call_output", "call_id": id, "output": text})

    async def ask(self, **options) -> Heard:
        asked = {"model": "m", "input": self.items, "tools": [{"type": "function", **CALCULATOR}], **options}
        asked |= {"instructions": self.system} if self.system else {}
        asked |= {"previous_response_id": self.previous} if self.previous else {}
        if self.is_stream:
            async with self.client.responses.stream(**asked) as stream:
                async for event in stream:
                    response = getattr(event, "response", None)
                    self.hear(event.delta if event.type == "response.output_text.delta" else "")
            if response.status == "failed":
                raise RuntimeError(response.error.message)
        else:
            response = await self.client.responses.create(**asked)
        if self.by_id:
            self.previous, self.items = response.id, []
        else:
            self.items = [*self.items, *(item.model_dump(exclude_none=True) for item in response.output)]
        calls = [item for item in response.output if item.type == "function_call"]
        thoughts = [part.text for i in response.output if i.type == "reasoning" for part in i.content]
        return Heard(
            response.output_text,
            "".join(thoughts),
            tuple((call.call_id, call.name, json.loads(call.arguments)) for call in calls),
            response.status,
        )


class ByMessages(_Way):
    """Anthropic's messages."""

    def __init__(self, endpoint, system: str | None, *, is_stream: bool) -> None:
        self.client = anthropic.AsyncAnthropic(
            base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0
        )
        self.system = system
        self.messages: list[Any] = []
        self.is_stream = is_stream

    def say(self, text: str) -> None:
        self._add([{"type": "text", "text": text}])

    def answer(self, results: Sequence[tuple[str, str]]) -> None:
        self._add([{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results])

    def _add(self, blocks: list[dict[str, Any]]) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += blocks
        else:
            self.messages.append({"role": "user", "content": blocks})

    async def ask(self, **options) -> Heard:
        tool = {"input_schema": CALCULATOR["parameters"]}
        tool |= {key: CALCULATOR[key] for key in ("name", "description")}
        asked = {"model": "m", "messages": self.messages, "tools": [tool], "max_tokens": 4096, **options}
        asked |= {"system": self.system} if self.system else {}
        if self.is_stream:
            async with self.client.messages.stream(**asked) as stream:
                async for text in stream.text_stream:
                    self.hear(text)
                message = await stream.get_final_message()
        else:
            message = await self.client.messages.create(**asked)
        self.messages.append({"role": "assistant", "content": message.content})
        of = {
            kind: [b for b in message.content if b.type == kind] for kind in ("text", "thinking", "tool_use")
        }
        return Heard(
            "".join(block.text for block in of["text"]),
            "".join(block.thinking for block in of["thinking"]),
            tuple((block.id, block.name, dict(block.input)) for block in of["tool_use"]),
            message.stop_reason,
        )
