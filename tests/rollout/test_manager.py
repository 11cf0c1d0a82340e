"""Hundreds of attempts at once: every lease is settled, the failure of one never ends another, limits
hold.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.evaluation import EvalConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.errors import ServerError, ToolError
from agentrl.plugins import AgentLoop, Tool, ToolResult
from agentrl.rollout.player import unplayed
from agentrl.rollout.recorder import Attempt
from agentrl.types import SCORED_OUTCOMES, Failure, Lease, Outcome, PluginId, Trajectory
from parts.trajectories import ATTEMPTS, stored


class Book:
    """Source and sink: leases groups of `size` in order, and a greedy attempt with each, then nothing; keeps
    what came back.
    """

    def __init__(self, tasks: Sequence, size: int, *, has_greedy: bool = False) -> None:
        self.waiting = [Lease(index, task, size, 0, has_greedy) for index, task in enumerate(tasks)]
        self.size = size + has_greedy
        self.leased: list[int] = []
        self.added: list[Trajectory] = []
        self.dropped: dict[int, str] = {}
        self.left_out: dict[tuple[int, int], str] = {}
        self.num_shipments = 0
        self.all_settled = trio.Event()

    async def lease(self, limit: int) -> Sequence[Lease]:
        assert limit >= 1
        if not self.waiting:
            await trio.sleep_forever()
        await trio.sleep(0.1)
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        self.leased += [lease.group_id for lease in taken]
        return taken

    async def withdrawn(self) -> Sequence[int]:
        return ()

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        self.num_shipments += 1
        assert not any(t.group_id in self.dropped for t in trajectories)
        self.added += trajectories
        await trio.sleep(0.05)
        self._check()

    async def drop_group(self, group_id: int, reason: str) -> None:
        assert group_id not in self.dropped
        self.dropped[group_id] = reason
        self._check()

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        assert group_id not in self.dropped
        assert (group_id, member) not in self.left_out
        self.left_out[group_id, member] = reason
        self._check()

    def members(self) -> dict[int, list[int]]:
        """Return the members of each group that came, or of which word came that they would not."""
        found: dict[int, list[int]] = {}
        for group, member in [*((t.group_id, t.member) for t in self.added), *self.left_out]:
            found.setdefault(group, []).append(member)
        return found

    def _check(self) -> None:
        whole = sum(
            len(members) == self.size
            for group, members in self.members().items()
            if group not in self.dropped
        )
        if not self.waiting and whole + len(self.dropped) == len(self.leased):
            self.all_settled.set()


class Unlucky(AgentLoop):
    """Sleeps a random while, then fails or not by a seeded draw; counts how many run at once."""

    name: ClassVar[str] = "unlucky"
    chance: ClassVar[random.Random] = random.Random(0)
    weights: ClassVar[Sequence[float]] = ()
    running: ClassVar[int] = 0
    most: ClassVar[int] = 0
    played: ClassVar[Counter] = Counter()

    async def run(self, task, session) -> None:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        cls.played[task.task_id] += 1
        try:
            await session.generate()
            await trio.sleep(self.chance.uniform(0, 5))
            match self.chance.choices(["fine", "agent", "tool", "server", "hang"], self.weights)[0]:
                case "agent":
                    raise ValueError("a bug")
                case "tool":
                    raise ToolError("broken")
                case "server":
                    raise ServerError("gone")
                case "hang":
                    await trio.sleep_forever()
        finally:
            cls.running -= 1


def play_all(world, book: Book, ask=None):
    """Run the manager on the book until all of it is settled; return its stats, and what `ask` gets of it, if
    given.
    """

    async def main(manager):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.run, book, book)
            await book.all_settled.wait()
            stats = manager.stats()
            answer = stats if ask is None else (stats, ask(manager))
            nursery.cancel_scope.cancel()
        return answer

    return world.run(main)


def set_luck(seed: int, weights: Sequence[float]) -> None:
    Unlucky.chance, Unlucky.weights = random.Random(seed), weights
    Unlucky.running = Unlucky.most = 0
    Unlucky.played.clear()


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 999), size=st.integers(1, 5), limit=st.integers(1, 200), has_greedy=st.booleans())
def test_every_lease_is_settled_whatever_fails(stage, seed, size, limit, has_greedy):
    set_luck(seed, (0.7, 0.05, 0.1, 0.1, 0.05))
    rollout = {"group_size": size, "max_concurrent_trajectories": limit, "max_retries": 1}
    world = stage.World(
        lambda *_: "#### 42", rollout=rollout, plugins=[Unlucky], agent={"trajectory_timeout_s": 20.0}
    )
    book = Book(
        [stage.task(agent="unlucky", task_id=f"t:{i}") for i in range(60)], size, has_greedy=has_greedy
    )
    stats = play_all(world, book)
    members = book.members()
    assert all(t.is_greedy == (t.member == size) for t in book.added)
    for group in range(60):
        if group in book.dropped:
            assert book.dropped[group] in {"timeout", "tool_error", "model_error", "aborted"}
        else:
            assert sorted(members[group]) == list(range(book.size))
    assert all(t.outcome is Outcome.COMPLETED and t.reward == 1.0 for t in book.added)
    assert Unlucky.most <= limit
    assert Unlucky.running == stats["in_flight"] == 0
    finished = {name: count for name, count in stats.items() if name.startswith("outcome/")}
    assert sum(finished.values()) == stats["finished"]
    assert stats["dropped_groups"] if book.dropped else True


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 999), policy=st.sampled_from(["mask", "retry", "replace", "drop", "shrink"]))
def test_every_failed_attempt_is_noted_with_what_became_of_it(stage, seed, policy):
    set_luck(seed, (0.6, 0.1, 0.1, 0.1, 0.1))
    rollout = {
        "group_size": 4,
        "max_retries": 1,
        "max_replacements": 1,
        "on_outcome": dict.fromkeys(FAILURES, policy),
    }
    world = stage.World(
        lambda *_: "#### 42", rollout=rollout, plugins=[Unlucky], agent={"trajectory_timeout_s": 20.0}
    )
    book = Book([stage.task(agent="unlucky", task_id=f"t:{i}") for i in range(40)], 4)
    stats, report = play_all(world, book, lambda manager: manager.attempts.since(0))
    failed = report.failed
    by_outcome = {
        outcome: count for outcome, count in report.counts.outcomes.items() if outcome not in SCORED_OUTCOMES
    }
    assert Counter(f.outcome for f in failed) == by_outcome
    assert sum(by_outcome.values()) <= sum(
        stats.get(f"outcome/{name}", 0) for name in FAILURES
    )  # some ended with their group
    became = Counter(f.became for f in failed)
    for name in ("retried", "replaced", "masked", "left_out"):
        assert became[name] == stats.get(name, 0)
    assert (
        became["dropped"] == len({f.group_id for f in failed if f.became == "dropped"}) == len(book.dropped)
    )
    assert {f.group_id for f in failed if f.became == "dropped"} == set(book.dropped)
    agent = PluginId("agent", "unlucky")
    assert report.counts.used[agent] == report.counts.num_ended
    assert report.counts.failed[agent] == by_outcome.get(Outcome.ABORTED, 0)
    assert {
        f.failure.place.rpartition("/")[2].partition(":")[0] for f in failed if f.outcome is Outcome.ABORTED
    } <= {"test_manager.py"}


class Sick(Tool):
    name: ClassVar[str] = "sick"
    description: ClassVar[str] = "Is away."
    parameters: ClassVar[dict] = {"type": "object", "properties": {}}
    runtime: ClassVar[str] = "trio"
    is_idempotent: ClassVar[bool] = True

    async def call(self, arguments):
        raise OSError("away")


def test_a_tool_that_fails_while_the_attempt_goes_on_is_noted_too(stage):
    limits = {"sick": {"on_failure": "tell", "max_retries": 1}}
    script = lambda turn, _: stage.call("sick") if turn == 0 else "#### 42"  # noqa: E731
    world = stage.World(script, plugins=[Sick], agent={"tools": ("sick",), "tool_limits": limits})
    book = Book([stage.task(agent="tool_agent")], 1)
    _, report = play_all(world, book, lambda manager: manager.attempts.since(0))
    assert [t.outcome for t in book.added] == [Outcome.COMPLETED]
    assert [(f.became, f.outcome, f.failure.error) for f in report.failed] == [
        ("went_on", Outcome.TOOL_ERROR, "OSError")
    ] * 2
    assert "test_manager.py:" in str(report.failed[0].failure)
    sick = PluginId("tool", "sick")
    assert (report.counts.used[sick], report.counts.failed[sick], report.counts.num_failed()) == (1, 1, 0)


def test_hundreds_are_in_flight_at_once(stage):
    set_luck(0, (1, 0, 0, 0, 0))
    world = stage.World(
        lambda *_: "hm", rollout={"group_size": 8, "max_concurrent_trajectories": 400}, plugins=[Unlucky]
    )
    book = Book([stage.task(agent="unlucky") for _ in range(100)], 8)
    play_all(world, book)
    assert Unlucky.most == 400
    assert len(book.added) == 800
    assert book.num_shipments < 800  # small ones travel together


def test_a_group_larger_than_the_limit_takes_turns(stage):
    set_luck(0, (1, 0, 0, 0, 0))
    world = stage.World(
        lambda *_: "hm", rollout={"group_size": 7, "max_concurrent_trajectories": 3}, plugins=[Unlucky]
    )
    book = Book([stage.task(agent="unlucky") for _ in range(3)], 7)
    play_all(world, book)
    assert Unlucky.most == 3
    assert len(book.added) == 21


@pytest.mark.parametrize(("policy", "plays"), [("retry", 3), ("drop", 1)])
def test_the_policy_per_outcome(stage, policy, plays):
    set_luck(0, (0, 0, 1, 0, 0))
    world = stage.World(
        lambda *_: "hm", rollout={"on_outcome": {"tool_error": policy}, "max_retries": 2}, plugins=[Unlucky]
    )
    book = Book([stage.task(agent="unlucky")], 1)
    stats = play_all(world, book)
    assert Unlucky.played["t:0"] == plays
    assert book.dropped == {0: "tool_error"}
    assert book.added == []
    assert stats.get("retried", 0) == plays - 1


FAILURES = ("timeout", "tool_error", "model_error", "aborted")


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 999),
    policies=st.lists(
        st.sampled_from(["mask", "retry", "replace", "drop", "shrink"]), min_size=4, max_size=4
    ),
    on_exhausted=st.sampled_from(["drop", "shrink"]),
    size=st.integers(1, 4),
    least=st.integers(1, 4),
    has_greedy=st.booleans(),
)
def test_every_member_ends_as_the_table_says(stage, seed, policies, on_exhausted, size, least, has_greedy):
    set_luck(seed, (0.5, 0.1, 0.15, 0.15, 0.1))
    least, table = min(least, size), dict(zip(FAILURES, policies, strict=True))
    rollout = {"group_size": size, "on_outcome": table, "on_exhausted": on_exhausted, "min_group_size": least}
    world = stage.World(
        lambda *_: "#### 42",
        rollout={**rollout, "max_retries": 1, "max_replacements": 2, "max_concurrent_trajectories": 40},
        plugins=[Unlucky],
        agent={"trajectory_timeout_s": 20.0},
    )
    book = Book(
        [stage.task(agent="unlucky", task_id=f"t:{i}") for i in range(25)], size, has_greedy=has_greedy
    )
    stats = play_all(world, book)
    at_last = {o: on_exhausted if table[o] in ("retry", "replace") else table[o] for o in FAILURES}
    whole = [group for group in range(25) if group not in book.dropped]
    for group in whole:
        assert sorted(book.members()[group]) == list(range(book.size)), "each member once: added, or left out"
        mine = [t for t in book.added if t.group_id == group]
        assert sum(t.outcome is Outcome.COMPLETED and not t.is_greedy for t in mine) >= least
        assert [t.outcome for t in mine if t.is_greedy] == [Outcome.COMPLETED] * has_greedy
        assert all(
            at_last[t.outcome.value] == "mask" and not t.rewards
            for t in mine
            if t.outcome is not Outcome.COMPLETED
        )
    assert all(at_last[reason] == "shrink" for reason in book.left_out.values())
    assert set(book.dropped.values()) <= set(FAILURES)
    assert max(Unlucky.played.values()) <= book.size * (1 + 1 + 2)
    for count, policy in (
        ("retried", "retry"),
        ("replaced", "replace"),
        ("masked", "mask"),
        ("left_out", "shrink"),
    ):
        told = {o for o in FAILURES if stats.get(f"{count}/{o}")}
        assert told <= {o for o in FAILURES if policy in (table[o], at_last[o])}
        assert stats.get(count, 0) == sum(stats[f"{count}/{o}"] for o in told)
    assert stats.get("left_out", 0) >= len(book.left_out)


class Noted(Unlucky):
    """Always fails, and notes when."""

    name: ClassVar[str] = "noted"
    times: ClassVar[list[float]] = []

    async def run(self, task, session) -> None:
        await session.generate()
        self.times.append(trio.current_time())
        raise ServerError("down")


@pytest.mark.parametrize(("pause_s", "pauses"), [(2.0, [2, 4, 8]), (40.0, [40, 60, 60]), (0.0, [0, 0, 0])])
def test_replacements_pause_longer_each_time_and_are_no_retries(stage, pause_s, pauses):
    Noted.times.clear()
    policy = {
        "on_outcome": {"model_error": "replace"},
        "max_replacements": 3,
        "max_retries": 0,
        "replacement_pause_s": pause_s,
    }
    world = stage.World(lambda *_: "hm", rollout=policy, plugins=[Noted])
    book = Book([stage.task(agent="noted")], 1)
    stats = play_all(world, book)
    np.testing.assert_allclose(np.diff(Noted.times), pauses, atol=1e-6)
    assert (book.dropped, stats["replaced/model_error"], stats.get("retried", 0)) == (
        {0: "model_error"},
        3,
        0,
    )


@pytest.mark.parametrize(("on_exhausted", "is_whole"), [("drop", False), ("shrink", True)])
def test_what_is_exhausted_drops_its_group_or_shrinks_it(stage, on_exhausted, is_whole):
    """One member of three never comes: its siblings are the group, or none is."""
    rollout = {
        "group_size": 3,
        "max_retries": 1,
        "on_exhausted": on_exhausted,
        "max_concurrent_trajectories": 1,
    }
    world = stage.World(lambda *_: "hm", rollout=rollout, plugins=[BrokenTwice])
    set_luck(0, ())
    book = Book([stage.task(agent="broken_twice")], 3)
    play_all(world, book)
    assert book.dropped == ({} if is_whole else {0: "tool_error"})
    assert len(book.left_out) == is_whole
    if is_whole:
        assert sorted([*(t.member for t in book.added), *(member for _, member in book.left_out)]) == [
            0,
            1,
            2,
        ]


class BrokenTwice(Unlucky):
    """The member that plays first, in the only slot, fails; its retry comes behind its two siblings, and
    fails, too.
    """

    name: ClassVar[str] = "broken_twice"

    async def run(self, task, session) -> None:
        await session.generate()
        self.played[task.task_id] += 1
        if self.played[task.task_id] in (1, 4):
            raise ToolError("broken")


def test_a_truncated_attempt_that_is_masked_travels_with_its_reward(stage):
    agent = {"max_response_tokens": 8}
    world = stage.World(
        lambda *_: "x" * 50, rollout={"group_size": 2, "on_outcome": {"truncated": "mask"}}, agent=agent
    )
    book = Book([stage.task()], 2)
    stats = play_all(world, book)
    assert [(t.outcome, len(t.rewards)) for t in book.added] == [(Outcome.TRUNCATED, 1)] * 2
    assert stats["masked/truncated"] == 2


class Store:
    """A replay buffer in this process as source and sink, asked without waiting."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self.leased: set[int] = set()
        self.num_asked = 0

    async def lease(self, limit: int) -> Sequence[Lease]:
        self.num_asked += 1
        leases = self._buffer.lease("me", limit, 0.0)
        self.leased.update(lease.group_id for lease in leases)
        return leases

    async def withdrawn(self) -> Sequence[int]:
        return self._buffer.withdrawn("me", self.leased)

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        self._buffer.add("me", stored(*trajectories))

    async def drop_group(self, group_id: int, reason: str) -> None:
        self._buffer.drop_group("me", group_id, reason)

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        self._buffer.leave_out("me", group_id, member, reason)


