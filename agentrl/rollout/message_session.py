"""The session for models that return messages instead of tokens: same tools, partners, limits and rewards.

Such servers only report token counts, so the trajectory holds placeholders: `token_ids` UNKNOWN_TOKEN,
`behavior_logprobs` NaN, `versions` NO_VERSION. Counts, turns and reward positions are right, but the
trajectory cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from agentrl.chat.chat import Chat
from agentrl.chat.conversation import Conversation
from agentrl.chat.template_arguments import json_copy
from agentrl.errors import DataError, PluginError
from agentrl.rollout.anchors import anchor
from agentrl.rollout.conversation_line import ConversationLine
from agentrl.rollout.conversations import SpokenConversation
from agentrl.rollout.message_model import ContextExceeded, MessageModel, MessageReply
from agentrl.rollout.recorder import TrajectoryRecorder
from agentrl.rollout.scopes import GENERATE
from agentrl.rollout.session import AttemptSession, SessionParts
from agentrl.types import NO_VERSION, Generation, JsonObject, Message, Outcome, Turn

UNKNOWN_TOKEN = -1
CHARS_PER_TOKEN = 4
"""Estimate for texts that no server has counted: tool outputs and messages that wait for the next turn."""


class UncountedChat:
    """Replaces a tokenizer: a token is four characters, and no prompt is too long until the server says
    so.
    """

    eos_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        pieces = (text[start : start + CHARS_PER_TOKEN] for start in range(0, len(text), CHARS_PER_TOKEN))
        return [int.from_bytes(piece.encode("utf-32-le", "replace"), "little") for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(
            id.to_bytes(4 * CHARS_PER_TOKEN, "little").decode("utf-32-le").rstrip("\0") for id in ids
        )

    def open(self, messages: Sequence[Message], tools: Sequence[JsonObject]) -> Messages:
        """Open a conversation.

        Raises:
            DataError: a message has images.
        """
        if any(message.images for message in messages):
            raise DataError(
                "messages contain images, which are not sent to a server of messages; evaluate with weights, "
                "or with an SGLang server"
            )
        return Messages(messages)

    def with_template_kwargs(self, given: Mapping[str, Any]) -> UncountedChat:
        """Check that the values can be sent. The server knows the names."""
        json_copy(given)
        return self

    def check_tools(self, tools: Sequence[JsonObject], messages: Sequence[Message]) -> None:
        """Do nothing: the server has its own template."""


class Messages:
    """A conversation without tokens."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = tuple(messages)

    def add_messages(self, messages: Sequence[Message]) -> None:
        self.messages += tuple(messages)

    def num_pending_tokens(self) -> int:
        return 0


