"""The session that an agent loop uses during one attempt.

It alone writes tokens, and it enforces the token budgets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import trio

from agentrl.chat.chat import Chat
from agentrl.config.agent import AgentConfig
from agentrl.errors import DataError, PluginError
from agentrl.plugins import Environment, InteractionReply, OpenAIEndpoint, ToolResult, TurnLimits
from agentrl.plugins.blame import failure_of
from agentrl.plugins.functions import NAME
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import Adjust, ConversationLine, PromptLimits, Sampled
from agentrl.rollout.conversations import NamedConversation, SpokenConversation
from agentrl.rollout.ending import TrajectoryEnd
from agentrl.rollout.environment import ENVIRONMENT_FACTS, AttemptEnvironment
from agentrl.rollout.openai_door import Door
from agentrl.rollout.opponents import Opponent, Opponents
from agentrl.rollout.partner import Partner
from agentrl.rollout.recorder import CALLS_OF, Attempt, TrajectoryRecorder
from agentrl.rollout.sampling import Generator, Sampling
from agentrl.rollout.scopes import GENERATE
from agentrl.rollout.shown_images import ShownImages, without_images
from agentrl.rollout.stop_strings import cut_at_stop
from agentrl.rollout.tally import GivenReward, Tally
from agentrl.rollout.toolbox import Toolbox
from agentrl.servers.streamed import Hear
from agentrl.types import (
    MAIN_CONVERSATION,
    Ending,
    Failure,
    Generation,
    ImageRef,
    JsonObject,
    Message,
    Outcome,
    PluginId,
    SamplingParams,
    ToolCall,
    Trajectory,
    Turn,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class SessionParts:
    """What a session is opened with. prompt: its first messages. shows_tools: whether the prompt lists the
    tools.
    """

    attempt: Attempt
    agent: AgentConfig
    sampling: Sampling
    toolbox: Toolbox
    partner: Partner | None
    host: AsyncioHost
    prompt: Sequence[Message]
    environment: AttemptEnvironment | None = None
    shows_tools: bool = True

    @property
    def shown_tools(self) -> Sequence[JsonObject]:
        """The schemas of the tools that the prompt lists."""
        return self.toolbox.schemas if self.shows_tools else []


MAX_REFUSED = 100
"""Calls after the end of an attempt that are answered with TrajectoryEnd; an agent loop that goes on catching
it is cancelled then.
"""


class AttemptSession(ABC):
    """What sessions for tokens and for messages share: tools, partner, environment, rewards, limits, and how
    an attempt ends.
    """

    limits: TurnLimits
    _images: ShownImages | None = None
    """Takes the images of tools and partners; None: notes stand for them."""

    def __init__(self, parts: SessionParts) -> None:
        agent, sampling = parts.agent, parts.sampling
        self._attempt = parts.attempt
        self._sampling = sampling
        self._max_response_tokens = sampling.max_response_tokens or agent.max_response_tokens
        self._max_turn_tokens = sampling.max_turn_tokens or agent.max_turn_tokens
        self._toolbox = parts.toolbox
        self._partner = parts.partner
        self._environment = parts.environment
        self._facts: JsonObject = {}
        self._host = parts.host
        self._recorder = TrajectoryRecorder()
        self._own = SpokenConversation(0, MAIN_CONVERSATION, self._recorder, parts.shown_tools)
        self._others: list[SpokenConversation] = []
        self._last_spoken = self._own  # in which the policy spoke last
        self._is_cut = False  # the last turn ended at a token limit
        self._ended: Outcome | None = None
        self._limit = ""  # that bounds the turn, or allows none
        self._farewell = ""
        self._num_refused = 0
        self.playing = trio.CancelScope()
        """In which the agent loop runs; one that calls on after the end is cancelled."""
        self._is_finished = False  # a tool ended the trajectory
        self._tally = Tally()
        self.limits = TurnLimits(agent.max_turns, agent.max_tool_calls_per_turn, agent.max_user_turns)

    @abstractmethod
    async def generate(self) -> Turn:
        """Show the model everything since its last turn and sample the next turn.

        Raises:
            TrajectoryEnd: there is no room for one more token, or `limits.turns` is reached.
            ServerError: a server refused the request, or servers failed repeatedly.
        """

    @abstractmethod
    def serve_openai(self) -> AbstractAsyncContextManager[OpenAIEndpoint]:
        """Serve an OpenAI endpoint while the context is open."""

    @abstractmethod
    async def next_turn(self, spoken: SpokenConversation) -> Turn:
        """Do what `generate` does, in any conversation."""

    @abstractmethod
    def context_tokens(self, spoken: SpokenConversation) -> int:
        """Return the length of a conversation in tokens, with the messages that the model sees at its next
        turn.
        """

    @abstractmethod
    def tokens_left(self, spoken: SpokenConversation) -> int:
        """Return the tokens that the budgets leave for the next turn of a conversation."""

    @abstractmethod
    def _begin(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], spoken: SpokenConversation
    ) -> ConversationLine:
        """Return a line of a conversation, without tokens, which begins with `messages`."""

    @abstractmethod
    def _find_opponent(self, name: str) -> Opponent:
        """Return the opponent `name`; raise PluginError if there is none."""

    @property
    def num_context_tokens(self) -> int:
        return self.context_tokens(self._own)

    @property
    def num_tokens_left(self) -> int:
        return self.tokens_left(self._own)

    @property
    def messages(self) -> tuple[Message, ...]:
        return self._own.line.messages

    @property
    def tools(self) -> Sequence[JsonObject]:
        return self._toolbox.schemas

    @property
    def has_interaction(self) -> bool:
        return self._partner is not None

    @property
    def environment(self) -> Environment | None:
        return None if self._environment is None else self._environment.plugin

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    async def call_tools(self, turn: Turn) -> Sequence[Message]:
        """Run the turn's calls concurrently. The model sees the answers at the next `generate`.

        Raises:
            ToolError: a tool broke.
        """
        return await self.show_answers(self._own, turn)

    async def run_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run calls concurrently and append nothing. Results are cut to their output budgets, and notes
        stand for their images.

        Raises:
            ToolError: a tool broke.
        """
        results = await self.answers(self._own, calls)
        return [replace(result, text=without_images(result.text, result.images)) for result in results]

    def add_user_message(self, text: str) -> None:
        """Append a user message. The model sees it at the next `generate`."""
        self.tell(self._own, text)

    def restart(self, messages: Sequence[Message]) -> None:
        """Go on from `messages`. They are context, assistant messages included, and begin a new segment.

        Raises:
            TrajectoryEnd: the trajectory has ended.
            PluginError: `messages` is no list of messages, or empty.
        """
        self.begin_anew(self._own, messages)

    def conversation(
        self,
        name: str,
        messages: Sequence[Message],
        *,
        opponent: str | None = None,
        tools: Sequence[str] | None = None,
    ) -> NamedConversation:
        """Open another conversation, which begins with `messages`.

        Raises:
            TrajectoryEnd: the trajectory has ended.
            PluginError: the name, the messages or a tool is wrong, or the opponent has no server.
        """
        self._refuse_if_ended()
        if not isinstance(name, str) or not NAME.fullmatch(name) or name == MAIN_CONVERSATION:
            raise PluginError(
                f"the agent opens a conversation {name!r}; a name has 1 to 64 letters, digits, _ . or -, and "
                f"{MAIN_CONVERSATION!r} is the session's own"
            )
        given = _messages_of(messages, f"opens conversation {name!r} with")
        found = None if opponent is None else self._find_opponent(opponent)
        recorder = self._recorder if found is None else TrajectoryRecorder()
        offered = [] if found is not None else self._own.shown_tools
        allowed: frozenset[str] | None = frozenset() if found is not None else None
        if tools is not None and found is None:
            allowed = self._toolbox.check_names(tools)
            offered = [schema for schema in offered if schema["function"]["name"] in allowed]
        spoken = SpokenConversation(len(self._others) + 1, name, recorder, offered, allowed, found)
        spoken.line = self._begin(given, offered, spoken)
        self._others.append(spoken)
        return NamedConversation(self, spoken)

    def add_reward(self, name: str, value: float) -> None:
        """Give the last turn a reward, reported as `agent/<name>`."""
        self._tally.rewards.append(GivenReward("agent", name, value, self._own.last_turn))

    # --------------------------------------------------------------------------------------- any conversation

    async def show_answers(self, spoken: SpokenConversation, turn: Turn) -> Sequence[Message]:
        """Run the turn's calls. The model sees the answers at its next turn of the conversation.

        Raises:
            ToolError: a tool broke.
        """
        results = await self.answers(spoken, turn.tool_calls)
        messages: list[Message] = []
        for call, result in zip(turn.tool_calls, results, strict=True):
            said = [*spoken.line.messages, *messages]
            content, images = await self._shown(result, by=f"tool {call.name!r}", said=said)
            messages.append(
                Message("tool", content, tool_call_id=call.id, name=call.name or None, images=images)
            )
        spoken.line.conversation.add_messages(messages)
        return messages

    async def _shown(
        self, answer: ToolResult | InteractionReply, *, by: str, said: Sequence[Message]
    ) -> tuple[str, tuple[ImageRef, ...]]:
        """Return the content and the images of the message that shows an answer.

        Raises:
            ToolError: it has images that cannot be shown.
        """
        if not answer.images:
            return answer.text, ()
        if self._images is None:
            return without_images(answer.text, answer.images), ()
        return await self._images.show(answer.text, answer.images, by=by, said=said)

    async def answers(self, spoken: SpokenConversation, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run calls concurrently and append nothing.

        Raises:
            ToolError: a tool broke.
        """
        await self._pause_if_ended()
        self._refuse_if_ended()
        with self._tally.timed("tool_s"):
            results = await self._toolbox.answer(calls, only=spoken.tools)
        for call, result in zip(calls, results, strict=True):
            self._tally.count("num_tool_calls")
            self._tally.count("num_tool_errors", result.is_error)
            self._tally.add(call.name, result.metrics)
            if result.reward is not None:
                self._tally.rewards.append(GivenReward("tool", call.name, result.reward, spoken.last_turn))
            if result.state is not None:
                spoken.line.reported_states.append(result.state)
            self._is_finished = self._is_finished or result.is_final
        return results

    def tell(self, spoken: SpokenConversation, text: str) -> None:
        """Append a user message to a conversation."""
        self._refuse_if_ended()
        spoken.line.conversation.add_messages([Message("user", text)])

    def begin_anew(self, spoken: SpokenConversation, messages: Sequence[Message]) -> None:
        """Let a conversation go on from `messages`; see `restart`."""
        self._refuse_if_ended()
        line = self._begin(_messages_of(messages, "restarts from"), spoken.shown_tools, spoken)
        line.reported_states = spoken.line.reported_states  # the environment did not restart
        spoken.line = line
        self._tally.count("num_restarts")

    def give_reward(self, spoken: SpokenConversation, name: str, value: float) -> None:
        """Give the last turn of a conversation a reward, reported as `agent/<name>`.

        Raises:
            PluginError: the policy sampled nothing in it.
        """
        if spoken.opponent is not None:
            raise PluginError(
                f"reward {name!r} for conversation {spoken.name!r}, in which opponent "
                f"{spoken.opponent.name!r} speaks; only the policy's earn rewards"
            )
        if not spoken.has_spoken:
            raise PluginError(
                f"reward {name!r} for conversation {spoken.name!r}, which did not speak: there is no token "
                "to reward; give it after the conversation's first `generate`"
            )
        self._tally.rewards.append(GivenReward("agent", name, value, spoken.last_turn))

    # ---------------------------------------------------------------------------------------------- the world

    async def interact(self) -> InteractionReply:
        """Ask the row's interaction partner for a reply. Unless it is done, the model sees the reply at the
        next `generate`.

        Raises:
            PluginError: the row has no interaction_kwargs, or nothing was generated yet.
            ToolError: the partner broke or timed out.
        """
        await self._pause_if_ended()
        self._refuse_if_ended()
        if self._partner is None:
            raise PluginError(
                f"task {self._attempt.task.task_id}: the agent interacts, but the row has no "
                "interaction_kwargs"
            )
        if not self._own.has_spoken:
            raise PluginError(
                "the agent interacts before its first `generate`, so there is nothing to answer"
            )
        with (
            self._tally.timed("interaction_s"),
            self._attempt.scope.open(f"interaction {self._partner.name}"),
        ):
            reply = await self._partner.respond(self.messages)
        if reply.reward is not None:
            self._tally.rewards.append(
                GivenReward("interaction", self._partner.name, reply.reward, self._own.last_turn)
            )
        self._tally.add(self._partner.name, reply.metrics)
        if reply.state is not None:
            self._own.line.reported_states.append(reply.state)
        if reply.is_done:
            reward = "" if reply.reward is None else f", reward {reply.reward:g}"
            self._farewell = f"{self._partner.name} ended the conversation{reward}: {reply.text}"
        else:
            by = f"interaction {self._partner.name!r}"
            content, images = await self._shown(reply, by=by, said=self.messages)
            self._own.line.conversation.add_messages([Message("user", content, images=images)])
        return reply

    async def run_asyncio(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Await `function(*args)` on the process's asyncio loop."""
        return await self._host.run(function, *args)

    def stop_at_turn_limit(self) -> None:
        """Record that the model wanted more turns than `limits.turns` allows."""
        if self._ended is None:
            self._end(Outcome.TURN_LIMIT, f"max_turns={self.limits.turns}")

    # ----------------------------------------------------------------------------------------- for the player

    @property
    def outcome(self) -> Outcome:
        """Why the attempt stopped, if neither an error nor the deadline stopped it."""
        return self._ended or (Outcome.TRUNCATED if self._is_cut else Outcome.COMPLETED)

    @property
    def num_action_tokens(self) -> int:
        return self._recorder.num_action_tokens

    @property
    def turn_rewards(self) -> Sequence[GivenReward]:
        """Rewards given so far by tools, the partner and the agent loop."""
        return self._tally.rewards

    async def open_environment(self) -> None:
        """Start the environment, if there is one.

        Raises:
            EnvironmentFailed: it raised, or its deadline passed.
        """
        if self._environment is not None:
            with self._tally.timed("environment_s"):
                await self._environment.start()

    async def close_environment(self) -> None:
        """Close the environment, if there is one. Never raises, and is shielded from cancellation."""
        if self._environment is not None:
            await self._environment.close()

    async def collect_scores(self) -> None:
        """Collect the final scores of tools and partner, and the environment's facts, after the agent loop is
        done. The scores are rewards of the last turn.

        Raises:
            ToolError, EnvironmentFailed: one of them broke.
        """
        last = self._own.last_turn if self._own.has_spoken else self._recorder.num_turns - 1
        for name, score in (await self._toolbox.score()).items():
            self._tally.rewards.append(GivenReward("tool", name, score, last))
        if self._partner is not None and (final := await self._partner.score()) is not None:
            self._tally.rewards.append(GivenReward("interaction", self._partner.name, final, last))
        if self._environment is not None:
            self._facts = await self._environment.facts()

    def trajectory(self, outcome: Outcome, failure: Failure | None) -> Trajectory:
        """Return everything recorded so far as a trajectory without rewards."""
        num_forks = self._recorder.num_segments - self._recorder.num_conversations
        shown = self._own if self._own.has_spoken else self._last_spoken
        line = shown.sampled_line or shown.line
        opened = [self._own, *self._others] if self._others else []
        trajectory = self._recorder.trajectory(
            self._attempt,
            messages=line.recorded_messages,
            outcome=outcome,
            failure=failure,
            metrics={
                "num_turns": float(self._recorder.num_turns),
                "num_forks": float(num_forks),
                **self._tally.metrics,
                **self._toolbox.metrics,
                **{f"{CALLS_OF}{name}": float(count) for name, count in self._toolbox.num_calls.items()},
            },
            conversations=tuple(one.record() for one in opened),
            ending=Ending(
                self._limit if outcome in (Outcome.TRUNCATED, Outcome.TURN_LIMIT) else "",
                line.unseen_messages if shown.has_spoken else (),
                self._farewell,
            ),
        )
        if not self._facts:
            return trajectory
        return trajectory.replace(extra_info={**trajectory.extra_info, ENVIRONMENT_FACTS: self._facts})

    async def close(self) -> None:
        """Close the tools and the partner. It is shielded from cancellation."""
        if self._partner is None and not self._toolbox.has_to_close:
            return
        # The shield is bounded: each close has its own deadline, CLOSE_TIMEOUT_S of guests.py.
        with trio.CancelScope(shield=True), self._attempt.scope.open("close tools and partner"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._toolbox.close)
                if self._partner is not None:
                    nursery.start_soon(self._close_partner, self._partner)

    async def _close_partner(self, partner: Partner) -> None:
        if (failed := await partner.close()) is not None:
            blamed = PluginId("interaction", partner.name)
            self._attempt.survived.append(failure_of(failed, otherwise=blamed))

    # ------------------------------------------------------------------------------------------- for sessions

    def _begin_own(self, messages: Sequence[Message]) -> None:
        """Begin the session's own conversation with the attempt's first prompt."""
        self._own.line = self._begin(messages, self._own.shown_tools, self._own)

    def _end(self, outcome: Outcome, limit: str) -> TrajectoryEnd:
        self._ended, self._limit = outcome, limit
        return TrajectoryEnd(outcome)

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            self._num_refused += 1
            if self._num_refused > MAX_REFUSED:
                self.playing.cancel()
            raise TrajectoryEnd(self._ended)

    async def _pause_if_ended(self) -> None:
        """Let other attempts go on, and cancellation arrive, before a call after the end is refused."""
        if self._ended is not None:
            await trio.lowlevel.checkpoint()


def _with_images(params: SamplingParams, line: ConversationLine) -> SamplingParams:
    """Return the parameters with the images of the line's prompt."""
    images = line.conversation.images
    return replace(params, images=tuple(images)) if images else params


def _messages_of(messages: Sequence[Message], what: str) -> list[Message]:
    """Return the messages as a list; raise PluginError if they are no messages, or none."""
    given = list(messages)
    if not given or not all(isinstance(message, Message) for message in given):
        raise PluginError(
            f"the agent {what} {str(given)[:80]}; pass a list of agentrl.types.Message, at least one"
        )
    return given


class TrajectorySession(AttemptSession):
    """Implements `agentrl.plugins.Session` for models that exchange tokens.

    Invariant: recorded tokens and messages always agree. A block of context that exceeds the budget is not
    appended at all, and messages that no prompt has shown yet are not part of the trajectory.
    """

    def __init__(
        self,
        parts: SessionParts,
        *,
        chat: Chat,
        generator: Generator,
        prompt: PromptLimits,
        gateway: Door,
        opponents: Opponents,
        adapters: Mapping[str, str],
        images: ShownImages | None = None,
    ) -> None:
        """adapters: name of a conversation with a LoRA adapter of its own -> that adapter."""
        super().__init__(parts)
        self._images = images if chat.images is not None else None
        self._opponents = opponents
        self._adapters = adapters
        self._chat = chat.with_template_kwargs(parts.attempt.task.chat_template_kwargs)
        self._generator = generator
        self._prompt = prompt
        self._gateway = gateway
        self._num_sampling = 0
        self._own.line = self._new_line(parts.prompt, parts.shown_tools, self._own)

    async def generate(self) -> Turn:
        """Show the model everything since its last turn and sample the next turn.

        Raises:
            TrajectoryEnd: there is no room for one more token, or `limits.turns` is reached.
            ServerError: a server refused the request, or servers failed repeatedly.
        """
        return (await self.sample(self._own.line, adjust=self._stopped)).turn

    async def next_turn(self, spoken: SpokenConversation) -> Turn:
        if spoken.opponent is not None:
            return await self._opponents_turn(spoken, spoken.opponent)
        return (await self.sample(spoken.line, spoken, adjust=self._stopped)).turn

    def context_tokens(self, spoken: SpokenConversation) -> int:
        return spoken.line.conversation.num_next_tokens()

    def tokens_left(self, spoken: SpokenConversation) -> int:
        return self._room_for_turn(self._with_budget(spoken.line), spoken.recorder)[0]

    def _begin(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], spoken: SpokenConversation
    ) -> ConversationLine:
        return self._with_own_budget(self._new_line(messages, tools, spoken))

    def _find_opponent(self, name: str) -> Opponent:
        return self._opponents.find(name)

    @asynccontextmanager
    async def serve_openai(self) -> AsyncIterator[OpenAIEndpoint]:
        """Serve an endpoint while the context is open: any client of OpenAI or Anthropic can play this
        trajectory through the gateway.

        Raises:
            TrajectoryEnd: the program failed after the trajectory had ended; its error is a consequence of
                the end.
            ServerError, ConfigError: a request failed with this error, however the program handled it.
            DataError: the task shows images, which do not reach the program.
        """
        if any(message.images for message in self._attempt.task.messages):
            raise DataError(
                "the task's messages contain images, which programs behind the gateway do not get; use an "
                "agent that samples by its session, such as tool_agent"
            )
        reaction: Exception | None = None
        async with self._gateway.serve(self, self._chat) as (endpoint, failures):
            try:
                yield endpoint
            except Exception as error:  # boundary: the user's program raised
                if not failures and self._ended is None:
                    raise
                reaction = error
        if failures:
            raise failures[0]
        if reaction is not None and self._ended is not None:
            raise TrajectoryEnd(self._ended) from reaction

    # ---------------------------------------------------------------------------------------- for the gateway

    def open_line(self, messages: Sequence[Message], tools: Sequence[JsonObject]) -> ConversationLine:
        """Open another line of conversation with its own token budget: its prompt may repeat everything said
        so far.
        """
        return self._with_own_budget(self._new_line(messages, tools, self._own))

    async def sample(
        self,
        line: ConversationLine,
        spoken: SpokenConversation | None = None,
        *,
        max_tokens: int | None = None,
        adjust: Adjust = lambda generation: generation,
        hear: Hear | None = None,
    ) -> Sampled:
        """Sample the next turn of `line`, which belongs to the conversation `spoken` (None: the session's
        own), at most `max_tokens` tokens. `adjust` may shorten the generation before recording. `hear` is
        told the tokens as they are sampled, if the servers stream.

        Raises:
            TrajectoryEnd: there is no room for one more token, or `limits.turns` is reached.
            ServerError: a server refused the request, or servers failed repeatedly.
        """
        await self._pause_if_ended()
        self._refuse_if_ended()
        if self._recorder.num_turns + self._num_sampling >= self.limits.turns:
            raise self._end(Outcome.TURN_LIMIT, f"max_turns={self.limits.turns}")
        room, self._limit = self._room_for_turn(self._with_budget(line), self._recorder)
        if room < 1:
            raise self._end(Outcome.TRUNCATED, self._limit)
        if max_tokens is not None and max_tokens < room:
            room, self._limit = max_tokens, f"max_tokens={max_tokens} of the program's request"
        params = self._params(room)
        speaks = self._own if spoken is None else spoken
        params = replace(params, adapter=self._adapters.get(speaks.name))
        self._num_sampling += 1
        try:
            with self._tally.timed("generate_s"), self._attempt.scope.open(GENERATE):
                with line.turn() as token_ids:
                    num_prompt_tokens = len(token_ids)
                    params = _with_images(params, line)
                    if self._sampling.replay_experts:
                        params = replace(params, experts_from=line.num_known_experts)
                    sampled = await self._generator.generate(
                        token_ids, params, trajectory_key=self._attempt.key, hear=hear
                    )
                    self._tally.count("num_interruptions", sampled.num_interruptions)
                    generation = adjust(sampled)
                turn = line.record_turn(generation)
        finally:
            self._num_sampling -= 1
        self._last_spoken = speaks
        self._last_spoken.said(line, turn)
        self._is_cut = turn.is_truncated
        return Sampled(turn, generation, num_prompt_tokens)

    def count(self, name: str) -> None:
        """Add 1 to a metric."""
        self._tally.count(name)

    def ignores(self, asked: Mapping[str, Any]) -> bool:
        """Return whether a request asks for sampling parameters other than the run's, which are ignored."""
        own = {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "chat_template_kwargs": self._chat.template_kwargs,
        }
        return any(value != own[name] if name in own else bool(value) for name, value in asked.items())

    # ------------------------------------------------------------------------------------------------- inside

    async def _opponents_turn(self, spoken: SpokenConversation, opponent: Opponent) -> Turn:
        """Let a frozen model say the next turn of a conversation. Its budgets are those of the policy, apart
        from the policy's.

        Raises:
            TrajectoryEnd: its budget is exhausted.
            ServerError: a server refused the request, or servers failed repeatedly.
        """
        await self._pause_if_ended()
        self._refuse_if_ended()
        if spoken.recorder.num_turns >= self.limits.turns:
            raise self._end(Outcome.TURN_LIMIT, f"max_turns={self.limits.turns} of {opponent.name}")
        line = spoken.line
        room, limit = self._room_for_turn(line, spoken.recorder)
        if room < 1:
            raise self._end(Outcome.TRUNCATED, f"{limit} of {opponent.name}")
        params = replace(self._params(room), temperature=opponent.temperature)
        where = self._attempt.scope.open(f"opponent {opponent.name}")
        with self._tally.timed("opponent_s"), where:
            with line.turn() as token_ids:
                generation = self._stopped(
                    await opponent.generate(
                        token_ids, _with_images(params, line), trajectory_key=self._attempt.key
                    )
                )
            turn = line.record_turn(generation)
        spoken.said(line, turn)
        spoken.heard(generation.versions)
        self._tally.count("num_opponent_turns")
        self._tally.count("num_opponent_tokens", len(generation.token_ids))
        return turn

    def _new_line(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], spoken: SpokenConversation
    ) -> ConversationLine:
        task_id = self._attempt.task.task_id
        opened = self._chat.open(messages, tools)
        return ConversationLine(opened, spoken.recorder, task_id=task_id, owner=spoken.index)

    def _with_own_budget(self, line: ConversationLine) -> ConversationLine:
        line.max_tokens = self._prompt.max_tokens + self._max_response_tokens
        return line

    def _with_budget(self, line: ConversationLine) -> ConversationLine:
        """Return the line, whose first prompt is then fixed.

        Raises:
            DataError: the first prompt is too long.
        """
        if line.max_tokens is None:
            line.fix_prompt(self._prompt, self._max_response_tokens)
        return line

    def _room_for_turn(self, line: ConversationLine, recorder: TrajectoryRecorder) -> tuple[int, str]:
        """Return the token budget of the line's next turn, after the context that precedes it, and the limit
        that sets it.

        Two budgets apply. Each segment has a budget of its own, because a fork repeats its context. The
        action tokens of all segments that `recorder` has must also stay within `max_response_tokens`.
        """
        assert line.max_tokens is not None, "the prompt is not fixed"
        total = line.conversation.num_next_tokens()
        left = min(line.max_tokens - total, self._max_response_tokens - recorder.num_action_tokens)
        room, limit = left, f"max_response_tokens={self._max_response_tokens}"
        context = self._generator.context_tokens
        if context is not None and context - total < room:
            room, limit = context - total, f"the model's context of {context} tokens"
        if self._max_turn_tokens is not None and self._max_turn_tokens < room:
            room, limit = self._max_turn_tokens, f"max_turn_tokens={self._max_turn_tokens}"
        return room, limit

    def _params(self, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            min_p=self._sampling.min_p,
            stop_token_ids=() if self._sampling.ignore_eos else self._chat.eos_token_ids,
            ignore_eos=self._sampling.ignore_eos,
        )

    def _stopped(self, generation: Generation) -> Generation:
        return cut_at_stop(generation, self._sampling.stop, self._chat) if self._sampling.stop else generation