def test_groups_of_all_sizes_reach_the_learner_through_the_replay_buffer(stage):
    """What a batch is made of: groups of two to four members with a reward, others replaced by further tasks,
    and the counts balance.
    """
    set_luck(3, (0.6, 0.1, 0.2, 0.1, 0))
    table = {"tool_error": "shrink", "model_error": "mask", "aborted": "drop"}
    world = stage.World(
        lambda *_: "#### 42", rollout={"group_size": 4, "on_outcome": table}, plugins=[Unlucky]
    )
    tasks = SimpleNamespace(task=lambda position: stage.task(agent="unlucky", task_id=f"t:{position}"))
    buffer = ReplayBuffer(
        tasks, LedgerRules(groups_per_step=30, max_staleness=0, group_size=4, total_groups=30), ATTEMPTS
    )
    buffer.advance(0)

    async def main(manager):
        store = Store(buffer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.run, store, store)
            while buffer.counts().ready < 30:
                await trio.sleep(1)
            nursery.cancel_scope.cancel()

    world.run(main)
    groups: dict[int, list[Outcome]] = {}
    for trajectory in buffer.take(30, 0.0):
        groups.setdefault(trajectory.group_id, []).append(trajectory.outcome)
    assert len(groups) == 30
    assert {outcome for members in groups.values() for outcome in members} == {
        Outcome.COMPLETED,
        Outcome.MODEL_ERROR,
    }
    sizes = {members.count(Outcome.COMPLETED) for members in groups.values()}
    assert sizes <= {2, 3, 4}
    assert len(sizes) > 1
    assert buffer.counts().is_balanced
    assert set(buffer.counts().dropped) <= {"tool_error", "model_error", "aborted"}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            {"on_outcome": {"completed": "drop", "truncated": "mask", "turn_limit": "drop"}},
            "trains on no outcome",
        ),
        (
            {"on_outcome": {"timeout": "shrink"}, "group_size": 2, "min_group_size": 3},
            r"on_outcome.timeout=shrink keeps at least min_group_size=3 members",
        ),
        (
            {"on_outcome": {"aborted": "mask"}, "group_size": 1},
            r"on_outcome.aborted=mask keeps at least .* group_size=1 is smaller",
        ),
        ({"on_exhausted": "shrink", "group_size": 1}, r"on_exhausted=shrink keeps at least min_group_size=2"),
    ],
)
def test_a_table_that_cannot_be_is_refused_in_one_line(table, told):
    with pytest.raises(ValueError, match=told):
        RolloutConfig(**table)


