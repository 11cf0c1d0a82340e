"""Validation on the rollout actors: it ends at its deadline, training goes on beside it, it may have rewards
and tools of its own.
"""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import trio

from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.schema import Config
from agentrl.figures.trajectory_metrics import is_correct, summarise_trajectories
from agentrl.plugins import AgentLoop, Attempted, GroupReward, Reward, RewardResult
from agentrl.rollout.player_stack import Validating
from agentrl.rollout.worker import RolloutSettings
from agentrl.types import Failure, Lease, Outcome

SAMPLING = EvalConfig(temperature=1.0)


class Slow(AgentLoop):
    """Takes as many seconds as its row says, and writes down when each attempt of which row ended."""

    name: ClassVar[str] = "slow"
    ended: ClassVar[list[str]] = []

    async def run(self, task, session) -> None:
        await session.generate()
        await trio.sleep(task.extra_info.get("seconds", 1.0))
        self.ended.append(task.task_id)


class Plain(Reward):
    """Says 1.0 and reports no accuracy."""

    name: ClassVar[str] = "plain"
    runs_in = "inline"

    def score(self, attempt: Attempted) -> RewardResult:
        return RewardResult(1.0)


class Penalty(Reward):
    name: ClassVar[str] = "penalty"
    runs_in = "inline"

    def score(self, attempt: Attempted) -> RewardResult:
        return RewardResult(-2.0)


class Best(GroupReward):
    """Compares the members of a group."""

    name: ClassVar[str] = "best"
    runs_in = "inline"

    def score(self, attempts) -> list[RewardResult]:
        return [
            RewardResult(float(place == 0), {"accuracy": float(place == 0)})
            for place, _ in enumerate(attempts)
        ]


@pytest.mark.parametrize("reward", ["number", "best"])
def test_what_has_not_ended_at_the_deadline_is_returned_as_timed_out(stage, reward):
    world = stage.World(lambda *_: "#### 42", plugins=[Slow, Best], reward={"sources": {"sums": reward}})
    seconds = [1.0, math.inf, 2.0, 50.0]
    tasks = [
        stage.task(agent="slow", task_id=f"t:{i}", extra_info={"seconds": s}) for i, s in enumerate(seconds)
    ]

    async def main(manager):
        trajectories = await manager.play(world.leases(tasks, 2), SAMPLING, timeout_s=10.0)
        return trajectories, trio.current_time(), manager.stats()

    started = 0.0
    trajectories, ended, stats = world.run(main)
    assert ended - started < 1e6  # the clock of trio begins anywhere; the hanging row would end it never
    assert [(t.task_id, t.member) for t in trajectories] == [
        (f"t:{i}", member) for i in range(4) for member in range(2)
    ]
    assert [t.outcome for t in trajectories] == [*[Outcome.COMPLETED] * 2, *[Outcome.TIMEOUT] * 2] * 2
    assert {t.failure for t in trajectories} == {
        None,
        Failure("the validation ended after eval.timeout_s=10, before this attempt did"),
    }
    assert all(t.rewards for t in trajectories if t.outcome is Outcome.COMPLETED)
    facts = summarise_trajectories(trajectories, lags=None, prefix="val/")
    assert (facts["val/trajectories"], facts["val/failed"]) == (8, 4)
    assert stats["in_flight"] == 0, "nothing is played on behind the deadline"


class Rows:
    """Leases its tasks, one attempt each, and notes when all of them are there."""

    def __init__(self, tasks) -> None:
        self.waiting = [Lease(1000 + index, task, 1, 0) for index, task in enumerate(tasks)]
        self.missing = len(self.waiting)
        self.all_there = trio.Event()

    async def withdrawn(self):
        return []

    async def lease(self, limit: int):
        if not self.waiting:
            await trio.sleep_forever()
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return taken

    async def add(self, trajectories) -> None:
        self.missing -= len(trajectories)
        if not self.missing:
            self.all_there.set()

    async def drop_group(self, group_id: int, reason: str) -> None:
        raise AssertionError(reason)

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        raise AssertionError(reason)


