"""From a finished attempt to its rewards: outside of the event loop, with a deadline, and never a zero for a crash."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

import trio

from agentrl.config.schema import RewardConfig
from agentrl.errors import RewardError
from agentrl.plugins import AnyReward, Attempted, RewardResult
from agentrl.rewards.select import CustomFunction, RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.recorder import reward_event
from agentrl.rollout.session import GivenReward
from agentrl.types import RewardEvent, Task, Trajectory

NUM_THREADS = 8
MAX_WAIT_FACTOR = 20
"""Bound of the wait for a free thread, in deadlines: reached only when every thread hangs in a reward that never returns."""


class Scorer:
    """Adds rewards and their metrics to trajectories."""

    def __init__(self, config: RewardConfig, table: RewardTable, *, host: AsyncioHost) -> None:
        self._config = config
        self._table = table
        self._host = host
        self._threads = trio.CapacityLimiter(NUM_THREADS)

    async def score(self, task: Task, trajectory: Trajectory, turn_rewards: Sequence[GivenReward]) -> Trajectory:
        """Return the trajectory with its reward on the last action token and turn rewards on the last token of their turn.

        Turn rewards with weight 0 are only reported.

        Raises:
            RewardError: the reward raised, returned no finite number, or took longer than `reward.timeout_s`.
        """
        started = trio.current_time()
        reward = self._table.select(task)
        result = await self._result(reward, attempted(task, trajectory))
        events, sums = self._turn_events(trajectory, turn_rewards)
        events.append(reward_event(trajectory, reward.name, result.value))
        metrics = dict(trajectory.metrics) | sums | {f"reward/{name}": float(value) for name, value in result.metrics.items()}
        if "accuracy" in result.metrics:
            metrics["accuracy"] = float(result.metrics["accuracy"])
        metrics["reward_s"] = trio.current_time() - started
        return dataclasses.replace(trajectory, rewards=tuple(events), metrics=metrics)

    def _turn_events(self, trajectory: Trajectory, turn_rewards: Sequence[GivenReward]) -> tuple[list[RewardEvent], dict[str, float]]:
        weights = {"tool": self._config.tool_reward_weight, "interaction": self._config.interaction_reward_weight, "agent": 1.0}
        events: list[RewardEvent] = []
        sums: dict[str, float] = defaultdict(float)
        for given in turn_rewards:
            sums[f"reward/{given.source}"] += given.value
            if weights[given.source] != 0.0:
                value = weights[given.source] * given.value
                events.append(reward_event(trajectory, f"{given.source}/{given.name}", value, turn=given.turn))
        return events, sums

    async def _result(self, reward: AnyReward, attempt: Attempted) -> RewardResult:
        with trio.CancelScope() as deadline:
            try:
                if isinstance(reward, CustomFunction) and reward.is_async:
                    deadline.deadline = trio.current_time() + self._config.timeout_s
                    result = await self._host.run(reward.score_async, attempt)
                else:
                    result = await self._in_thread(reward, attempt, deadline)
            except RewardError:
                raise
            except Exception as error:
                raise RewardError(f"reward {reward.name!r} raised {type(error).__name__}: {error}") from error
            if not (isinstance(result, RewardResult) and math.isfinite(result.value)):
                raise RewardError(f"reward {reward.name!r} returned {str(result)[:120]!r}; return a RewardResult with a finite value")
            return result
        raise RewardError(f"reward {reward.name!r} timed out after {self._config.timeout_s:g} s")

    async def _in_thread(self, reward: AnyReward, attempt: Attempted, deadline: trio.CancelScope) -> RewardResult:
        def begin() -> None:
            deadline.deadline = trio.current_time() + self._config.timeout_s

        def work() -> RewardResult:
            trio.from_thread.run_sync(begin)  # the time in line for a thread is not the reward's fault
            return reward.score(attempt)  # type: ignore[attr-defined]

        deadline.deadline = trio.current_time() + MAX_WAIT_FACTOR * self._config.timeout_s
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)


def attempted(task: Task, trajectory: Trajectory, *, max_response_tokens: int = 0) -> Attempted:
    """Return what rewards see of a trajectory."""
    actions = trajectory.action_mask.nonzero()[0]
    return Attempted(
        task=task,
        messages=trajectory.messages,
        outcome=trajectory.outcome,
        num_turns=int(trajectory.turn_ids.max(initial=-1)) + 1,
        num_response_tokens=trajectory.num_tokens - int(actions[0]) if len(actions) else 0,
        num_action_tokens=len(actions),
        max_response_tokens=max_response_tokens,
    )