def test_groups_shrink_only_where_the_table_says_so():
    assert RolloutConfig(group_size=1, on_outcome={"truncated": "mask"}).fixed_group_size == 1
    assert RolloutConfig(group_size=4, min_group_size=9).fixed_group_size == 4
    for table in (
        {"on_exhausted": "shrink"},
        {"on_outcome": {"aborted": "mask"}},
        {"on_outcome": {"truncated": "shrink"}},
    ):
        assert RolloutConfig(group_size=4, **table).fixed_group_size is None


def test_a_failure_is_never_trained_on():
    with pytest.raises(ValueError, match=r"on_outcome.tool_error=train: a failed attempt has no reward"):
        RolloutConfig(on_outcome={"tool_error": "train"})


class Flaky(Unlucky):
    """Fails the first attempt only."""

    name: ClassVar[str] = "flaky"

    async def run(self, task, session) -> None:
        self.played[task.task_id] += 1
        await session.generate()
        if self.played[task.task_id] == 1:
            raise ToolError("once")


def test_a_retried_member_counts_once(stage):
    set_luck(0, ())
    world = stage.World(lambda *_: "hm", plugins=[Flaky])
    book = Book([stage.task(agent="flaky")], 1)
    stats = play_all(world, book)
    assert [(t.member, t.outcome) for t in book.added] == [(0, Outcome.COMPLETED)]
    assert (stats["finished"], stats["retried/tool_error"]) == (2, 1)


