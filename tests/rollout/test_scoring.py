"""From finished attempts to events: the laws of terms, weights and places, and the scopes through the real
manager.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import RewardConfig
from agentrl.errors import PluginError, RewardError, ToolError
from agentrl.plugins import (
    AgentLoop,
    Attempted,
    BatchReward,
    GroupReward,
    Plugins,
    Reward,
    RewardResult,
    TurnReward,
    load_plugins,
)
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.scoring import DETAILS, Scorer
from agentrl.rollout.session import GivenReward
from agentrl.types import NO_VERSION, Lease, Message, Outcome, Trajectory
from parts.trajectories import make_task, make_trajectory


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


def trajectory(*turns: int, tail: int = 1, answer: str = "a", **fields) -> Trajectory:
    """Two tokens of prompt; each turn has so many tokens and one of context behind it, the last one
    `tail`.
    """
    ids = [-1, -1]
    for turn, length in enumerate(turns):
        ids += [turn] * length + [-1] * (1 if turn < len(turns) - 1 else tail)
    messages = (Message("user", "q"), *(Message("assistant", answer) for _ in turns))
    return make_trajectory(ids, **{"messages": messages, **fields})


def score(config, attempt: Trajectory, given=()) -> Trajectory:
    return trio.run(scorer_of(**config).score, make_task(), attempt, given)


def sum_of(scored: Trajectory, name: str) -> float:
    return sum(event.value for event in scored.rewards if event.name == name)


# ------------------------------------------------------------------------------------------------------- laws

WEIGHTS = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])
VALUES = st.sampled_from([-1.0, 0.0, 0.125, 1.0, 5.0])


@given(
    own=VALUES,
    term=VALUES | st.none(),
    per_turn=st.lists(VALUES | st.none(), min_size=4, max_size=4),
    weights=st.tuples(WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS),
    turns=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    tail=st.integers(0, 2),
    given_values=st.lists(st.tuples(st.integers(0, 3), VALUES), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_terms_add_up_by_weight_and_lie_on_action_tokens(
    own, term, per_turn, weights, turns, tail, given_values
):
    """The sum of events is the weighted sum of what was said; `assignment` moves events and changes no
    sum.
    """
    attempt = trajectory(*turns, tail=tail)
    given_rewards = [
        GivenReward("tool", "t", value, turn) for turn, value in given_values if turn < len(turns)
    ]
    config = {
        "reward_config": {"constant": {"value": own}},
        "weight": weights[0],
        "terms": {
            "beside": {"reward": "constant", "weight": weights[1], "config": {"value": term}},
            "steps": {"reward": "per_turn", "weight": weights[2], "config": {"values": per_turn}},
        },
        "tool_reward_weight": weights[3],
    }
    said = [value for value in per_turn[: len(turns)] if value is not None]
    expected = {
        "constant": weights[0] * own,
        "beside": weights[1] * (term or 0.0),
        "steps": weights[2] * sum(said),
        "tool/t": weights[3] * sum(one.value for one in given_rewards),
    }
    by_turn, at_end = (
        score({**config, "assignment": assignment}, attempt, given_rewards)
        for assignment in ("turn", "outcome")
    )
    last = int(np.flatnonzero(attempt.action_mask)[-1])
    for scored in (by_turn, at_end):
        assert {name: pytest.approx(sum_of(scored, name)) for name in expected} == expected
        assert scored.reward == pytest.approx(sum(expected.values()))
        assert all(attempt.action_mask[event.position] for event in scored.rewards)
        assert scored.metrics["reward/constant"] == own, "metrics are told before the weight"
        assert scored.metrics["reward/constant/half"] == own / 2
        assert scored.metrics.get("reward/beside") == term
        assert scored.metrics.get("reward/beside/applied") == (0.0 if term is None else None)
        assert scored.metrics.get("reward/steps") == (sum(said) if said else None)
        assert scored.extra_info[DETAILS]["constant"] == {"said": "a"}
    assert {event.position for event in at_end.rewards} <= {last}
    ends_of_turns = [int(np.flatnonzero(attempt.turn_ids == turn)[-1]) for turn in range(len(turns))]
    placed = [event.position for event in by_turn.rewards if event.name == "steps"]
    weighted = [
        position
        for position, value in zip(ends_of_turns, per_turn, strict=False)
        if value is not None and weights[2]
    ]
    assert placed == weighted
    assert {event.position for event in by_turn.rewards if event.name in ("constant", "beside")} <= {last}


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_order_of_a_group_changes_nothing(lengths, data):
    members = [trajectory(1, answer="x" * length, member=member) for member, length in enumerate(lengths)]
    shuffled = data.draw(st.permutations(members))
    scorer = scorer_of(terms={"rank": {}}, reward_config={"constant": {"value": 1.0}})
    straight, mixed = (
        trio.run(scorer.score_group, make_task(), list(order)) for order in (members, shuffled)
    )
    rewards = {t.member: sum_of(t, "rank") for t in straight}
    assert rewards == {t.member: sum_of(t, "rank") for t in mixed}
    assert rewards == {
        member: sum(other < length for other in lengths) for member, length in enumerate(lengths)
    }


def test_terms_are_limited_to_their_sources():
    terms = {
        "mine": {"reward": "constant", "sources": ["s", "x/*"], "config": {"value": 1.0}},
        "other": {"reward": "constant", "sources": ["y"]},
    }
    table = RewardTable(RewardConfig(sources={"s": "rank", "x/1": "rank"}, terms=terms), _plugins())
    assert [term.name for term in table.terms(make_task())] == ["rank", "mine"]
    assert [term.name for term in table.terms(make_task(data_source="x/1"))] == ["rank", "mine"]
    assert [term.name for term in table.terms(make_task(), "trajectory")] == ["mine"]


def _plugins():
    plugins = load_plugins()
    for plugin in PLUGINS:
        plugins.rewards.add(plugin)
    return plugins


def test_what_nothing_scores_is_an_error_not_a_zero():
    with pytest.raises(
        RewardError, match="no reward applies to this attempt; each returned None: constant, beside"
    ):
        score({"terms": {"beside": {"reward": "constant"}}}, trajectory(2))
    scored = score({"terms": {"beside": {"reward": "constant", "config": {"value": 0.0}}}}, trajectory(2))
    assert [(event.name, event.value) for event in scored.rewards] == [("beside", 0.0)]
    reported = score({"reward_config": {"constant": {"value": 1.0}}, "weight": 0.0}, trajectory(2))
    assert (reported.rewards, reported.metrics["reward/constant"]) == ((), 1.0)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1.0], "one finite number or None for each of the 2 turns"),
        ([1.0, math.nan], "finite"),
        (None, "finite"),
        ("ab", "finite"),
    ],
)
def test_a_turn_reward_that_miscounts_is_an_error(values, told):
    class Miscounting(TurnReward):
        name: ClassVar[str] = "miscounting"
        runs_in = "inline"

        def score(self, attempt):
            return values

    plugins = _plugins()
    plugins.rewards.add(Miscounting)
    config = RewardConfig(sources={"s": "miscounting"})
    with pytest.raises(RewardError, match=told):
        trio.run(
            Scorer(config, RewardTable(config, plugins), host=None, max_response_tokens=9, chat=None).score,
            make_task(),
            trajectory(1, 1),
            (),
        )


def test_a_batch_is_scored_as_one():
    """Shares by hand: three of four say `a`."""
    members = [trajectory(1, answer=answer, group_id=group) for group, answer in enumerate("aaba")]
    scored = trio.run(scorer_of(terms={"share": {"weight": 2.0}}).score_batch, [make_task()] * 4, members)
    assert [t.reward for t in scored] == [1.5, 1.5, 0.5, 1.5]
    assert [t.metrics["reward/share"] for t in scored] == [0.75, 0.75, 0.25, 0.75]


def test_own_rewards_may_be_of_any_scope():
    """Until its scope is reached, an attempt has no reward and that is no error."""
    scorer = scorer_of(sources={"s": "share"})
    alone = trio.run(scorer.score, make_task(), trajectory(1), ())
    assert alone.rewards == ()
    (scored,) = trio.run(scorer.score_batch, [make_task()], [alone])
    assert [(event.name, event.value) for event in scored.rewards] == [("share", 1.0)]


def test_the_response_is_as_long_as_its_longest_row():
    """Prompt 2, first row 2 + 3 + 1 tokens; the fork shows 5 tokens of context and adds 4."""
    first = trajectory(3)
    turn_ids = np.concatenate([first.turn_ids, np.array([-1] * 5 + [1] * 4, np.int16)])
    length = len(turn_ids)
    forked = first.replace(
        token_ids=np.zeros(length, np.int32),
        action_mask=turn_ids >= 0,
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.where(turn_ids >= 0, 0, NO_VERSION).astype(np.int32),
        turn_ids=turn_ids,
        segment_starts=(0, 6),
    )
    seen: list[Attempted] = []

    class Look(Reward):
        name: ClassVar[str] = "constant"
        runs_in = "inline"

        def score(self, attempt):
            seen.append(attempt)
            return RewardResult(0.0)

    plugins = load_plugins()
    plugins.rewards.add(Look)
    config = RewardConfig(sources={"s": "constant"})
    trio.run(
        Scorer(config, RewardTable(config, plugins), host=None, max_response_tokens=9, chat=None).score,
        make_task(),
        forked,
        (),
    )
    (attempt,) = seen
    assert (
        attempt.num_response_tokens,
        attempt.num_action_tokens,
        attempt.num_turns,
        attempt.max_response_tokens,
    ) == (7, 7, 2, 9)


def test_rewards_of_groups_see_the_limit_of_tokens_and_no_environment_that_is_closed():
    seen: list[Attempted] = []

    class Look(GroupReward):
        name: ClassVar[str] = "look"
        runs_in = "inline"

        def score(self, attempts):
            seen.extend(attempts)
            return [RewardResult(0.0) for _ in attempts]

    plugins = load_plugins()
    plugins.rewards.add(Look)
    config = RewardConfig(sources={"s": "look"})
    scorer = Scorer(config, RewardTable(config, plugins), host=None, max_response_tokens=9, chat=None)
    for task in (make_task(), make_task(environment_kwargs={})):
        trio.run(scorer.score_group, task, [trajectory(1), trajectory(2)])
    assert [attempt.max_response_tokens for attempt in seen] == [9] * 4
    assert [attempt.num_action_tokens for attempt in seen] == [1, 2] * 2
    assert [attempt.environment for attempt in seen[:2]] == [None, None]
    for attempt in seen[2:]:
        with pytest.raises(PluginError, match="closed"):
            attempt.environment.anything  # noqa: B018  (reading it raises)


# ------------------------------------------------------------------------------------------- the real manager


class Book:
    """Leases once; writes down what comes."""

    def __init__(self, leases) -> None:
        self.leases, self.added, self.dropped, self.num_left_out = list(leases), [], [], 0
        self.is_done = trio.Event()

    async def withdrawn(self):
        return []

    async def lease(self, limit):
        leases, self.leases = self.leases, []
        if not leases:
            await trio.sleep_forever()
        return leases

    async def add(self, trajectories):
        self.added += trajectories
        if len(self.added) == 4 - self.num_left_out:
            self.is_done.set()

    async def leave_out(self, group_id, member, reason):
        self.num_left_out += 1

    async def drop_group(self, group_id, reason):
        self.dropped.append((group_id, reason))
        self.is_done.set()


def run_group(world, stage, *, has_greedy: bool = False, agent: str = "tool_agent") -> Book:
    async def main(manager):
        book = Book([Lease(0, stage.task(agent=agent), 4 - has_greedy, 0, has_greedy)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.run, book, book)
            await book.is_done.wait()
            nursery.cancel_scope.cancel()
        book.report = manager.attempts.since(0)
        return book

    return world.run(main)


def lengths():
    """A model that says one more `x` at each call."""
    calls = iter(range(100))
    return lambda *_: "x" * next(calls)


@pytest.mark.parametrize("has_greedy", [False, True])
def test_a_group_is_compared_when_all_its_members_are_there(stage, has_greedy):
    world = stage.World(lengths(), plugins=PLUGINS, rollout={"group_size": 4}, reward={"terms": {"rank": {}}})
    book = run_group(world, stage, has_greedy=has_greedy)
    assert [t.is_greedy for t in book.added] == [False, False, False, has_greedy]
    ranks = {len(t.messages[-1].content): sum_of(t, "rank") for t in book.added}
    assert ranks == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert [t.member for t in book.added] == [0, 1, 2, 3]
    assert {event.name for t in book.added for event in t.rewards} == {"number", "rank"}


@pytest.mark.parametrize("policy", ["shrink", "mask"])
def test_those_that_are_left_of_a_group_are_compared(stage, policy):
    """The attempt that says `x` fails: the others are ranked among themselves."""

    class Fragile(AgentLoop):
        name: ClassVar[str] = "fragile"

        async def run(self, task, session) -> None:
            turn = await session.generate()
            if turn.message.content == "x":
                raise ToolError("broken")

    rollout = {"group_size": 4, "on_outcome": {"tool_error": policy}}
    world = stage.World(
        lengths(), plugins=(*PLUGINS, Fragile), rollout=rollout, reward={"terms": {"rank": {}}}
    )
    book = run_group(world, stage, agent="fragile")
    scored = [t for t in book.added if t.outcome is Outcome.COMPLETED]
    assert {len(t.messages[-1].content): sum_of(t, "rank") for t in scored} == {0: 0.0, 2: 1.0, 3: 2.0}
    assert [t.rewards for t in book.added if t not in scored] == ([()] if policy == "mask" else [])


@pytest.mark.parametrize("policy", ["drop", "retry", "replace", "shrink", "mask"])
def test_a_group_that_cannot_be_compared_is_dropped(stage, policy):
    rollout = {
        "group_size": 4,
        "on_outcome": {**stage.World(lengths()).rollout.on_outcome, Outcome.REWARD_ERROR: policy},
    }
    world = stage.World(lengths(), plugins=PLUGINS, rollout=rollout, reward={"terms": {"broken": {}}})
    book = run_group(world, stage)
    assert (book.added, book.dropped) == ([], [(0, "reward_error")])
    report = book.report
    tries = {"retry": 1 + world.rollout.max_retries, "replace": 1 + world.rollout.max_replacements}.get(
        policy, 1
    )
    assert report.counts.outcomes == {Outcome.REWARD_ERROR: 4 * tries}
    assert Counter(f.became for f in report.failed)["dropped"] == 4
    assert {(f.failure.plugin.name, f.failure.error) for f in report.failed} == {("broken", "OSError")}


def test_validation_compares_what_can_be_scored(stage):
    world = stage.World(lengths(), plugins=PLUGINS, reward={"terms": {"rank": {}}})
    trajectories = world.play(stage.task(), stage.task(), n=2)
    assert sorted(sum_of(t, "rank") for t in trajectories[:2]) == [0.0, 1.0]
    assert sorted(sum_of(t, "rank") for t in trajectories[2:]) == [0.0, 1.0]
    world = stage.World(lengths(), plugins=PLUGINS, reward={"terms": {"broken": {}}})
    failed = world.play(stage.task(), n=2)
    assert all(
        t.outcome is Outcome.REWARD_ERROR and not t.rewards and "no comparison today" in str(t.failure)
        for t in failed
    )


# ----------------------------------------------------------------------------------------- in another process

WORKERS = '''
import os, time
from agentrl.plugins import Reward, RewardResult

class Moody(Reward):
    """Does what the ground truth says."""
    name = "moody"
    runs_in = "process"

    def score(self, attempt):
        print("a print is no reply")
        truth = attempt.task.ground_truth
        if truth == "exit":
            os._exit(7)
        if truth == "hang":
            while True:
                pass
        if truth == "raise":
            raise OSError("grader is down")
        if truth == "unpicklable":
            return lambda: None
        return RewardResult(self.config.get("value", 1.0), {"pid": os.getpid()})
'''


MINE = """
import os

