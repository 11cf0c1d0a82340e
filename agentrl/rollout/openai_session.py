"""Serves the OpenAI requests of one attempt: each request becomes a turn of a line of conversation.

A request whose messages extend a recorded line continues that line. The sampled tokens are kept; the
program's copy of them is only compared, never tokenized again. Any other request opens another line, and
therefore a new segment: the first request, a sub-agent's, or one whose history was edited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from agentrl.chat.chat import Chat
from agentrl.chat.equality import is_same_message
from agentrl.rollout.conversation_line import Adjust, ConversationLine, Sampled
from agentrl.rollout.openai_messages import ChatReply, ChatRequest, FinishReason
from agentrl.rollout.stop_strings import cut_at_stop
from agentrl.types import Generation, JsonObject, Message

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

    def continuation(self, request: ChatRequest) -> list[Message] | None:
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

    async def sample(self, line: ConversationLine, *, max_tokens: int | None, adjust: Adjust) -> Sampled: ...

    def count(self, name: str) -> None: ...

    def ignores(self, asked: Mapping[str, Any]) -> bool: ...


class OpenAISession:
    """Answers the requests of one attempt, which may be concurrent."""

    def __init__(self, session: LineSampler, chat: Chat) -> None:
        self._session = session
        self._chat = chat
        self._lines: list[ServedLine] = []

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Sample one turn.

        Raises:
            TrajectoryEnd: the attempt is over.
            ServerError: no server answered.
            ConfigError: the chat template rejects the messages, or does not show the tools.
        """
        self._session.count("openai/num_requests")
        if self._session.ignores(request.sampling):
            self._session.count("openai/sampling_ignored")
        if request.is_tool_choice_forced:
            self._session.count("openai/tool_choice_ignored")
        served = self._line_for(request)
        await served.prepare()
        sampled = await self._session.sample(
            served.line,
            max_tokens=request.max_tokens,
            adjust=lambda generation: cut_at_stop(generation, request.stop, self._chat),
        )
        reply = self._reply(sampled, request)
        for _ in reply.message.tool_calls:  # the program runs them
            self._session.count("num_tool_calls")
        served.note_reply(reply.message)
        return reply

    def _line_for(self, request: ChatRequest) -> ServedLine:
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

    def _reply(self, sampled: Sampled, request: ChatRequest) -> ChatReply:
        message = sampled.turn.message
        if message.tool_calls and not (
            request.calls_tools and all(call.arguments is not None for call in message.tool_calls)
        ):
            message = dataclasses.replace(
                message, content=self._raw(sampled.generation), tool_calls=(), reasoning=""
            )
        elif request.stop:
            message = dataclasses.replace(message, content=_before(message.content, request.stop))
        finish: FinishReason = (
            "length" if sampled.turn.is_truncated else "tool_calls" if message.tool_calls else "stop"
        )
        return ChatReply(
            message,
            finish,
            num_prompt_tokens=sampled.num_prompt_tokens,
            num_completion_tokens=len(sampled.generation.token_ids),
            logprobs=self._logprobs(sampled.generation) if request.wants_logprobs else None,
        )

    def _logprobs(self, generation: Generation) -> list[tuple[str, float]]:
        ids, values = generation.token_ids.tolist(), generation.logprobs.tolist()
        return [(self._chat.decode([id]), value) for id, value in zip(ids, values, strict=True)]

    def _raw(self, generation: Generation) -> str:
        """Return the sampled tokens as text, for tool calls that cannot be sent as calls."""
        ids = generation.token_ids.tolist()
        return self._chat.decode(ids[:-1] if ids and ids[-1] in self._chat.eos_token_ids else ids).strip()


def _before(text: str, stop: Sequence[str]) -> str:
    ends = [position for string in stop if (position := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text
