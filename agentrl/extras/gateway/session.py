"""Serves the requests of one attempt through the gateway: each becomes a turn of a line of conversation.

A request whose messages extend a recorded line continues that line. The sampled tokens are kept; the
program's copy of them is only compared, never tokenized again. Any other request opens another line, and
therefore a new segment: the first request, a sub-agent's, or one whose history was edited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import trio

from agentrl.chat.chat import Chat
from agentrl.chat.equality import is_same_message
from agentrl.extras.gateway.bodies import is_sendable
from agentrl.extras.gateway.told_turn import ToldTurn
from agentrl.extras.gateway.turns import TEXT_ARGUMENT, FinishReason, Listener, TurnReply, TurnRequest
from agentrl.rollout.conversation_line import Adjust, ConversationLine, Sampled
from agentrl.rollout.stop_strings import cut_at_stop
from agentrl.servers.streamed import Hear
from agentrl.types import Generation, JsonObject, Message, ToolCall

_LARGE_PROMPT = 200_000
"""Prompts of at least this many characters are encoded in a thread."""


class ServedLine:
    """A line as the program knows it: with the tools that it sent, and the replies that it received.

    A reply can differ from the recorded message, for example if it was cut at a stop string.
    """

    def __init__(self, line: ConversationLine, tools: Sequence[JsonObject]) -> None:
        self.line = line
        self.tools = list(tools)
        self._replies: dict[int, Message] = {}  # index of the message -> the reply sent to the program
        self._is_preparing = False

    def note_reply(self, reply: Message) -> None:
        """Remember the reply that was sent for the last message."""
        self._replies[len(self.line.messages) - 1] = reply

    def continuation(self, request: TurnRequest) -> list[Message] | None:
        """Return the messages of the request that follow this line; None if the request does not continue the
        line.
        """
        if self.line.is_sampling or self._is_preparing or list(request.tools) != self.tools:
            return None
        recorded = self.line.messages
        known = [
            recorded[index]
            if index in self._replies and is_same_message(self._replies[index], message)
            else message
            for index, message in enumerate(request.messages)
        ]
        return self.line.conversation.extends(known)

    async def prepare(self) -> None:
        """Encode a long prompt in a thread, so that it does not block the event loop of all attempts."""
        if sum(len(message.content) for message in self.line.messages) < _LARGE_PROMPT:
            return
        self._is_preparing = True
        self.line.is_interrupted = True  # the program may disconnect and resend the same request
        try:
            await trio.to_thread.run_sync(self.line.conversation.prepare)
        finally:
            self._is_preparing = False


class LineSampler(Protocol):
    """Samples turns of several lines of one attempt: `agentrl.rollout.session.TrajectorySession`."""

    def open_line(self, messages: Sequence[Message], tools: Sequence[JsonObject]) -> ConversationLine: ...

    async def sample(
        self, line: ConversationLine, *, max_tokens: int | None, adjust: Adjust, hear: Hear | None
    ) -> Sampled: ...

    def count(self, name: str) -> None: ...

    def ignores(self, asked: Mapping[str, Any]) -> bool: ...


class GatewaySession:
    """Answers the requests of one attempt, which may be concurrent."""

    def __init__(self, session: LineSampler, chat: Chat, *, streams: bool = True) -> None:
        """`streams`: ask servers to tell tokens while they are sampled, for requests that are streamed."""
        self._session = session
        self._chat = chat
        self._streams = streams
        self._lines: list[ServedLine] = []

    async def complete(self, request: TurnRequest, listener: Listener | None = None) -> TurnReply:
        """Sample one turn. A `listener` is told it while it is sampled, as far as the servers stream.

        Raises:
            TrajectoryEnd: the attempt is over.
            ServerError: no server answered.
            ConfigError: the chat template rejects the messages, or does not show the tools.
        """
        self._count(request)
        served = self._line_for(request)
        await served.prepare()
        told = None if listener is None else self._told_turn(served.line, request, listener)
        sampled = await self._session.sample(
            served.line,
            max_tokens=request.max_tokens,
            adjust=lambda generation: cut_at_stop(generation, request.stop, self._chat),
            hear=told.hear if told is not None and told.is_early else None,
        )
        reply = self._reply(sampled, request, told)
        for _ in reply.message.tool_calls:  # the program runs them
            self._session.count("num_tool_calls")
        served.note_reply(reply.message)
        return reply

    async def count_tokens(self, request: TurnRequest) -> int:
        """Return how many tokens the prompt of a request has when it begins a line.

        Raises:
            ConfigError: the chat template rejects the messages.
        """
        conversation = self._chat.open(request.messages, request.tools)
        return await trio.to_thread.run_sync(conversation.num_pending_tokens)

    def _count(self, request: TurnRequest) -> None:
        """Count the request, and what of it is ignored."""
        self._session.count("gateway/num_requests")
        if self._session.ignores(request.sampling):
            self._session.count("gateway/sampling_ignored")
        if request.is_tool_choice_forced:
            self._session.count("gateway/tool_choice_ignored")
        for _ in range(request.num_tools_left_out):
            self._session.count("gateway/tools_left_out")

    def _told_turn(self, line: ConversationLine, request: TurnRequest, listener: Listener) -> ToldTurn:
        # A stop string may begin in any token, so nothing is certain before the end.
        is_early = self._streams and not request.stop
        return ToldTurn(listener, partial(self._chat.read_turn, line.conversation) if is_early else None)

    def _line_for(self, request: TurnRequest) -> ServedLine:
        """Return the line that the request continues, with the new messages added; a new line if there is
        none.

        If several lines match, the longest one is used.
        """
        found = [
            (len(line.line.messages), line, more)
            for line in self._lines
            if (more := line.continuation(request)) is not None
        ]
        if found:
            _, served, more = max(found, key=lambda item: item[0])
            if served.line.is_interrupted and not more:
                return served
            if more and not served.line.is_interrupted:
                served.line.conversation.add_messages(more)
                return served
        if request.calls_tools:
            self._chat.check_tools(request.tools, request.messages)
        served = ServedLine(self._session.open_line(request.messages, request.tools), request.tools)
        self._lines.append(served)
        return served

    def _reply(self, sampled: Sampled, request: TurnRequest, told: ToldTurn | None) -> TurnReply:
        message, stop = sampled.turn.message, None
        if message.tool_calls and not _has_sendable_calls(message, request):
            raw = self._raw(sampled.generation)
            ids = sampled.generation.token_ids.tolist()
            message = Message("assistant", raw) if told is None else told.finish_as_text(raw, ids)
        else:
            stop = _first(message.content, request.stop)
            if stop is not None:
                message = dataclasses.replace(message, content=message.content.partition(stop)[0])
            message = message if told is None else told.finish(message)
        finish: FinishReason = (
            "length" if sampled.turn.is_truncated else "tool_calls" if message.tool_calls else "stop"
        )
        return TurnReply(
            message,
            finish,
            num_prompt_tokens=sampled.num_prompt_tokens,
            num_completion_tokens=len(sampled.generation.token_ids),
            logprobs=self._logprobs(sampled.generation) if request.wants_logprobs else None,
            stop=stop,
        )

    def _logprobs(self, generation: Generation) -> list[tuple[str, float]]:
        ids, values = generation.token_ids.tolist(), generation.logprobs.tolist()
        return [(self._chat.decode([id]), value) for id, value in zip(ids, values, strict=True)]

    def _raw(self, generation: Generation) -> str:
        """Return the sampled tokens as text, for tool calls that cannot be sent as calls."""
        ids = generation.token_ids.tolist()
        return self._chat.decode(ids[:-1] if ids and ids[-1] in self._chat.eos_token_ids else ids).strip()


def _has_sendable_calls(message: Message, request: TurnRequest) -> bool:
    return request.calls_tools and all(_can_send(call, request) for call in message.tool_calls)


def _can_send(call: ToolCall, request: TurnRequest) -> bool:
    """Return whether a call that the model wrote can be sent as a call, and come back the same."""
    if call.arguments is None or not is_sendable([call.id, call.name, call.arguments]):
        return False
    if call.name not in request.text_tools:
        return True
    return call.arguments.keys() == {TEXT_ARGUMENT} and isinstance(call.arguments[TEXT_ARGUMENT], str)


def _first(text: str, stop: Sequence[str]) -> str | None:
    """Return the stop string that comes first in `text`; None if there is none."""
    found = [(position, string) for string in stop if (position := text.find(string)) >= 0]
    return min(found)[1] if found else None