def compute_score(solution_str, ground_truth, bonus, **_):
    return {"score": bonus, "pid": os.getpid(), "pred": solution_str}
"""


def moody_world(stage, tmp_path, **reward):
    file = tmp_path / "moody.py"
    file.write_text(WORKERS)
    world = stage.World(lambda *_: "hm", reward={"sources": {"sums": "moody"}, "timeout_s": 2.0, **reward})
    world.plugins = load_plugins([str(file)])
    return world


def test_a_process_that_fails_is_a_reward_error_and_the_next_goes_on(stage, tmp_path):
    world = moody_world(stage, tmp_path, reward_config={"moody": {"value": 0.25}})
    truths = ["ok", "ok", "raise", "ok", "exit", "ok", "unpicklable", "hang", "ok"]
    pids = []

    async def main(manager):
        played = []
        for truth in truths:  # one after the other: they share one process, until it dies
            played += await manager.play([Lease(0, stage.task(truth=truth), 1, 0)], EvalConfig())
        return played

    played = world.run(main, real_time=True)
    for truth, trajectory in zip(truths, played, strict=True):
        if truth == "ok":
            assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.25)
            pids.append(trajectory.metrics["reward/moody/pid"])
        else:
            assert (trajectory.outcome, trajectory.rewards) == (Outcome.REWARD_ERROR, ())
    failures = [t.failure for t in played if t.failure]
    for failure, told in zip(
        failures, ("grader is down", "status 7", "pickle", "timed out after 2 s"), strict=True
    ):
        assert told in str(failure)
    assert pids[0] == pids[1] == pids[2], "an error in Python leaves the process alone"
    assert pids[3] != pids[2], "a dead one is replaced"
    assert pids[4] != pids[3], "one that hung was killed and replaced"
    assert not any(_is_alive(int(pid)) for pid in pids), "all of them are gone when the manager is closed"


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_work_side_by_side_up_to_their_number(stage, tmp_path):
    world = moody_world(stage, tmp_path, num_processes=2, timeout_s=30.0)
    played = world.play(*[stage.task() for _ in range(6)], real_time=True)
    assert all(t.reward == 1.0 for t in played)
    assert len({t.metrics["reward/moody/pid"] for t in played}) <= 2


def test_a_function_of_the_users_may_run_in_a_process(stage, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    custom = {"path": str(file), "kwargs": {"bonus": 0.5}, "runs_in": "process"}
    world = stage.World(lambda *_: "hm", reward={"custom_function": custom, "timeout_s": 60.0})
    (trajectory,) = world.play(stage.task(), real_time=True)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.5)
    assert trajectory.metrics["reward/custom/pid"] != os.getpid()
    assert trajectory.extra_info[DETAILS] == {"custom": {"pred": "hm"}}


# ----------------------------------------------------------------------------------------------------- places


class Queued(Reward):
    """Async under trio; notes how many are at work at once."""

    name: ClassVar[str] = "queued"
    runs_in = "trio"
    max_concurrent = 2
    at_work: ClassVar[int] = 0
    most: ClassVar[int] = 0

    async def score(self, attempt):
        Queued.at_work += 1
        Queued.most = max(Queued.most, Queued.at_work)
        await trio.sleep(1.0)
        Queued.at_work -= 1
        return RewardResult(1.0)


def test_waiting_for_a_place_is_not_the_rewards_fault(stage):
    """Eight attempts, two at a time, a second each, and a deadline of a second and a half."""
    Queued.most = 0
    world = stage.World(
        lambda *_: "hm", plugins=[Queued], reward={"sources": {"sums": "queued"}, "timeout_s": 1.5}
    )
    played = world.play(stage.task(), n=8)
    assert [t.reward for t in played] == [1.0] * 8
    assert Queued.most == 2


def test_a_reward_under_trio_has_its_deadline(stage):
    reward = {
        "sources": {"sums": "queued"},
        "timeout_s": 30.0,
        "terms": {"slow": {"reward": "queued", "timeout_s": 0.5}},
    }
    (trajectory,) = stage.World(lambda *_: "hm", plugins=[Queued], reward=reward).play(stage.task())
    assert trajectory.outcome is Outcome.REWARD_ERROR
    assert "reward 'slow': timed out after 0.5 s" in str(trajectory.failure)


def test_an_async_function_scores_a_batch(tmp_path):
    file = tmp_path / "batch.py"
    body = (
        "async def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    best = max(map(len, solution_strs))\n"
        "    return [{'score': len(s) / best, 'source': d, 'acc': True} for s, d in zip(solution_strs, "
        "data_sources)]\n"
    )
    file.write_text(body)

    async def main():
        with AsyncioHost() as host:
            scorer = scorer_of(host, custom_function={"path": str(file), "scope": "batch"})
            assert (await scorer.score(make_task(), trajectory(1), ())).rewards == ()
            return await scorer.score_batch(
                [make_task()] * 2, [trajectory(1, answer="ab"), trajectory(1, answer="abcd")]
            )

    scored = trio.run(main)
    assert [t.reward for t in scored] == [0.5, 1.0]
    assert [t.metrics["accuracy"] for t in scored] == [1.0, 1.0]
    assert [t.extra_info[DETAILS] for t in scored] == [{"custom": {"source": "s"}}] * 2
