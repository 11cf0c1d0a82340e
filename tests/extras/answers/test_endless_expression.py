"""An answer that never ends is wrong, and no failure."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import trio

from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import RewardConfig
from agentrl.plugins import (
    BatchReward,
    GroupReward,
    Plugins,
    Reward,
    RewardResult,
    TurnReward,
    load_plugins,
)
from agentrl.rewards.select import RewardTable
from agentrl.rollout.scoring import Scorer
from agentrl.types import Lease, Outcome, Trajectory
from parts.rollout_stage import chat as chat
from parts.rollout_stage import stage as stage
from parts.trajectories import make_task


class Constant(Reward):
    """`config.value`; None: does not apply."""

    name: ClassVar[str] = "constant"
    runs_in = "inline"

    def score(self, attempt):
        value = self.config.get("value")
        return None if value is None else RewardResult(value, {"half": value / 2}, {"said": attempt.answer})


class PerTurn(TurnReward):
    """`config.values`, cut to the turns there are."""

    name: ClassVar[str] = "per_turn"
    runs_in = "inline"

    def score(self, attempt):
        return self.config["values"][: attempt.num_turns]


class Rank(GroupReward):
    """How many of the group are shorter: only a comparison can tell."""

    name: ClassVar[str] = "rank"

    def score(self, attempts):
        return [RewardResult(float(sum(len(o.answer) < len(a.answer) for o in attempts))) for a in attempts]


class Share(BatchReward):
    """The share of a batch that has the same answer."""

    name: ClassVar[str] = "share"

    def score(self, attempts):
        return [RewardResult(sum(o.answer == a.answer for o in attempts) / len(attempts)) for a in attempts]


class Broken(GroupReward):
    name: ClassVar[str] = "broken"

    def score(self, attempts):
        raise OSError("no comparison today")


PLUGINS = (Constant, PerTurn, Rank, Share, Broken)


@cache
def plugins_with_these() -> Plugins:
    """Once for all: looking for the installed ones takes 15 ms, and laws make thousands of scorers."""
    plugins = load_plugins()
    for plugin in PLUGINS:
        plugins.rewards.add(plugin)
    return plugins


def scorer_of(host=None, **config) -> Scorer:
    plugins = plugins_with_these()
    settings = RewardConfig(**{"sources": {"s": "constant"}, "solution_str": "messages", **config})
    return Scorer(settings, RewardTable(settings, plugins), host=host, max_response_tokens=100, chat=None)


def score(config, attempt: Trajectory, given=()) -> Trajectory:
    return trio.run(scorer_of(**config).score, make_task(), attempt, given)


def test_an_expression_that_never_ends_is_a_wrong_answer(stage):
    """The tower of nines has more digits than there are atoms: what fails because of the answer is no failure
    of the reward.
    """
    said = {"How?": r"\boxed{9^{9^{9^{9}}}}", "And 8*9?": r"\boxed{\frac{144}{2}}"}
    world = stage.World(
        lambda _, text: next(answer for question, answer in said.items() if question in text),
        reward={"timeout_s": 3.0},
    )

    async def main(manager):
        rows = [
            stage.task(question, truth="72", data_source="math", agent="single_turn_agent")
            for question in said
        ]
        return [t for row in rows for t in await manager.play([Lease(0, row, 1, 0)], EvalConfig())]

    endless, right = world.run(main, real_time=True)
    assert (endless.outcome, endless.reward, endless.failure) == (Outcome.COMPLETED, 0.0, None)
    assert (right.reward, right.metrics["accuracy"]) == (1.0, 1.0)
