"""What an agent loop holds during one attempt: the one writer of its tokens, and the keeper of its budgets.

`Trajectory.metrics` of every attempt (numbers; seconds end in `_s`):
    num_turns, num_tool_calls, num_tool_errors (calls answered with an error), num_interruptions (generations continued),
    num_tool_retries, num_tool_timeouts, num_tool_failures, num_cut_outputs (see Toolbox; absent when 0),
    num_forks (training rows beyond the first, because the context was edited),
    generate_s, tool_s, interaction_s (waiting for servers, tools, the partner), reward_s (scoring),
    reward/tool, reward/interaction (sums of turn rewards, where there were any),
    reward/<metric> of the reward, and `accuracy` where it reports one, <tool>/<metric> of tools (sums).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import trio

from agentrl.chat.chat import Chat
from agentrl.config.schema import AgentConfig
from agentrl.errors import DataError, PluginError
from agentrl.plugins import InteractionReply, ToolResult, TurnLimits
from agentrl.rollout.partner import Partner
from agentrl.rollout.recorder import Attempt, TrajectoryRecorder
from agentrl.rollout.toolbox import Toolbox
from agentrl.types import Generation, JsonObject, Message, Outcome, SamplingParams, ToolCall, Trajectory, Turn

OverlongPrompts = Literal["filter", "truncate_left", "truncate_right", "truncate_middle", "error"]


class Sampling(Protocol):
    """How to sample: the `rollout` config in training, the `eval` config in validation."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...


class Generator(Protocol):
    """Samples turns: the Router."""

    @property
    def context_tokens(self) -> int | None:
        """Largest prompt plus answer that every server takes; None while unknown."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, trajectory_key: str) -> Generation: ...


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """`data.max_prompt_tokens` and what happens to longer prompts."""

    max_tokens: int
    overlong: OverlongPrompts


@dataclass(frozen=True, slots=True)
class GivenReward:
    """A reward that a tool, the partner or the agent loop itself gave for one assistant turn."""

    source: Literal["tool", "interaction", "agent"]
    name: str
    value: float
    turn: int


class TrajectoryEnd(Exception):
    """The attempt is over with `outcome`; raised again by every further call, should an agent loop catch it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"the trajectory ended: {outcome.value}")
        self.outcome = outcome


