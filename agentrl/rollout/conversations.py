"""The conversations of one attempt: the session's own, and those that the agent opens beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.plugins import ToolResult
from agentrl.rollout.conversation_line import ConversationLine
from agentrl.rollout.opponents import Opponent
from agentrl.rollout.recorder import CONTEXT_TURN, TrajectoryRecorder
from agentrl.types import ConversationRecord, JsonObject, Message, ToolCall, Turn


@dataclass(slots=True, eq=False)
class SpokenConversation:
    """A conversation while it is played.

    index: its place among those of the attempt; 0: the session's own.
    recorder: records its turns; the session's, or one that nothing is learned from, of an opponent.
    shown_tools: the schemas that its prompt lists.
    tools: the names of the tools that it may call; None: all of the attempt's.
    opponent: the frozen model that speaks in it; None: the policy.
    opponent_versions: those of the opponent that sampled its turns, in order, each once.
    line: the line that goes on: the one sampled last, or one that begins anew (`restart`).
    sampled_line: the line sampled last; None before the first turn.
    last_turn: index, in the attempt, of the turn that the policy sampled last in it; CONTEXT_TURN: none.
    """

    index: int
    name: str
    recorder: TrajectoryRecorder
    shown_tools: Sequence[JsonObject]
    tools: frozenset[str] | None = None
    opponent: Opponent | None = None
    opponent_versions: list[int] = field(default_factory=list)
    line: ConversationLine = field(init=False)
    sampled_line: ConversationLine | None = None
    last_turn: int = CONTEXT_TURN

    def said(self, line: ConversationLine, turn: Turn) -> None:
        """Note a turn that was sampled in `line`."""
        self.line = self.sampled_line = line
        self.last_turn = turn.index

    def heard(self, versions: NDArray[np.int32]) -> None:
        """Note the versions of the opponent that sampled a turn's tokens."""
        for version in versions.tolist():
            if version not in self.opponent_versions:
                self.opponent_versions.append(version)

    @property
    def has_spoken(self) -> bool:
        return self.sampled_line is not None

    def record(self) -> ConversationRecord:
        """Return what is stored of it beside its tokens."""
        said = () if self.sampled_line is None else self.sampled_line.recorded_messages
        if self.opponent is None:
            return ConversationRecord(self.name, said)
        return ConversationRecord(self.name, said, self.opponent.name, tuple(self.opponent_versions))


class ConversationVerbs(Protocol):
    """What a session does in each of its conversations: `agentrl.rollout.session.AttemptSession`."""

    async def next_turn(self, spoken: SpokenConversation) -> Turn: ...

    def context_tokens(self, spoken: SpokenConversation) -> int: ...

    def tokens_left(self, spoken: SpokenConversation) -> int: ...

    async def show_answers(self, spoken: SpokenConversation, turn: Turn) -> Sequence[Message]: ...

    async def answers(
        self, spoken: SpokenConversation, calls: Sequence[ToolCall]
    ) -> Sequence[ToolResult]: ...

    def tell(self, spoken: SpokenConversation, text: str) -> None: ...

    def begin_anew(self, spoken: SpokenConversation, messages: Sequence[Message]) -> None: ...

    def give_reward(self, spoken: SpokenConversation, name: str, value: float) -> None: ...


class NamedConversation:
    """Implements `agentrl.plugins.Conversing`: a conversation that the agent opened beside the session's
    own.
    """

    def __init__(self, session: ConversationVerbs, spoken: SpokenConversation) -> None:
        self._session = session
        self._spoken = spoken

    @property
    def name(self) -> str:
        return self._spoken.name

    @property
    def messages(self) -> tuple[Message, ...]:
        return self._spoken.line.messages

    @property
    def has_spoken(self) -> bool:
        return self._spoken.has_spoken

    @property
    def num_context_tokens(self) -> int:
        return self._session.context_tokens(self._spoken)

    @property
    def num_tokens_left(self) -> int:
        return self._session.tokens_left(self._spoken)

    async def generate(self) -> Turn:
        """Show the model everything since its last turn here and sample the next one.

        Raises:
            TrajectoryEnd: there is no room for one more token, or `limits.turns` is reached.
            ServerError: a server refused the request, or servers failed repeatedly.
        """
        return await self._session.next_turn(self._spoken)

    async def call_tools(self, turn: Turn) -> Sequence[Message]:
        return await self._session.show_answers(self._spoken, turn)

    async def run_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return await self._session.answers(self._spoken, calls)

    def add_user_message(self, text: str) -> None:
        self._session.tell(self._spoken, text)

    def restart(self, messages: Sequence[Message]) -> None:
        self._session.begin_anew(self._spoken, messages)

    def add_reward(self, name: str, value: float) -> None:
        """Give the last turn of this conversation a reward.

        Raises:
            PluginError: nothing was sampled in it, or an opponent speaks in it.
        """
        self._session.give_reward(self._spoken, name, value)