def test_training_goes_on_beside_a_validation_of_any_size(stage):
    """An attempt of training waits for no more attempts of validation than there are slots, not for the whole
    of it.
    """
    slots, num_training, num_validation = 4, 12, 200
    world = stage.World(lambda *_: "#### 42", plugins=[Slow], rollout={"max_concurrent_trajectories": slots})
    training = Rows([stage.task(agent="slow", task_id=f"train:{i}") for i in range(num_training)])
    rows = world.leases([stage.task(agent="slow", task_id=f"val:{i}") for i in range(num_validation)], 1)
    Slow.ended.clear()

    async def main(manager) -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.play, rows, SAMPLING)
            await trio.sleep(1.5)  # validation has all the slots, and all its other attempts wait
            nursery.start_soon(manager.run, training, training)
            await training.all_there.wait()
            nursery.cancel_scope.cancel()
        return sum(task_id.startswith("val:") for task_id in Slow.ended)

    before_training, in_turn = slots * 2, num_training
    assert world.run(main) <= before_training + in_turn + slots


def test_validation_alone_uses_all_slots(stage):
    world = stage.World(lambda *_: "#### 42", plugins=[Slow], rollout={"max_concurrent_trajectories": 4})
    tasks = [stage.task(agent="slow") for _ in range(16)]

    async def main(manager) -> float:
        started = trio.current_time()
        await manager.play(world.leases(tasks, 1), SAMPLING)
        return trio.current_time() - started

    assert world.run(main) < 4 + 1


def test_validation_has_rewards_and_tools_of_its_own(stage):
    own = Validating(tools=(), reward=RewardConfig(timeout_s=math.inf, sources={"sums": "evenness"}))
    world = stage.World(lambda *_: "#### 42", validation=own)
    rows = Rows([stage.task()])
    kept: list = []

    async def main(manager):
        async with trio.open_nursery() as nursery:
            rows.add = lambda trajectories: _keep(kept, trajectories, nursery)
            nursery.start_soon(manager.run, rows, rows)
        return await manager.play(world.leases([stage.task()], 1), SAMPLING)

    (validated,) = world.run(main)
    (trained,) = kept
    assert "reward/number" in trained.metrics
    assert "reward/evenness" not in trained.metrics
    assert "reward/evenness" in validated.metrics
    assert "reward/number" not in validated.metrics
    assert "calculator" in world.chat.decode(trained.token_ids.tolist())
    assert "calculator" not in world.chat.decode(validated.token_ids.tolist())


async def _keep(kept: list, trajectories, nursery: trio.Nursery) -> None:
    kept += trajectories
    nursery.cancel_scope.cancel()


def test_accuracy_is_of_the_own_reward_whatever_terms_take_from_the_sum(stage):
    reward = {"sources": {"sums": "plain"}, "terms": {"penalty": {"weight": 1.0}}}
    world = stage.World(lambda *_: "#### 42", plugins=[Plain, Penalty], reward=reward)
    (trajectory,) = world.play(stage.task())
    assert trajectory.reward == -1.0
    assert is_correct(trajectory) == 1.0
    assert summarise_trajectories([trajectory], lags=None, prefix="val/")["val/accuracy"] == 1.0


def test_the_config_says_what_validation_does_otherwise():
    assert RolloutSettings.of(Config()).validation is None
    config = Config.model_validate(
        {
            "agent": {"tools": ["calculator"]},
            "reward": {"sources": {"mine": "gsm8k"}, "custom_function": {"path": "reward.py"}},
            "eval": {"rewards": {"*/MATH*": "gsm8k"}, "tools": []},
        }
    )
    own = RolloutSettings.of(config).validation
    assert own is not None
    assert own.tools == ()
    assert own.reward.custom_function.path is None
    assert own.reward.sources["mine"] == "gsm8k"
    assert "lighteval/MATH" not in own.reward.sources, "an entry of eval.rewards goes before what it matches"
    assert own.reward.sources["*/MATH*"] == "gsm8k"
    assert own.reward.sources["aime*"] == "aime"
