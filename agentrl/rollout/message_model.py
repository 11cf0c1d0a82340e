"""A client of a model behind OpenAI-compatible URLs: messages in, a message out. Servers only report token
counts.

Each request goes to the URL with the fewest requests in flight. Failed requests are retried with exponential
backoff. Overload (408, 429, 503) and other failures have separate limits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import trio

from agentrl.chat.openai_messages import write_message
from agentrl.chat.parsing import call_id
from agentrl.errors import RequestRefused, ServerError
from agentrl.http.client import HttpClient, HttpReply
from agentrl.rollout.sampling import Sampling
from agentrl.types import JsonObject, Message, ToolCall

MAX_SERVER_FAILURES = 3
MAX_OVERLOADS = 10
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
_OVERLOADED = frozenset({408, 429, 503})


@dataclass(frozen=True, slots=True)
class MessageReply:
    """One turn. num_prompt_tokens, num_tokens: prompt and sampled tokens, as counted by the server."""

    message: Message
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int


class ContextExceeded(RequestRefused):
    """The conversation has outgrown the model's context."""


class Backpressure(Protocol):
    """Is notified of overload. Implemented by `agentrl.evaluation.concurrency.Concurrency`."""

    @property
    def round(self) -> int: ...

    def trouble(self, began_in: int, reason: str) -> None: ...


class MessageModel:
    """Requests turns of the model `name` from the servers at `urls` (including /v1)."""

    def __init__(
        self,
        urls: Sequence[str],
        name: str,
        *,
        api_key: str | None,
        max_connections: int,
        backpressure: Backpressure,
        template_kwargs: JsonObject | None = None,
    ) -> None:
        """`template_kwargs`: arguments of the servers' chat template, as SGLang and vLLM take them."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._clients = [HttpClient(url, headers=headers, max_connections=max_connections) for url in urls]
        self._urls = tuple(urls)
        self._running = [0] * len(self._clients)
        self._places: dict[str, str] = {}
        self._name = name
        self._backpressure = backpressure
        self._template_kwargs = dict(template_kwargs or {})
        self._length_key = "max_tokens"

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        sampling: Sampling,
        *,
        max_tokens: int,
        turn: int,
        key: str,
        template_kwargs: JsonObject | None = None,
    ) -> MessageReply:
        """Sample the next turn of a conversation. `turn` is its index from 0; `key` is the key of the
        attempt; `template_kwargs` win over those of the model.

        Raises:
            ContextExceeded: the conversation is too long for the model.
            RequestRefused: the server rejected the request.
            ServerError: MAX_SERVER_FAILURES failures or MAX_OVERLOADS overloads.
        """
        body: dict[str, Any] = {
            "model": self._name,
            "messages": [write_message(message) for message in messages],
        }
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"top_k": sampling.top_k} if sampling.top_k != -1 else {}
        body |= {"min_p": sampling.min_p} if sampling.min_p else {}
        body |= {"stop": list(sampling.stop)} if sampling.stop else {}
        body |= {"ignore_eos": True} if sampling.ignore_eos else {}
        body |= {"tools": list(tools)} if tools else {}
        for_template = {**self._template_kwargs, **(template_kwargs or {})}
        body |= {"chat_template_kwargs": for_template} if for_template else {}
        failures = overloads = 0
        while True:
            began_in = self._backpressure.round
            try:
                return read_completion(
                    await self._post({**body, self._length_key: max_tokens}, key), turn=turn
                )
            except RequestRefused as error:
                if self._length_key == "max_tokens" and "max_completion_tokens" in str(error):
                    self._length_key = "max_completion_tokens"  # OpenAI's own models reject the older name
                    continue
                raise
            except ServerError as error:
                if error.status in _OVERLOADED:
                    overloads += 1
                    self._backpressure.trouble(began_in, "overload")
                else:
                    failures += 1
                if failures == MAX_SERVER_FAILURES or overloads == MAX_OVERLOADS:
                    raise
            await trio.sleep(min(FIRST_PAUSE_S * 2 ** (failures + overloads - 1), MAX_PAUSE_S))

    async def _post(self, body: JsonObject, key: str) -> Any:
        place = self._running.index(min(self._running))
        self._running[place] += 1
        self._places[key] = self._urls[place]
        try:
            reply = await self._clients[place].request("POST", "/chat/completions", json=body)
        finally:
            self._running[place] -= 1
            self._places.pop(key, None)
        return _checked(reply)

    # ------------------------------------------------------------------------- what a router is asked besides

    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        """Do nothing: the URLs are fixed."""

    async def watch(self) -> None:
        await trio.sleep_forever()

    def places(self) -> dict[str, str]:
        """Return the URL at which each attempt currently requests a turn: attempt key -> URL. Thread-safe."""
        return self._places.copy()

    def forget(self, trajectory_key: str) -> None:
        """Do nothing: no state is kept per conversation."""

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()


async def served_models(url: str, *, api_key: str | None) -> list[str]:
    """Return the names of the models that an OpenAI-compatible server lists.

    Raises:
        ServerError: the server does not answer, or its answer is not a list of models.
    """
    async with HttpClient(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {}) as client:
        reply = _checked(await client.request("GET", "/models"))
    try:
        return [str(model["id"]) for model in reply["data"]]
    except (KeyError, TypeError) as error:
        raise ServerError(f"{url}/models is not a list of models: {str(reply)[:120]!r}") from error


def read_completion(reply: Any, *, turn: int) -> MessageReply:
    """Parse a chat completion. A tool call without an id gets one.

    Raises:
        ServerError: `reply` is not a chat completion, or has no token counts.
    """
    try:
        choice = reply["choices"][0]
        said, reason = choice["message"], choice.get("finish_reason")
        prompt, sampled = int(reply["usage"]["prompt_tokens"]), int(reply["usage"]["completion_tokens"])
        calls = tuple(_call(call, turn, index) for index, call in enumerate(said.get("tool_calls") or ()))
        message = Message(
            "assistant",
            str(said.get("content") or ""),
            tool_calls=calls,
            reasoning=str(said.get("reasoning_content") or said.get("reasoning") or ""),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"not a chat completion with `usage`: {type(error).__name__}: {error} in {str(reply)[:200]!r}"
        ) from error
    return MessageReply(message, "length" if reason == "length" else "stop", prompt, sampled)


def _call(call: Any, turn: int, index: int) -> ToolCall:
    function = call["function"]
    name, text = str(function["name"]), function.get("arguments") or "{}"
    own_id = str(call.get("id") or call_id(turn, index))
    try:
        arguments = text if isinstance(text, dict) else json.loads(text)
    except ValueError as error:
        return ToolCall(own_id, name, None, f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(
            own_id, name, None, f"the arguments must be a JSON object, are {type(arguments).__name__}"
        )
    return ToolCall(own_id, name, arguments)


def _checked(reply: HttpReply) -> Any:
    if reply.status == 200:
        return reply.json()
    text = reply.excerpt(500)
    message = f"{reply.origin} answered {reply.status}: {text}"
    if reply.status >= 500 or reply.status in _OVERLOADED:
        raise ServerError(message, status=reply.status)
    if "context_length_exceeded" in text or "context length" in text:
        raise ContextExceeded(message, status=reply.status)
    raise RequestRefused(message, status=reply.status)