def test_one_attempt_of_a_group_is_greedy_and_the_others_are_sampled(stage):
    world = stage.World(lambda *_: "#### 42", rollout={"group_size": 2})
    book = Book([stage.task() for _ in range(5)], 2, has_greedy=True)
    play_all(world, book)
    assert sorted((t.group_id, t.member, t.is_greedy) for t in book.added) == [
        (g, m, m == 2) for g in range(5) for m in range(3)
    ]
    assert Counter(params.temperature for params in world.client.params) == {1.0: 10, 0.0: 5}
    assert all(t.reward == 1.0 for t in book.added)


class BrokenWhenGreedy(Unlucky):
    """Fails the attempts whose first token came at temperature 0, `failures` times."""

    name: ClassVar[str] = "broken_when_greedy"
    failures: ClassVar[int] = 0
    client: ClassVar = None

    async def run(self, task, session) -> None:
        await session.generate()
        self.played["all"] += 1
        if self.client.params[-1].temperature == 0.0 and type(self).failures:
            type(self).failures -= 1
            raise ToolError("once more")


@pytest.mark.parametrize(("failures", "is_dropped", "plays"), [(2, False, 5), (9, True, 5)])
def test_a_greedy_attempt_that_fails_is_tried_again_and_drops_its_group_at_last(
    stage, failures, is_dropped, plays
):
    set_luck(0, ())
    world = stage.World(
        lambda *_: "hm",
        rollout={"group_size": 2, "max_concurrent_trajectories": 1},
        plugins=[BrokenWhenGreedy],
    )
    BrokenWhenGreedy.failures, BrokenWhenGreedy.client = failures, world.client
    book = Book([stage.task(agent="broken_when_greedy")], 2, has_greedy=True)
    stats = play_all(world, book)
    assert book.dropped == ({0: "tool_error"} if is_dropped else {})
    assert BrokenWhenGreedy.played["all"] == plays
    assert stats["retried"] == 2
    if not is_dropped:
        assert sorted((t.member, t.is_greedy) for t in book.added) == [(0, False), (1, False), (2, True)]