class TrajectorySession:
    """Implements `agentrl.plugins.Session`.

    Tokens and messages agree at every moment: a block of context that does not fit the budget is not appended at all, and
    messages that no prompt shows yet are not part of the trajectory.
    """

    def __init__(
        self,
        attempt: Attempt,
        agent: AgentConfig,
        *,
        chat: Chat,
        generator: Generator,
        sampling: Sampling,
        prompt: PromptLimits,
        toolbox: Toolbox,
        partner: Partner | None,
        prompt_messages: Sequence[Message],
        shows_tools: bool = True,
    ) -> None:
        self._attempt = attempt
        self._agent = agent
        self._chat = chat
        self._generator = generator
        self._sampling = sampling
        self._prompt = prompt
        self._toolbox = toolbox
        self._partner = partner
        self._conversation = chat.open(prompt_messages, toolbox.schemas if shows_tools else [])
        self._recorder = TrajectoryRecorder()
        self._row = self._recorder.row()
        self._num_prompt_tokens = 0
        self._num_shown_messages = 0  # those that tokens stand for
        self._is_cut = False  # the last turn ended at a token limit
        self._ended: Outcome | None = None
        self._is_finished = False  # a tool ended the trajectory
        self._metrics: defaultdict[str, float] = defaultdict(float)
        self.turn_rewards: list[GivenReward] = []
        self.limits = TurnLimits(agent.max_turns, agent.max_tool_calls_per_turn, agent.max_user_turns)

    # -------------------------------------------------------------------------------------------- for agent loops

    @property
    def messages(self) -> tuple[Message, ...]:
        return self._conversation.messages

    @property
    def tools(self) -> Sequence[JsonObject]:
        return self._toolbox.schemas

    @property
    def has_interaction(self) -> bool:
        return self._partner is not None

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    async def generate(self) -> Turn:
        """Show the model all that happened since its last turn, and sample the next one.

        Raises:
            TrajectoryEnd: no room for one more token, or `limits.turns` are used up.
            ServerError: a server refused the request, or servers failed again and again.
        """
        self._refuse_if_ended()
        if self._recorder.num_turns >= self.limits.turns:
            raise self._end(Outcome.TURN_LIMIT)
        self._prepare_first_prompt()
        max_new_tokens = self._room_for_turn()
        if max_new_tokens < 1:
            raise self._end(Outcome.TRUNCATED)
        num_forks = self._conversation.num_forks
        block = self._conversation.next_prompt()
        if self._conversation.num_forks > num_forks:  # the block shows an edited history: it extends no row
            self._row = self._recorder.row()
        self._row.append_context(block)
        self._num_shown_messages = len(self._conversation.messages)
        with self._timed("generate_s"):
            generation = await self._generator.generate(
                self._conversation.token_ids, self._params(max_new_tokens), trajectory_key=self._attempt.key
            )
        return self._record(generation)

    async def call_tools(self, turn: Turn) -> Sequence[Message]:
        """Run the turn's calls side by side; the answers wait for the next `generate`.

        Raises:
            ToolError: a tool broke.
        """
        results = await self.run_tools(turn.tool_calls)
        messages = [
            Message("tool", result.text, tool_call_id=call.id, name=call.name or None)
            for call, result in zip(turn.tool_calls, results, strict=True)
        ]
        self._conversation.add_messages(messages)
        return messages

    async def run_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run calls side by side and append nothing; the results are cut to their output budgets.

        Raises:
            ToolError: a tool broke.
        """
        self._refuse_if_ended()
        with self._timed("tool_s"):
            results = await self._toolbox.answer(calls)
        for call, result in zip(calls, results, strict=True):
            self._metrics["num_tool_calls"] += 1
            self._metrics["num_tool_errors"] += result.is_error
            for name, value in result.metrics.items():
                self._metrics[f"{call.name}/{name}"] += value
            if result.reward is not None:
                self.turn_rewards.append(GivenReward("tool", call.name, result.reward, self._recorder.num_turns - 1))
            self._is_finished = self._is_finished or result.is_final
        return results

    def add_user_message(self, text: str) -> None:
        """Let a message wait for the next `generate`."""
        self._refuse_if_ended()
        self._conversation.add_messages([Message("user", text)])

    def add_reward(self, name: str, value: float) -> None:
        """Give the last turn a reward, reported as `agent/<name>`."""
        self.turn_rewards.append(GivenReward("agent", name, value, self._recorder.num_turns - 1))

    async def interact(self) -> InteractionReply:
        """Let the row's partner answer; unless it is done, the answer waits for the next `generate`.

        Raises:
            PluginError: the row has no interaction_kwargs, or the model has not said anything yet.
            ToolError: the partner broke or took too long.
        """
        self._refuse_if_ended()
        if self._partner is None:
            raise PluginError(f"task {self._attempt.task.task_id}: the agent interacts, but the row has no interaction_kwargs")
        if not self._recorder.num_turns:
            raise PluginError("the agent interacts before its first `generate`: there is nothing to answer")
        with self._timed("interaction_s"):
            reply = await self._partner.respond(self.messages)
        if reply.reward is not None:
            self.turn_rewards.append(GivenReward("interaction", self._partner.name, reply.reward, self._recorder.num_turns - 1))
        if not reply.is_done:
            self._conversation.add_messages([Message("user", reply.text)])
        return reply

    def stop_at_turn_limit(self) -> None:
        """Record that the model wanted another turn than `limits.turns` allows."""
        self._ended = self._ended or Outcome.TURN_LIMIT

    # ---------------------------------------------------------------------------------------- for whoever plays it

    @property
    def outcome(self) -> Outcome:
        """Why the attempt stopped, if it stopped by its own means."""
        return self._ended or (Outcome.TRUNCATED if self._is_cut else Outcome.COMPLETED)

    @property
    def num_action_tokens(self) -> int:
        return self._recorder.num_action_tokens

    def trajectory(self, outcome: Outcome, failure: str | None) -> Trajectory:
        """Return what happened so far, without rewards."""
        counts = ("num_tool_calls", "num_tool_errors", "num_interruptions", "generate_s", "tool_s", "interaction_s")
        num_rows = self._recorder.num_rows
        metrics = {"num_turns": float(self._recorder.num_turns), "num_forks": float(max(num_rows - 1, 0))} | dict.fromkeys(counts, 0.0)
        return self._recorder.trajectory(
            self._attempt,
            messages=self._conversation.messages[: self._num_shown_messages],
            outcome=outcome,
            failure=failure,
            metrics=metrics | self._metrics | self._toolbox.metrics,
        )

    async def close(self) -> None:
        """Close what tools and the partner hold; runs to its end also when cancelled."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._toolbox.close)
                if self._partner is not None:
                    nursery.start_soon(self._partner.close)

    # -------------------------------------------------------------------------------------------------- inside

    def _prepare_first_prompt(self) -> None:
        if self._num_prompt_tokens:
            return
        limit, overlong = self._prompt.max_tokens, self._prompt.overlong
        if overlong == "truncate_left":
            self._conversation.truncate_prompt(limit, "left")
        elif overlong == "truncate_right":
            self._conversation.truncate_prompt(limit, "right")
        elif overlong == "truncate_middle":
            self._conversation.truncate_prompt(limit, "middle")
        self._num_prompt_tokens = self._conversation.num_pending_tokens()
        if self._num_prompt_tokens > limit:
            raise DataError(
                f"task {self._attempt.task.task_id}: the prompt has {self._num_prompt_tokens} tokens, data.max_prompt_tokens is {limit}"
            )

    def _room_for_turn(self) -> int:
        """Return how many tokens the next turn may have, counting the block of context before it.

        Each row has the budget for itself, for a fork repeats its context; what is sampled in all rows together has it as well.
        """
        total = self._conversation.num_next_tokens()
        room = self._num_prompt_tokens + self._agent.max_response_tokens - total
        room = min(room, self._agent.max_response_tokens - self._recorder.num_action_tokens)
        if self._generator.context_tokens is not None:
            room = min(room, self._generator.context_tokens - total)
        return room if self._agent.max_turn_tokens is None else min(room, self._agent.max_turn_tokens)

    def _params(self, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            min_p=self._sampling.min_p,
            stop_token_ids=self._chat.eos_token_ids,
        )

    def _record(self, generation: Generation) -> Turn:
        self._is_cut = generation.finish_reason == "length"
        message = self._conversation.add_generation(generation.token_ids.tolist(), is_truncated=self._is_cut)
        turn = Turn(self._row.append_generation(generation), message, self._is_cut)
        self._num_shown_messages = len(self._conversation.messages)
        self._metrics["num_interruptions"] += generation.num_interruptions
        return turn

    def _end(self, outcome: Outcome) -> TrajectoryEnd:
        self._ended = outcome
        return TrajectoryEnd(outcome)

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise TrajectoryEnd(self._ended)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = trio.current_time()
        try:
            yield
        finally:
            self._metrics[name] += trio.current_time() - started
