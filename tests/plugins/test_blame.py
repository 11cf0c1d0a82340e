"""Where an exception of a plugin is said to come from: the user's own line, whatever it passed on its way."""

from __future__ import annotations

import json

import pytest

from agentrl.plugins.blame import MAX_FRAMES, blaming, failure_of
from agentrl.plugins.sources import import_source
from agentrl.types import Failure, Outcome, PluginId
from parts.scripted import call, play

BROKEN = '''
import json
from typing import ClassVar

from agentrl.errors import PluginError, RewardError, ToolError
from agentrl.plugins import AgentLoop, Attempted, Interaction, InteractionReply, Reward, RewardResult, Tool, ToolResult

def deep():
    return {}["boom"]  # the line

def library():
    return json.loads("{")  # the library line

def recursion(n):
    return recursion(n + 1)

class Breaking:
    def broken(self):
        deep()

class TrioTool(Tool, Breaking):
    name: ClassVar[str] = "trio_tool"
    description: ClassVar[str] = "Breaks."
    parameters: ClassVar[dict] = {"type": "object", "properties": {}}
    runtime: ClassVar[str] = "trio"

    async def call(self, arguments):
        self.broken()

class AsyncioTool(TrioTool):
    name: ClassVar[str] = "asyncio_tool"
    runtime: ClassVar[str] = "asyncio"

class Honest(TrioTool):
    name: ClassVar[str] = "honest"

    async def call(self, arguments):
        raise ToolError("the service is down")  # the honest line

class InlineReward(Reward):
    name: ClassVar[str] = "inline_reward"
    runs_in: ClassVar[str] = "inline"

    def score(self, attempt):
        deep()

class ThreadReward(InlineReward):
    name: ClassVar[str] = "thread_reward"
    runs_in: ClassVar[str] = "thread"

class ProcessReward(InlineReward):
    name: ClassVar[str] = "process_reward"
    runs_in: ClassVar[str] = "process"

class QuittingReward(InlineReward):
    name: ClassVar[str] = "quitting_reward"

    def score(self, attempt):
        raise SystemExit(3)  # the exit

class AsyncioReward(Reward):
    name: ClassVar[str] = "asyncio_reward"
    runs_in: ClassVar[str] = "asyncio"

    async def score(self, attempt):
        deep()

class Partner(Interaction):
    name: ClassVar[str] = "partner"

    async def respond(self, messages):
        deep()

class Agent(AgentLoop):
    name: ClassVar[str] = "broken_agent"

    async def run(self, task, session):
        await session.generate()
        deep()

class Caller(AgentLoop):
    """Has a frame of its own between the tool and whoever reads the error."""

    name: ClassVar[str] = "caller"

    async def run(self, task, session):
        turn = await session.generate()
        await session.call_tools(turn)
'''  # noqa: E501


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    file = tmp_path_factory.mktemp("user") / "broken.py"
    file.write_text(BROKEN)
    return import_source(str(file))


def line_of(mark: str) -> int:
    return next(
        number for number, line in enumerate(BROKEN.splitlines(), start=1) if line.endswith(f"# {mark}")
    )


def check(failure: Failure | None, plugin: PluginId, mark: str = "the line") -> None:
    assert failure is not None
    assert failure.plugin == plugin
    assert failure.place.endswith(f"/broken.py:{line_of(mark)}")
    assert str(failure).endswith(f" (broken.py:{line_of(mark)})")
    assert "/agentrl/" not in failure.traceback
    assert f'broken.py", line {line_of(mark)}, in ' in failure.traceback


CALL = json.dumps({"name": "{}", "arguments": {}})


@pytest.mark.parametrize("tool", ["TrioTool", "AsyncioTool", "Honest"])
@pytest.mark.parametrize("agent", [None, "Caller"])
def test_a_tool_that_raises_is_blamed_at_the_line_where_it_did(broken, tool, agent):
    made = getattr(broken, tool)
    trajectory = play(
        [call(made.name), "done"], tools=[made], agent=getattr(broken, agent) if agent else "tool_agent"
    )
    assert trajectory.outcome is Outcome.TOOL_ERROR
    check(
        trajectory.failure, PluginId("tool", made.name), "the honest line" if tool == "Honest" else "the line"
    )
    assert made.name in trajectory.failure.text
    assert trajectory.failure.error == ("ToolError" if tool == "Honest" else "KeyError")


@pytest.mark.parametrize("reward", ["InlineReward", "ThreadReward", "ProcessReward", "AsyncioReward"])
def test_a_reward_that_raises_is_blamed_at_its_line_wherever_it_runs(broken, reward):
    made = getattr(broken, reward)
    trajectory = play(["hello"], agent="single_turn_agent", reward=made)
    assert trajectory.outcome is Outcome.REWARD_ERROR
    check(trajectory.failure, PluginId("reward", made.name))
    assert trajectory.failure.error == "KeyError"
    assert "'boom'" in trajectory.failure.text
    assert trajectory.failure.text.count("broken.py") == 0, "the place is said once, behind the text"


def test_what_is_no_exception_is_blamed_at_its_line_too(broken):
    trajectory = play(["hello"], agent="single_turn_agent", reward=broken.QuittingReward)
    check(trajectory.failure, PluginId("reward", "quitting_reward"), "the exit")
    assert trajectory.failure.error == "SystemExit"


def test_an_agent_and_a_partner_too(broken):
    trajectory = play(["hello"], agent=broken.Agent)
    assert trajectory.outcome is Outcome.ABORTED
    check(trajectory.failure, PluginId("agent", "broken_agent"))
    assert trajectory.failure.text == "agent 'broken_agent' raised KeyError: 'boom'"
    trajectory = play(["hello"], agent="interaction_agent", interaction=broken.Partner)
    assert trajectory.outcome is Outcome.TOOL_ERROR
    check(trajectory.failure, PluginId("interaction", "partner"))


def test_a_library_below_the_users_line_is_in_the_traceback_and_not_the_place(broken):
    failure = caught(broken.library)
    check(failure, None, "the library line")
    assert "json" in failure.traceback.splitlines()[-3]


def test_what_the_user_raised_counts_and_not_what_it_was_raised_from(broken):
    def translated() -> None:
        try:
            broken.deep()
        except KeyError as error:
            raise ValueError("no such row") from error

    failure = caught(translated)
    assert failure.text == "ValueError: no such row"
    assert failure.place.rpartition("/")[2].startswith("test_blame.py:")


def test_a_recursion_without_end_is_cut(broken):
    failure = caught(lambda: broken.recursion(0))
    assert failure.error == "RecursionError"
    assert failure.traceback.count("in recursion") <= MAX_FRAMES


def test_a_plugin_of_agentrl_is_named_by_its_own_line():
    trajectory = play(["hello"], agent="interaction_agent")
    assert trajectory.outcome is Outcome.ABORTED
    assert trajectory.failure.plugin == PluginId("agent", "interaction_agent")
    assert trajectory.failure.place.rpartition(":")[0].endswith("agents/interaction_agent.py")


def test_who_was_noted_first_is_to_blame():
    with (
        pytest.raises(ValueError, match="x") as caught_error,
        blaming("agent", "outer"),
        blaming("tool", "inner"),
    ):
        raise ValueError("x")
    assert failure_of(caught_error.value).plugin == PluginId("tool", "inner")


def test_a_message_is_one_line_of_bounded_length():
    failure = caught(lambda: (_ for _ in ()).throw(ValueError("a\n" * 1000)))
    assert "\n" not in str(failure)
    assert len(str(failure)) < 700


def caught(function) -> Failure:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever the function raises
        return failure_of(error)
    raise AssertionError("it did not raise")