class MessageLine(ConversationLine):
    """A line of messages. Each turn is recorded as placeholder tokens, as many as the server counted."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        recorder: TrajectoryRecorder,
        *,
        task_id: str,
        owner: int,
    ) -> None:
        self._said = Messages(messages)
        # The cast is safe: only `ConversationLine.turn` needs tokens, and it is never called on this line.
        super().__init__(cast(Conversation, self._said), recorder, task_id=task_id, owner=owner)
        self._segment = recorder.begin_segment(owner)
        self.tools = tools  # that the server is told of
        self._num_counted = 0  # messages that the server has counted
        self.num_prompt_tokens = 0  # of the first prompt

    @property
    def num_tokens(self) -> int:
        """Tokens so far: as counted by the server, plus an estimate for the messages that wait."""
        assert self._segment is not None
        waiting = self._said.messages[self._num_counted :]
        return self._segment.num_tokens + (
            sum(len(message.content) for message in waiting) // CHARS_PER_TOKEN if self._num_counted else 0
        )

    def record(self, reply: MessageReply) -> Turn:
        """Record a turn and the context that the model was shown before it."""
        assert self._segment is not None
        shown = self._said.messages[self._num_recorded_messages :]
        state = anchor(self._task_id, shown, self.reported_states)
        self.reported_states = []
        first = 1 if not self._segment.num_tokens else 0  # a segment begins with context
        self._segment.append_context(
            [UNKNOWN_TOKEN] * max(first, reply.num_prompt_tokens - self._segment.num_tokens)
        )
        self.num_prompt_tokens = self.num_prompt_tokens or self._segment.num_tokens
        num = max(1, reply.num_tokens)
        tokens = np.full(num, UNKNOWN_TOKEN, np.int32)
        versions = np.full(num, NO_VERSION, np.int32)
        generation = Generation(tokens, np.full(num, np.nan, np.float32), versions, reply.finish_reason)
        self._said.add_messages([reply.message])
        self._num_recorded_messages = self._num_counted = len(self._said.messages)
        return Turn(
            self._segment.append_generation(generation, anchor=state),
            reply.message,
            reply.finish_reason == "length",
        )


class MessageSession(AttemptSession):
    """Implements `agentrl.plugins.Session` for a model that exchanges messages."""

    def __init__(self, parts: SessionParts, *, model: MessageModel) -> None:
        super().__init__(parts)
        self._model = model
        self._begin_own(parts.prompt)

    async def generate(self) -> Turn:
        return await self.next_turn(self._own)

    async def next_turn(self, spoken: SpokenConversation) -> Turn:
        await self._pause_if_ended()
        self._refuse_if_ended()
        line = _of_messages(spoken.line)
        if self._recorder.num_turns >= self.limits.turns:
            raise self._end(Outcome.TURN_LIMIT, f"max_turns={self.limits.turns}")
        room, self._limit = self._room(spoken)
        if room < 1:
            raise self._end(Outcome.TRUNCATED, self._limit)
        try:
            with self._tally.timed("generate_s"), self._attempt.scope.open(GENERATE):
                reply = await self._model.complete(
                    line.messages,
                    line.tools,
                    self._sampling,
                    max_tokens=room,
                    turn=self._recorder.num_turns,
                    key=self._attempt.key,
                    template_kwargs=self._attempt.task.chat_template_kwargs,
                )
        except ContextExceeded:
            raise self._end(Outcome.TRUNCATED, "the model's context") from None
        turn = line.record(reply)
        self._last_spoken = spoken
        spoken.said(line, turn)
        self._is_cut = turn.is_truncated
        return turn

    def context_tokens(self, spoken: SpokenConversation) -> int:
        """As the server counted, plus an estimate for messages that it has not counted."""
        return _of_messages(spoken.line).num_tokens

    def tokens_left(self, spoken: SpokenConversation) -> int:
        """From the server's counts and an estimate for messages not yet sent."""
        return self._room(spoken)[0]

    def _room(self, spoken: SpokenConversation) -> tuple[int, str]:
        """Return the tokens that are left, and the limit that sets them."""
        line, recorded = _of_messages(spoken.line), self._recorder.num_action_tokens
        spent = line.num_tokens - line.num_prompt_tokens if line.num_prompt_tokens else 0
        room = self._max_response_tokens - max(spent, recorded)
        if self._max_turn_tokens is not None and self._max_turn_tokens < room:
            return self._max_turn_tokens, f"max_turn_tokens={self._max_turn_tokens}"
        return room, f"max_response_tokens={self._max_response_tokens}"

    def _begin(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], spoken: SpokenConversation
    ) -> MessageLine:
        task_id = self._attempt.task.task_id
        return MessageLine(messages, tools, self._recorder, task_id=task_id, owner=spoken.index)

    def _find_opponent(self, name: str) -> NoReturn:
        raise PluginError(
            f"the agent plays against opponent {name!r}, which needs token ids: use servers with SGLang's "
            "protocol"
        )

    def serve_openai(self) -> NoReturn:
        raise PluginError(
            "this agent's program uses agentrl's endpoint, which needs token ids: use servers with SGLang's "
            "protocol"
        )


def _of_messages(line: ConversationLine) -> MessageLine:
    assert isinstance(line, MessageLine), "a session of messages has no other lines"
    return line


def uncounted_chat() -> Chat:
    """Return an UncountedChat typed as a Chat. A MessageSession calls no other methods of Chat."""
    return cast(Chat, UncountedChat())