@pytest.mark.parametrize(("limit", "most"), [(8, 4), (9, 4), (2, 1), (1, 1)])
def test_groups_are_claimed_only_when_their_greedy_attempts_have_room_too(stage, limit, most):
    """Attempts that never end: what is leased is what had room."""
    world = stage.World(
        lambda *_: "hm",
        rollout={"max_concurrent_trajectories": limit},
        latency_s=1000.0,
        attempts_per_group=2,
    )
    book = Book([stage.task() for _ in range(20)], 1, has_greedy=True)

    async def main(manager):
        with trio.move_on_after(10):
            await manager.run(book, book)

    world.run(main)
    assert len(book.leased) == most


class Hotel(Tool):
    """Counts its guests: whoever was started must be closed."""

    name: ClassVar[str] = "hotel"
    description: ClassVar[str] = "a room"
    parameters: ClassVar = {"type": "object"}
    runtime = "trio"
    guests: ClassVar[int] = 0
    arrivals: ClassVar[int] = 0

    async def start(self) -> None:
        type(self).guests += 1
        type(self).arrivals += 1

    async def call(self, arguments) -> ToolResult:
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await trio.sleep(1)
        type(self).guests -= 1


def test_cancelling_the_run_closes_every_tool_and_leaves_no_request(stage):
    Hotel.guests = Hotel.arrivals = 0
    world = stage.World(
        lambda *_: stage.call("hotel", "{}"),
        agent={"tools": ("hotel",)},
        rollout={"group_size": 4},
        plugins=[Hotel],
        latency_s=0.5,
    )
    book = Book([stage.task() for _ in range(10)], 4)

    async def main(manager):
        with trio.move_on_after(10):
            await manager.run(book, book)

    world.run(main)
    assert Hotel.arrivals == 40
    assert Hotel.guests == 0
    assert world.client.running == 0


