"""Scores finished attempts: every reward becomes a named event on an action token. A crash never becomes a
reward of 0.

Metrics that scoring adds to a trajectory, for a reward or term `x`:
    reward/x             its value before weighting (a turn reward: the sum over turns)
    reward/x/<metric>    the metrics that it reported
    reward/x/applied     0 if it did not apply (a turn reward: to no turn); absent otherwise
    reward/tool, reward/interaction, reward/agent    sums of rewards given during the attempt, unweighted
    accuracy             the accuracy reported by the row's own reward; without one, 1 if the own value is
                         positive, else 0, regardless of other terms
    reward_s             seconds spent on scoring
and of an attempt with several conversations, for each name `c` in which the policy spoke:
    conversation/c/reward, conversation/c/num_turns, conversation/c/num_action_tokens
Details (values of a reward that are not numbers) are stored in `extra_info["reward_details"][x]`.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from agentrl.chat.chat import Chat
from agentrl.config.reward import RewardConfig
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import RewardError
from agentrl.plugins import Attempted, Environment, RewardResult, Unreachable
from agentrl.plugins.rewards import Scope
from agentrl.rewards.calls import AsyncHost, Result, RewardCalls, Term
from agentrl.rewards.select import RewardTable
from agentrl.rollout.decoded_response import decoded_response
from agentrl.rollout.environment import ENVIRONMENT_FACTS
from agentrl.rollout.recorder import conversation_of_turn, last_turn_of, reward_event
from agentrl.rollout.tally import GivenReward
from agentrl.types import MAIN_CONVERSATION, ConversationRecord, RewardEvent, Task, Trajectory

DETAILS = "reward_details"


class Scorer:
    """Adds rewards and their metrics to trajectories.

    Use it within one trio run. `aclose` stops its processes.
    """

    def __init__(
        self,
        config: RewardConfig,
        table: RewardTable,
        *,
        host: AsyncHost,
        max_response_tokens: int,
        chat: Chat | None,
    ) -> None:
        """`chat` decodes the tokens of attempts; None: no reward reads their text."""
        assert chat is not None or not table.reads_solution_str, "a reward reads the decoded response"
        self._chat = chat if table.reads_solution_str else None
        self._config = config
        self._table = table
        self._calls = RewardCalls(host, num_processes=config.num_processes)
        self._max_response_tokens = max_response_tokens

    async def score(
        self,
        task: Task,
        trajectory: Trajectory,
        turn_rewards: Sequence[GivenReward],
        *,
        environment: Environment | None = None,
    ) -> Trajectory:
        """Return the trajectory with its trajectory and turn rewards, and the rewards given during the
        attempt. `environment`: the attempt's, still open.

        Raises:
            RewardError: a reward raised, returned something other than finite numbers, or timed out; or no
                reward applies.
        """
        started = trio.current_time()
        own, terms = self._table.own(task), self._table.terms(task, "trajectory", "turn")
        attempt = self._attempted(task, trajectory, environment=environment)
        results = await self._calls.call_all([(term, attempt) for term in terms])
        note = _Note(trajectory, at_end=self._config.assignment == "outcome")
        note.add_given(
            turn_rewards,
            tool_weight=self._config.tool_reward_weight,
            interaction_weight=self._config.interaction_reward_weight,
        )
        for term, result in zip(terms, results, strict=True):
            note.add(term, result, is_own=term is own)
        return self._finished(
            task, note.trajectory(seconds=trio.current_time() - started), pending=("group", "batch")
        )

    def has_group_rewards(self, task: Task) -> bool:
        """Return whether the task has group rewards, so that members must wait for each other."""
        return self._table.may_score("group") and bool(self._table.terms(task, "group"))

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories of one group with their group rewards added.

        Raises:
            RewardError: see `score`.
        """
        return await self._score_together(
            [task] * len(trajectories), trajectories, "group", pending=("batch",)
        )

    async def score_batch(
        self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """Return the trajectories of a batch with their batch rewards added. `tasks` holds one task per
        trajectory.

        Raises:
            RewardError: see `score`.
        """
        return await self._score_together(tasks, trajectories, "batch", pending=())

    async def aclose(self) -> None:
        """Stop the processes in which rewards run."""
        await self._calls.aclose()

    async def _score_together(
        self,
        tasks: Sequence[Task],
        trajectories: Sequence[Trajectory],
        scope: Scope,
        *,
        pending: tuple[Scope, ...],
    ) -> list[Trajectory]:
        started = trio.current_time()
        rows: defaultdict[Term, list[int]] = defaultdict(list)
        for row, task in enumerate(tasks):
            for term in self._table.terms(task, scope):
                rows[term].append(row)
        attempts = [
            self._attempted(task, t, environment=_closed(task))
            for task, t in zip(tasks, trajectories, strict=True)
        ]
        answers = await self._calls.call_all(
            [(term, [attempts[row] for row in scored]) for term, scored in rows.items()]
        )
        seconds = (trio.current_time() - started) / max(1, len(trajectories))
        notes = [_Note(trajectory) for trajectory in trajectories]
        for (term, scored), results in zip(rows.items(), answers, strict=True):
            assert isinstance(results, Sequence), "checked by the call"
            for row, result in zip(scored, results, strict=True):
                assert result is None or isinstance(result, RewardResult), "checked by the call"
                notes[row].add(term, result, is_own=term is self._table.own(tasks[row]))
        return [
            self._finished(task, note.trajectory(seconds=seconds), pending=pending)
            for task, note in zip(tasks, notes, strict=True)
        ]

    def _attempted(
        self, task: Task, trajectory: Trajectory, *, environment: Environment | Unreachable | None
    ) -> Attempted:
        return attempted(
            task,
            trajectory,
            max_response_tokens=self._max_response_tokens,
            environment=environment,
            chat=self._chat,
        )

    def _finished(self, task: Task, trajectory: Trajectory, *, pending: tuple[Scope, ...]) -> Trajectory:
        """Raise RewardError if no reward applied and none is pending: the sum of no rewards would look like a
        reward of 0.
        """
        if trajectory.rewards:
            return trajectory
        terms = self._table.terms(task)
        if any(term.scope in pending or f"reward/{term.name}" in trajectory.metrics for term in terms):
            return trajectory
        raise RewardError(
            "no reward applies to this attempt; each returned None: " + ", ".join(term.name for term in terms)
        )


class _Note:
    """Collects the rewards of one trajectory.

    `at_end`: turn rewards are also placed on the last action token.
    """

    def __init__(self, trajectory: Trajectory, *, at_end: bool = False) -> None:
        self._trajectory = trajectory
        self._at_end = at_end
        self._events: list[RewardEvent] = list(trajectory.rewards)
        self._metrics: dict[str, float] = dict(trajectory.metrics)
        self._details: dict[str, Mapping[str, Any]] = {}

    def add_given(
        self, given: Sequence[GivenReward], *, tool_weight: float, interaction_weight: float
    ) -> None:
        """Add the rewards of tools, the partner and the agent loop. A reward of weight 0 is only reported."""
        weights = {"tool": tool_weight, "interaction": interaction_weight, "agent": 1.0}
        for one in given:
            self._metrics[f"reward/{one.source}"] = self._metrics.get(f"reward/{one.source}", 0.0) + one.value
            self._place(f"{one.source}/{one.name}", weights[one.source], one.value, turn=one.turn)

    def add(self, term: Term, result: Result, *, is_own: bool) -> None:
        """Add the result of a term. None adds no event."""
        if isinstance(result, RewardResult):
            if result.by_conversation:
                self._place_in_conversations(term, result.by_conversation)
            else:
                self._place(term.name, term.weight, result.value)
            self._report(term, float(result.value), result.metrics, is_own=is_own)
            if result.details:  # serialize here, so that a failure counts as the reward's error
                self._details[term.name] = json.loads(
                    json.dumps(dict(result.details), default=str, skipkeys=True)
                )
            return
        values = {turn: float(value) for turn, value in enumerate(result or ()) if value is not None}  # type: ignore[arg-type]
        for turn, value in values.items():
            self._place(term.name, term.weight, value, turn=turn)
        if values:
            self._report(term, sum(values.values()), {}, is_own=is_own)
        else:
            self._metrics[f"reward/{term.name}/applied"] = 0.0

    def trajectory(self, *, seconds: float) -> Trajectory:
        """Return the trajectory with everything added."""
        self._metrics["reward_s"] = self._metrics.get("reward_s", 0.0) + seconds
        extra_info = self._trajectory.extra_info
        if self._details:
            extra_info = {**extra_info, DETAILS: {**extra_info.get(DETAILS, {}), **self._details}}
        scored = self._trajectory.replace(
            rewards=tuple(self._events), metrics=self._metrics, extra_info=extra_info
        )
        if not scored.conversations:
            return scored
        return scored.replace(metrics={**scored.metrics, **conversation_metrics(scored)})

    def _place_in_conversations(self, term: Term, values: Mapping[str, float]) -> None:
        """Place each value on the last turn of every conversation of its name.

        Raises:
            RewardError: a conversation does not exist, did not speak, or an opponent speaks in it.
        """
        conversations = self._trajectory.conversations or (ConversationRecord(MAIN_CONVERSATION, ()),)
        for name, value in values.items():
            known = [index for index, one in enumerate(conversations) if one.name == name]
            ends = [self._last_turn(index) for index in known]
            spoken = [turn for turn in ends if turn is not None]
            if not spoken:
                names = ", ".join(dict.fromkeys(one.name for one in conversations))
                opponent = next((conversations[index].opponent for index in known), None)
                raise RewardError(
                    f"reward {term.name!r} is given to conversation {name!r}, "
                    + (
                        f"which does not exist; conversations: {names}"
                        if not known
                        else f"in which opponent {opponent!r} speaks; only the policy's earn rewards"
                        if opponent is not None
                        else "which did not speak, so there is no token to reward; see `Attempted.spoke`"
                    )
                )
            for turn in spoken:
                self._place(term.name, term.weight, value, turn=turn)

    def _last_turn(self, conversation: int) -> int | None:
        if self._trajectory.conversations:
            return last_turn_of(self._trajectory, conversation)
        return int(self._trajectory.turn_ids.max())

    def _place(self, name: str, weight: float, value: float, *, turn: int | None = None) -> None:
        if weight != 0.0:
            self._events.append(
                reward_event(self._trajectory, name, weight * float(value), turn=self._turn_for(turn))
            )

    def _turn_for(self, turn: int | None) -> int | None:
        """Return the turn on which a reward of `turn` lies: with `at_end`, the last of its conversation."""
        if turn is None or not self._at_end:
            return turn
        if not self._trajectory.conversations:
            return None
        return last_turn_of(self._trajectory, conversation_of_turn(self._trajectory, turn))

    def _report(self, term: Term, value: float, metrics: Mapping[str, float], *, is_own: bool) -> None:
        self._metrics[f"reward/{term.name}"] = value
        self._metrics |= {f"reward/{term.name}/{name}": float(number) for name, number in metrics.items()}
        if is_own:
            self._metrics["accuracy"] = float(metrics.get("accuracy", value > 0))


def conversation_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Return what each conversation earned and said, by name."""
    found: dict[str, float] = {}
    for part in AttemptFacts.of(trajectory).parts():
        own = {
            "reward": part.attempt.reward,
            "num_turns": float(len(part.attempt.turns)),
            "num_action_tokens": float(part.attempt.num_action_tokens),
        }
        for name, value in own.items():
            key = f"conversation/{part.name}/{name}"
            found[key] = found.get(key, 0.0) + value
    return found


def _closed(task: Task) -> Unreachable | None:
    """Return what rewards of groups and batches get for an environment: it closed with its attempt."""
    why = "an environment is closed when rewards compare a group or a batch"
    return None if task.environment_kwargs is None else Unreachable(why)


def attempted(
    task: Task,
    trajectory: Trajectory,
    *,
    max_response_tokens: int,
    environment: Environment | Unreachable | None = None,
    chat: Chat | None = None,
) -> Attempted:
    """Return the view of a trajectory that rewards receive.

    `chat` decodes the response; None: nothing reads the decoded text.
    """
    attempt = Attempted(
        task=task,
        messages=trajectory.messages,
        outcome=trajectory.outcome,
        num_turns=int(trajectory.turn_ids.max(initial=-1)) + 1,
        num_response_tokens=trajectory.num_response_tokens,
        num_action_tokens=trajectory.num_action_tokens,
        max_response_tokens=max_response_tokens,
        environment=environment,
        facts=trajectory.extra_info.get(ENVIRONMENT_FACTS, {}),
        conversations=trajectory.conversations,
    )
    if chat is None:
        return attempt
    return dataclasses.replace(attempt, decoded=decoded_response(trajectory, attempt.response, chat))
