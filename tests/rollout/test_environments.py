"""Environments: who sees the state of an attempt, for how long, and what becomes of its failures."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import trio

from agentrl.config.agent import AgentConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.data.checked_dataset import Playable, agent_choice
from agentrl.errors import DataError, PluginError, ServerError, ToolError
from agentrl.plugins import (
    AgentLoop,
    Attempted,
    Environment,
    GroupReward,
    Interaction,
    InteractionReply,
    Reward,
    RewardResult,
    Tool,
    ToolResult,
    WrongCall,
    environment_tools,
    load_plugins,
    tool,
)
from agentrl.types import Lease, Outcome, PluginId, Task, Trajectory
from parts.scripted import call, play


class Counter(Environment):
    """Counts. Its class knows every instance that was started."""

    name: ClassVar[str] = "counter"
    runtime: ClassVar = "trio"
    started: ClassVar[list[Counter]] = []

    def __init__(self, config=None) -> None:
        super().__init__(config)
        self.log: list[str] = []
        self.value = 0

    async def start(self, *, first: int = 0, fault: str = "") -> None:
        self.value, self.fault = first, fault
        self.log.append("start")
        self.started.append(self)
        if fault == "start":
            raise OSError("no room")
        if fault == "start hangs":
            await trio.sleep_forever()

    @tool
    async def add(self, number: int = 1) -> str:
        """Add a number."""
        before = self.value
        await trio.sleep(0)  # lets other calls of the turn run, if any may
        self.value = before + number
        self.log.append(f"add {number}")
        return str(self.value)

    async def facts(self):
        if self.fault == "facts":
            raise KeyError("count")
        if self.fault == "wrong facts":  # as a method under @tool does, if `facts` calls it
            raise WrongCall("no such item")
        return {"value": self.value} if self.fault != "plain" else {"value": object()}

    async def close(self) -> None:
        self.log.append("close")
        if self.fault == "close":
            raise OSError("stuck")


class Counted(Reward):
    """What the counter shows; notes that it was open."""

    name: ClassVar[str] = "counted"

    def score(self, attempt: Attempted) -> RewardResult:
        attempt.environment.log.append("score")
        if attempt.environment.fault == "reward":
            raise ValueError("no verdict")
        return RewardResult(float(attempt.environment.value))


class OwnProcess(Reward):
    """Sees facts. The config says whether it tries to see more."""

    name: ClassVar[str] = "own_process"
    runs_in = "process"

    def score(self, attempt: Attempted) -> RewardResult:
        if self.config.get("looks"):
            return RewardResult(float(attempt.environment.value))
        return RewardResult(attempt.facts["value"], details={"pid": os.getpid()})


class Compared(GroupReward):
    name: ClassVar[str] = "compared"

    def score(self, attempts):
        most = max(attempt.facts["value"] for attempt in attempts)
        return [RewardResult(float(attempt.facts["value"] == most)) for attempt in attempts]


class Ending(AgentLoop):
    """Uses the environment, then ends the attempt as the row says."""

    name: ClassVar[str] = "ending"

    async def run(self, task: Task, session) -> None:
        turn = await session.generate()
        await session.call_tools(turn)
        session.environment.log.append("agent")
        match task.extra_info.get("ending"):
            case "bug":
                raise ValueError("a bug")
            case "tool":
                raise ToolError("away")
            case "server":
                raise ServerError("gone")
            case "one fails" if session.environment is Counter.started[0]:
                raise ValueError("a bug")
            case "hangs" | "one fails":
                await trio.sleep_forever()


class Partner(Interaction):
    """Done when the counter shows 2."""

    name: ClassVar[str] = "partner"
    runtime: ClassVar = "trio"

    async def respond(self, messages) -> InteractionReply:
        return InteractionReply(f"it is {self.environment.value}", is_done=self.environment.value >= 2)


class Double(Tool):
    """A tool of its own class, which changes the environment."""

    name: ClassVar[str] = "double"
    description: ClassVar[str] = "Double the number."
    parameters: ClassVar[dict] = {"type": "object", "properties": {}}
    runtime: ClassVar = "trio"

    async def call(self, arguments) -> ToolResult:
        self.environment.value *= 2
        return ToolResult(str(self.environment.value))


@pytest.fixture(autouse=True)
def started() -> list[Counter]:
    Counter.started.clear()
    return Counter.started


def task(stage, *, agent: str = "ending", ending: str = "", **kwargs) -> Task:
    fields = {"extra_info": {"ending": ending}, "environment_kwargs": {"name": "counter", **kwargs}}
    return stage.task(agent=agent, **fields)


def world(stage, **options):
    script = lambda turn, _: stage.call("add", "{}") if turn == 0 else "done"  # noqa: E731
    own = {"tools": (), "trajectory_timeout_s": 20.0, "environment_timeout_s": 5.0}
    options["agent"] = {**own, **options.get("agent", {})}
    plugins = [Counter, Counted, Ending, Partner, Double, Compared]
    return stage.World(script, plugins=plugins, **{"reward": {"sources": {"sums": "counted"}}, **options})


# --------------------------------------------------------------------------------------------------- lifetime

ENDINGS = {
    "completed": ({}, Outcome.COMPLETED, ["start", "add 1", "agent", "score", "close"]),
    "a bug of the agent": ({"ending": "bug"}, Outcome.ABORTED, ["start", "add 1", "agent", "close"]),
    "a tool that is away": ({"ending": "tool"}, Outcome.TOOL_ERROR, ["start", "add 1", "agent", "close"]),
    "no server": ({"ending": "server"}, Outcome.MODEL_ERROR, ["start", "add 1", "agent", "close"]),
    "the deadline": ({"ending": "hangs"}, Outcome.TIMEOUT, ["start", "add 1", "agent", "close"]),
    "a failed start": ({"fault": "start"}, Outcome.ENVIRONMENT_ERROR, ["start", "close"]),
    "a slow start": ({"fault": "start hangs"}, Outcome.ENVIRONMENT_ERROR, ["start", "close"]),
    "failed facts": ({"fault": "facts"}, Outcome.ENVIRONMENT_ERROR, ["start", "add 1", "agent", "close"]),
    "facts that are a wrong call": (
        {"fault": "wrong facts"},
        Outcome.ENVIRONMENT_ERROR,
        ["start", "add 1", "agent", "close"],
    ),
    "odd facts": ({"fault": "plain"}, Outcome.ENVIRONMENT_ERROR, ["start", "add 1", "agent", "close"]),
    "a failed reward": (
        {"fault": "reward"},
        Outcome.REWARD_ERROR,
        ["start", "add 1", "agent", "score", "close"],
    ),
    "a failed close": ({"fault": "close"}, Outcome.COMPLETED, ["start", "add 1", "agent", "score", "close"]),
}


@pytest.mark.parametrize(("how", "outcome", "log"), ENDINGS.values(), ids=ENDINGS)
def test_it_is_open_from_the_first_turn_to_the_reward_and_closed_once(stage, started, how, outcome, log):
    [trajectory] = world(stage).play(task(stage, **how))
    assert trajectory.outcome is outcome, trajectory.failure
    assert [one.log for one in started] == [log]
    if outcome is Outcome.ENVIRONMENT_ERROR:
        assert trajectory.failure.plugin == PluginId("environment", "counter")
        assert trajectory.rewards == ()


class OneGroup:
    """Source and sink of one group, which is over when its last member is settled."""

    def __init__(self, lease: Lease) -> None:
        self.waiting, self.unsettled = [lease], lease.num_attempts
        self.added: list[Trajectory] = []
        self.dropped = ""
        self.is_over = trio.Event()

    async def lease(self, limit: int):
        return [self.waiting.pop()] if self.waiting else await trio.sleep_forever()

    async def withdrawn(self):
        return ()

    async def add(self, trajectories) -> None:
        self.added += trajectories
        if len(self.added) == self.unsettled:
            self.is_over.set()

    async def drop_group(self, group_id: int, reason: str) -> None:
        self.dropped = reason
        self.is_over.set()


def train_on(world, task: Task, *, size: int = 1):
    """Play one group of `size` as in training; return the group and the report of its attempts."""
    group = OneGroup(Lease(0, task, size, 0))

    async def main(manager):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.run, group, group)
            await group.is_over.wait()
            nursery.cancel_scope.cancel()
        return group, manager.attempts.since(0)

    return world.run(main)


def test_all_of_a_group_that_is_dropped_are_closed(stage, started):
    group, _ = train_on(world(stage), task(stage, ending="one fails"), size=4)
    assert group.dropped == "aborted"
    assert len(started) == 4
    assert all(one.log[0] == "start" and one.log.count("close") == 1 for one in started)
    assert all(one.log[-1] == "close" for one in started)


def test_a_run_that_is_stopped_closes_what_is_open(stage, started):
    async def main(manager):
        with trio.move_on_after(3):
            await manager.play([Lease(0, task(stage, ending="hangs"), 3, 0)], EvalConfig(temperature=1.0))

    world(stage).run(main)
    assert [one.log for one in started] == [["start", "add 1", "agent", "close"]] * 3


def test_its_failures_name_the_users_line_and_are_counted(stage):
    rollout = {"on_outcome": {"environment_error": "retry"}, "max_retries": 1}
    group, report = train_on(world(stage, rollout=rollout), task(stage, fault="start"))
    assert group.dropped == "environment_error"
    assert [failed.became for failed in report.failed] == ["retried", "dropped"]
    assert all("test_environments.py:" in failed.failure.place for failed in report.failed)
    assert "environment 'counter' raised in `start`: OSError: no room" in report.failed[0].failure.text
    counts, counter = report.counts, PluginId("environment", "counter")
    assert (counts.used[counter], counts.failed[counter], counts.num_failed()) == (2, 2, 2)


def test_a_close_that_fails_is_reported_and_costs_the_attempt_nothing(stage):
    group, report = train_on(world(stage), task(stage, fault="close"))
    assert [(t.outcome, t.reward) for t in group.added] == [(Outcome.COMPLETED, 1.0)]
    [failed] = report.failed
    assert (failed.became, failed.outcome) == ("went_on", Outcome.ENVIRONMENT_ERROR)
    assert "environment 'counter' raised in `close`: OSError: stuck" in failed.failure.text
    assert report.counts.failed[PluginId("environment", "counter")] == 1


# --------------------------------------------------------------------------------------------- who sees what


def test_tools_partner_agent_and_reward_share_one(started):
    """The partner waits for 2: a method adds 1, a tool of its own class doubles it."""
    trajectory = play(
        [call("add"), "now?", call("double"), "now?"],
        agent="interaction_agent",
        tools=[Double],
        interaction=Partner,
        environment=Counter,
        reward=Counted,
    )
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert [m.content for m in trajectory.messages[1:] if m.role == "user"] == ["it is 1"]
    assert trajectory.reward == 2.0
    assert trajectory.extra_info["environment_facts"] == {"value": 2}
    assert len(started) == 1


def test_calls_of_a_turn_run_one_after_another_in_their_order(started):
    calls = [call("add", number=number) for number in (1, 10, 100)]
    trajectory = play([calls, "done"], environment=Counter, reward=Counted)
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["1", "11", "111"]
    assert trajectory.reward == 111.0


@pytest.mark.parametrize("looks", [False, True])
def test_a_reward_in_a_process_sees_the_facts_and_nothing_else(looks):
    trajectory = play(
        [call("add", number=3), "done"],
        environment=Counter,
        reward=OwnProcess,
        reward_config={"reward_config": {"own_process": {"looks": looks}}},
    )
    if looks:
        assert trajectory.outcome is Outcome.REWARD_ERROR
        assert "attempt.environment.value: the reward runs in a process of its own" in str(trajectory.failure)
        assert "use attempt.facts" in str(trajectory.failure)
        return
    assert trajectory.reward == 3.0, trajectory.failure
    assert trajectory.extra_info["reward_details"]["own_process"]["pid"] != os.getpid()


def test_rewards_of_a_group_compare_facts(stage):
    compared = {"sources": {"sums": "compared"}}
    group, _ = train_on(world(stage, reward=compared), task(stage), size=3)
    assert [t.reward for t in group.added] == [1.0] * 3


def test_a_function_may_ask_for_the_environment(tmp_path):
    (tmp_path / "own.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info, environment):\n"
        "    return environment.value + extra_info['environment_facts']['value'] / 10\n"
    )
    function = {"custom_function": {"path": str(tmp_path / "own.py"), "name": "score"}}
    trajectory = play([call("add", number=4), "done"], environment=Counter, reward_config=function)
    assert trajectory.reward == 4.4, trajectory.failure


# -------------------------------------------------------------------------------------------------- bad input


class Other(Environment):
    """Another environment with a tool of the same name."""

    name: ClassVar[str] = "other"

    @tool
    def add(self, text: str) -> str:
        """Add a text."""
        return text


class Twice(Environment):
    name: ClassVar[str] = "twice"

    @tool
    def one(self) -> str:
        """Say one."""
        return "1"

    @tool(name="one")
    def two(self) -> str:
        """Say two."""
        return "2"


def playable(**agent) -> Playable:
    plugins = load_plugins()
    for environment in (Counter, Other, Twice):
        plugins.environments.add(environment)
    plugins.agents.add(Ending)
    plugins.tools.add(Double)

    class Chat:
        def check_tools(self, tools, messages) -> None: ...

        def with_template_kwargs(self, given) -> Chat:
            return self

    return Playable(AgentConfig(**agent), plugins, Chat())


@pytest.mark.parametrize(
    ("agent", "row", "problem"),
    [
        ({}, {"environment_kwargs": {"name": "shop"}}, "unknown environment 'shop'; registered: counter, "),
        ({}, {"environment_kwargs": {"size": 3}}, "environment_kwargs.name is None; write one of counter, "),
        (
            {},
            {"environment_kwargs": {"name": "counter", "frist": 3}},
            r"environment 'counter' \(.*test_environments.py:\d+\): `start\(.*` gets an unexpected keyword "
            r"argument 'frist'; the row's extra_info.environment_kwargs passes frist",
        ),
        (
            {"tools": ("counter.add",)},
            {"environment_kwargs": {"name": "counter"}},
            "the tool 'counter.add' is a method of an environment: rows with the environment offer it",
        ),
        (
            {},
            {"environment_kwargs": {"name": "counter"}, "tools_kwargs": {"add": {}}},
            "the tool 'add' and a method of the environment 'counter' have the same name",
        ),
        (
            {},
            {"environment_kwargs": {"name": "twice"}},
            "environment 'twice': two of its methods are tools with the name 'one'",
        ),
        (
            {},
            {"environment_kwargs": {"name": "counter"}, "agent_name": "single_turn_agent"},
            "agent 'single_turn_agent' uses no tools, but the environment 'counter' has add",
        ),
    ],
)
def test_rows_and_configs_that_make_no_sense(stage, agent, row, problem):
    fields = {"agent_name": "tool_agent", **row}
    with pytest.raises((DataError, PluginError), match=problem):
        playable(**agent).check(stage.task(agent=fields.pop("agent_name"), **fields))


def test_an_agent_without_tools_plays_a_row_that_offers_none(stage):
    row = {"environment_kwargs": {"name": "counter"}, "extra_info": {"tool_selection": []}}
    playable().check(stage.task(agent="single_turn_agent", **row))


def test_two_environments_may_have_tools_of_the_same_name(stage):
    """Each row is shown its own, and calls reach its own."""
    plugins = playable()._plugins
    names = [
        plugins.offered_tools(stage.task(environment_kwargs={"name": name}), ())
        for name in ("counter", "other")
    ]
    assert names == [("counter.add",), ("other.add",)]
    assert plugins.tools.get("other.add") is environment_tools(Other)["add"]
    assert play([call("add", text="x"), "done"], environment=Other).messages[2].content == "x"


@pytest.mark.parametrize(
    ("configured", "of_row", "expected"),
    [
        (None, None, None),
        (None, {}, None),
        (None, {"name": "a", "x": 1}, {"name": "a", "x": 1}),
        ("b", None, {"name": "b"}),
        ("b", {"x": 1}, {"name": "b", "x": 1}),
        ("b", {"name": "a"}, {"name": "a"}),
    ],
)
def test_a_row_comes_before_the_config(configured, of_row, expected):
    choice = agent_choice(AgentConfig(environment=configured), load_plugins())
    assert choice.environment_kwargs(of_row) == expected


class Hasty(Interaction):
    """Calls a method of the environment wrongly."""

    name: ClassVar[str] = "hasty"

    async def respond(self, messages) -> InteractionReply:
        raise WrongCall("no such item")


def test_a_wrong_call_by_the_partner_is_not_the_models():
    trajectory = play(["done"], agent="interaction_agent", environment=Counter, interaction=Hasty)
    assert trajectory.outcome is Outcome.TOOL_ERROR
    assert trajectory.failure.plugin == PluginId("interaction", "hasty")


def test_a_row_selects_methods_of_its_environment_by_name(stage):
    """A selection names everything that the row offers: a method that it leaves out is not offered. A row
    without one offers all; an empty one offers nothing.
    """
    plugins = playable()._plugins

    def offered(*names: str) -> tuple[str, ...]:
        row = stage.task(environment_kwargs={"name": "counter"}, extra_info={"tool_selection": [*names]})
        return plugins.offered_tools(row, ("calculator",))

    whole = stage.task(environment_kwargs={"name": "counter"})
    assert plugins.offered_tools(whole, ("calculator",)) == ("calculator", "counter.add")
    assert offered() == ()
    assert offered("calculator") == ("calculator",)
    assert offered("add", "calculator") == ("counter.add", "calculator")
    assert offered("counter.add", "add") == ("counter.add",)
    with pytest.raises(DataError, match=r"'other.add' is not offered; offered: calculator, add$"):
        offered("other.add")