def hanging(stage, *, at_once: int, **limits):
    """Return a world whose attempts hang in a tool for ever, a replay buffer that leases two groups of two,
    and its clock.
    """
    Hotel.guests = Hotel.arrivals = 0
    rollout = {"group_size": 2, "max_concurrent_trajectories": at_once}
    world = stage.World(
        lambda *_: stage.call("hotel", "{}"), agent={"tools": ("hotel",)}, rollout=rollout, plugins=[Hotel]
    )
    tasks = SimpleNamespace(task=lambda position: stage.task(task_id=f"t:{position}"))
    now = [0.0]
    buffer = ReplayBuffer(
        tasks,
        LedgerRules(groups_per_step=2, max_staleness=0, group_size=2),
        ATTEMPTS,
        clock=lambda: now[0],
        **limits,
    )
    buffer.advance(0)
    return world, buffer, now


@pytest.mark.parametrize(("limit", "num_withdrawn"), [("duplicate_after_s", 1), ("lease_timeout_s", 2)])
def test_a_group_that_another_has_finished_or_taken_over_is_not_played_on(stage, limit, num_withdrawn):
    """Its tools are closed, its requests aborted, and its room is there for others, though its attempts would
    have hung for ever.
    """
    world, buffer, now = hanging(stage, at_once=4, **{limit: 60.0})

    async def main(manager):
        store = Store(buffer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.run, store, store)
            while Hotel.guests < 4:
                await trio.sleep(1)
            asked = store.num_asked
            now[0] = 61.0
            for lease in buffer.lease("other", 2, 0.0)[:1]:
                attempts = [Attempt(lease.group_id, member, lease.task) for member in range(2)]
                done = [unplayed(attempt, Outcome.ABORTED, Failure("never began")) for attempt in attempts]
                buffer.add("other", stored(*done))
            await trio.sleep(20)
            assert store.num_asked > asked, "there is room"
            stats = manager.stats()
            nursery.cancel_scope.cancel()
        return stats

    stats = world.run(main)
    assert stats["withdrawn_groups"] == num_withdrawn
    assert stats["in_flight"] == 4 - 2 * num_withdrawn
    assert "finished" not in stats, "nothing came of them"
    assert Hotel.guests == 0
    assert world.client.running == 0
    assert buffer.counts().is_balanced


def test_a_group_that_is_given_again_to_the_same_actor_is_played_once(stage):
    """Its lease had ended, and there was nobody else."""
    world, buffer, now = hanging(stage, at_once=8, lease_timeout_s=60.0)

    async def main(manager):
        store = Store(buffer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.run, store, store)
            while Hotel.arrivals < 4:
                await trio.sleep(1)
            now[0] = 61.0
            while Hotel.arrivals < 8:
                await trio.sleep(1)
            await trio.sleep(5)
            stats, guests = manager.stats(), Hotel.guests
            nursery.cancel_scope.cancel()
        return stats, guests

    stats, guests = world.run(main)
    assert (stats["in_flight"], guests, stats["withdrawn_groups"]) == (4, 4, 2)


def test_an_error_of_the_sink_ends_the_run(stage):
    class Broken(Book):
        async def add(self, trajectories) -> None:
            raise OSError("disk full")

    world = stage.World(lambda *_: "hm")

    async def main(manager):
        book = Broken([stage.task()], 1)
        with pytest.raises(ExceptionGroup) as caught:
            await manager.run(book, book)
        assert caught.group_contains(OSError, match="disk full")

    world.run(main)


def test_kinds_of_agents_mix_in_one_batch(stage):
    partner = {"name": "tutor", "ground_truth": "42"}
    tasks = [
        stage.task("single", agent="single_turn_agent", data_source="sums"),
        stage.task("tool"),
        stage.task(
            "interaction",
            agent="interaction_agent",
            interaction_kwargs=partner,
            extra_info={"needs_tool": False},
        ),
        stage.task("both", interaction_kwargs=partner, extra_info={"needs_tool": True}),
    ]

    lines = {
        "single": ["#### 42"],
        "tool": [stage.call(), "#### 42"],
        "interaction": ["#### 40", "#### 41", "#### 42"],
        "both": [stage.call(), "#### 41", "#### 42"],
    }

    def script(turn: int, text: str) -> str:
        return next(said for question, said in lines.items() if f"user\n{question}<|im_end|>" in text)[turn]

    world = stage.World(script, rollout={"group_size": 2})
    book = Book(tasks, 2)
    play_all(world, book)
    by_group = {t.group_id: t for t in book.added}
    assert [by_group[i].metrics["num_turns"] for i in range(4)] == [1, 2, 3, 3]
    assert [by_group[i].agent_name for i in range(4)] == [
        "single_turn_agent",
        "tool_agent",
        "interaction_agent",
        "tool_agent",
    ]
    assert all(t.reward == 1.0 for t in book.added)
    assert by_group[3].extra_info["needs_tool"] is True


def test_validation_returns_everything_in_order_with_its_own_sampling(stage):
    set_luck(1, (0.5, 0.5, 0, 0, 0))
    world = stage.World(lambda *_: "hm", plugins=[Unlucky])
    trajectories = world.play(
        *[stage.task(agent="unlucky") for _ in range(10)], n=3, sampling=EvalConfig(temperature=0.0, top_k=5)
    )
    assert [(t.group_id, t.member) for t in trajectories] == [(g, m) for g in range(10) for m in range(3)]
    assert {t.outcome for t in trajectories} == {
        Outcome.COMPLETED,
        Outcome.ABORTED,
    }  # failures are told, not retried
    assert {(p.temperature, p.top_k) for p in world.client.params} == {(0.0, 5)}
