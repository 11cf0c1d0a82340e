"""agentrl.testing itself: scripted turns come out as they went in, and each contract notices who breaks
it.
"""

from __future__ import annotations

import asyncio
import unittest
from typing import Any, ClassVar

import pytest

from agentrl.errors import DataError, PluginError
from agentrl.plugins import (
    AgentLoop,
    Environment,
    Interaction,
    InteractionReply,
    Reward,
    RewardResult,
    Tool,
    ToolResult,
)
from agentrl.rollout.session import TrajectoryEnd
from agentrl.testing import Raw, Says, ScriptedModel, call, play, tiny_chat
from agentrl.testing.contracts import (
    AgentContract,
    EnvironmentContract,
    InteractionContract,
    RewardContract,
    RewardExample,
    ToolContract,
)
from agentrl.types import Outcome

# --------------------------------------------------------------------------------------------- scripted turns


def echo(text: str, times: int = 1, more: dict[str, Any] | None = None) -> str:
    """Repeat."""
    return f"{text * times}{more or ''}"


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "hi"},
        {"text": 'a "b" \n </tool_call>', "times": 2},
        {"text": "日本 🙂", "more": {"deep": [1, {"x": None}], "empty": {}}},
    ],
)
def test_calls_arrive_with_the_arguments_of_the_script(arguments) -> None:
    trajectory = play(
        [Says("first", (call("echo", **arguments), call("echo", text="2"))), "done"], tools=[echo]
    )
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    said = trajectory.messages[1]
    assert said.content == "first"
    assert [dict(one.arguments or {}) for one in said.tool_calls] == [arguments, {"text": "2"}]
    assert [message.content for message in trajectory.messages if message.role == "tool"] == [
        echo(**arguments),
        "2",
    ]


def test_raw_turns_are_sampled_exactly() -> None:
    trajectory = play([Raw('<tool_call>{"name": '), "done"], tools=[echo])
    sampled = tiny_chat().decode(trajectory.token_ids[trajectory.turn_ids == 0].tolist())
    assert sampled == '<tool_call>{"name": <|im_end|>'
    assert trajectory.metrics["num_tool_errors"] == 1


def test_a_script_may_be_a_function_of_turn_and_prompt() -> None:
    seen: list[tuple[int, bool]] = []

    def script(turn: int, prompt: str):
        seen.append((turn, "echoed" in prompt))
        return call("echo", text="echoed") if turn == 0 else "done"

    play(script, tools=[echo])
    assert seen == [(0, False), (1, True)]


def test_a_script_that_is_too_short_says_so() -> None:
    trajectory = play([call("echo", text="x")], tools=[echo])
    assert trajectory.outcome is Outcome.MODEL_ERROR
    assert "the script has 1 turn(s), and the agent asked for turn 2" in str(trajectory.failure)


def test_the_fixtures(play, agentrl_model, agentrl_chat) -> None:
    assert play(["hi"]).messages[-1].content == "hi"
    assert isinstance(agentrl_model(["hi"]), ScriptedModel)
    assert agentrl_chat is tiny_chat()


# --------------------------------------------------------------------------------------------- broken plugins


class Shared(Tool):
    """Sound; the classes below break one law each."""

    name: ClassVar[str] = "shared"
    description: ClassVar[str] = "A tool."
    parameters: ClassVar[dict] = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
    }

    async def call(self, arguments) -> ToolResult:
        return ToolResult(str(arguments["x"]))


class NoDescription(Shared):
    description = " "


class BadName(Shared):
    name = "no good"


class NoSchema(Shared):
    parameters: ClassVar[dict] = {"type": "object", "properties": {"x": {"type": "number?"}}}


class UnknownRequired(Shared):
    parameters: ClassVar[dict] = {"type": "object", "properties": {}, "required": ["y"]}


class AnythingGoes(Shared):
    parameters: ClassVar[dict] = {"type": "object", "properties": {}}


class Text(Shared):
    async def call(self, arguments):
        return "text"


class ClassState(Shared):
    seen: ClassVar[list] = []

    async def call(self, arguments) -> ToolResult:
        self.seen.append(arguments["x"])
        return ToolResult(str(len(self.seen)))


class Leaves(Shared):
    async def call(self, arguments) -> ToolResult:
        self.task = asyncio.create_task(asyncio.sleep(3600))
        return ToolResult("started")


class NeedsACall(Shared):
    async def call(self, arguments) -> ToolResult:
        self.file = 1
        return ToolResult("")

    async def close(self) -> None:
        del self.file


class Mutates(Shared):
    async def call(self, arguments) -> ToolResult:
        return ToolResult(str(arguments.pop("x", None)))


class NotFinite(Shared):
    async def call(self, arguments) -> ToolResult:
        return ToolResult("", reward=float("nan"))


TOOL_LAWS = [
    (NoDescription, "test_name_and_description"),
    (BadName, "test_name_and_description"),
    (NoSchema, "test_parameters_are_a_json_schema_of_an_object"),
    (UnknownRequired, "test_parameters_are_a_json_schema_of_an_object"),
    (AnythingGoes, "test_in_the_loop_wrong_arguments_never_reach_call"),
    (Text, "test_calls_return_results"),
    (NotFinite, "test_calls_return_results"),
    (ClassState, "test_state_belongs_to_one_trajectory"),
    (Leaves, "test_no_task_is_left_behind"),
    (NeedsACall, "test_it_can_be_closed_unused"),
    (Mutates, "test_the_arguments_are_left_as_they_are"),
]


@pytest.mark.parametrize(("broken", "law"), TOOL_LAWS, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_tool_fails_its_law(broken, law) -> None:
    suite = type("Suite", (ToolContract,), {"tool": broken, "valid_calls": [{"x": 1}]})
    with pytest.raises((AssertionError, AttributeError, PluginError, ValueError)):
        getattr(suite(), law)()
    sound = type("Suite", (ToolContract,), {"tool": Shared, "valid_calls": [{"x": 1}]})
    getattr(sound(), law)()


class Partner(Interaction):
    name: ClassVar[str] = "partner"

    async def respond(self, messages) -> InteractionReply:
        return InteractionReply("hm", is_done=False)


class Fragile(Partner):
    async def respond(self, messages) -> InteractionReply:
        return InteractionReply(messages[-1].content.split()[0], is_done=False)


class NoTruth(Partner):
    async def respond(self, messages) -> InteractionReply:
        return InteractionReply("hm", is_done=None)  # type: ignore[arg-type]


class Forgets(Partner):
    async def finalize(self) -> None:
        raise RuntimeError("cannot")


class Infinite(Partner):
    async def score(self) -> float:
        return float("inf")


class Accepts(Partner):
    async def start(self, **_) -> None:
        return


class Remembers(Partner):
    said: ClassVar[list] = []

    async def respond(self, messages) -> InteractionReply:
        self.said.append(1)
        return InteractionReply(str(len(self.said)), is_done=False)


INTERACTION_LAWS = [
    (Fragile, "test_odd_words_are_answered"),
    (NoTruth, "test_replies_are_replies"),
    (Infinite, "test_replies_are_replies"),
    (Forgets, "test_it_can_be_finalized_unused"),
    (Remembers, "test_state_belongs_to_one_trajectory"),
    (Accepts, "test_rows_that_make_no_sense_are_refused_at_the_start"),
]


@pytest.mark.parametrize(
    ("broken", "law"), INTERACTION_LAWS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_broken_interaction_fails_its_law(broken, law) -> None:
    suite = type(
        "Suite", (InteractionContract,), {"interaction": broken, "says": ["a"], "bad_kwargs": [{"x": 1}]}
    )
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        getattr(suite(), law)()


class Stock(Environment):
    """Its `close` needs what a complete `start` made."""

    name: ClassVar[str] = "stock"

    async def start(self, *, tea: int) -> None:
        self.left = {"tea": tea}

    async def close(self) -> None:
        self.left.clear()


class Look(Shared):
    name: ClassVar[str] = "look"

    async def call(self, arguments) -> ToolResult:
        return ToolResult(str(self.environment.left["tea"]))


class InStock(Reward):
    name: ClassVar[str] = "in_stock"

    def score(self, attempt) -> RewardResult:
        return RewardResult(float(attempt.environment.left["tea"]))


STOCK: dict[str, Any] = {"environment": Stock, "environment_kwargs": {"tea": 2}}


@pytest.mark.parametrize(
    "suite",
    [
        type("Suite", (ToolContract,), {"tool": Look, "valid_calls": [{"x": 1}], **STOCK}),
        type("Suite", (RewardContract,), {"reward": InStock, "examples": [RewardExample("a", 2.0)], **STOCK}),
    ],
)
def test_a_contract_gives_its_plugin_an_environment(suite) -> None:
    for law in [law for law in dir(suite) if law.startswith("test_")]:
        getattr(suite(), law)()


def test_a_close_that_raises_is_what_the_law_says() -> None:
    suite = type("Suite", (EnvironmentContract,), STOCK)
    with pytest.raises(
        AssertionError, match="`close` raised AttributeError: 'Stock' object has no attribute"
    ):
        suite().test_in_the_loop_a_start_past_its_deadline_is_closed_too()


@pytest.mark.parametrize(
    "suite",
    [
        type("Suite", (ToolContract,), {"tool": Shared, "valid_calls": ()}),
        type("Suite", (RewardContract,), {"reward": InStock, "examples": ()}),
    ],
)
def test_a_contract_without_examples_says_so_once(suite) -> None:
    failed = []
    for law in [law for law in dir(suite) if law.startswith("test_")]:
        try:
            getattr(suite(), law)()
        except unittest.SkipTest:
            continue
        except AssertionError as error:
            failed.append(str(error))
    assert len(failed) == 1
    assert failed[0].startswith("give at least one example")


class Exact(Reward):
    name: ClassVar[str] = "exact"

    def check(self, task) -> None:
        if task.ground_truth is None:
            raise DataError("no truth")

    def score(self, attempt) -> RewardResult:
        return RewardResult(float(attempt.answer == attempt.task.ground_truth))


class Raises(Exact):
    def score(self, attempt) -> RewardResult:
        return RewardResult(float(attempt.answer))


class Counts(Exact):
    calls: ClassVar[list] = []

    def score(self, attempt) -> RewardResult:
        self.calls.append(1)
        return RewardResult(float(len(self.calls) % 2))


class Careless(Exact):
    def check(self, task) -> None:
        return


class Bare(Exact):
    def score(self, attempt):
        return 1.0


class AsyncInThread(Exact):
    async def score(self, attempt):
        return RewardResult(1.0)


REWARD_LAWS = [
    (Raises, "test_odd_answers_are_scored"),
    (Counts, "test_the_same_attempt_gets_the_same_reward"),
    (Careless, "test_bad_rows_are_refused_before_anything_is_played"),
    (Bare, "test_examples_get_what_they_deserve"),
    (AsyncInThread, "test_scope_and_place_are_known"),
]


@pytest.mark.parametrize(("broken", "law"), REWARD_LAWS, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_reward_fails_its_law(broken, law) -> None:
    example = {"examples": [RewardExample("1", 1.0, "1")], "bad_rows": [{}]}
    with pytest.raises(AssertionError):
        getattr(type("Suite", (RewardContract,), {"reward": broken, **example})(), law)()
    getattr(type("Suite", (RewardContract,), {"reward": Exact, **example})(), law)()


class Loop(AgentLoop):
    name: ClassVar[str] = "loop"

    async def run(self, task, session) -> None:
        while True:
            turn = await session.generate()
            if not turn.tool_calls:
                return
            await session.call_tools(turn)


class Swallows(Loop):
    async def run(self, task, session) -> None:
        try:
            await super().run(task, session)
        except TrajectoryEnd:
            return


class GoesOn(Loop):
    async def run(self, task, session) -> None:
        while True:
            try:
                await session.generate()
            except TrajectoryEnd:
                continue


class Excuses(Loop):
    async def run(self, task, session) -> None:
        try:
            await super().run(task, session)
        except Exception:  # noqa: BLE001 - what is wrong with it
            await session.generate()


class IgnoresFinish(Loop):
    pass


AGENT_LAWS = [
    (Swallows, "test_it_ends_at_the_turn_limit"),
    (GoesOn, "test_it_ends_at_the_turn_limit"),
    (Excuses, "test_it_ends_when_a_tool_breaks"),
    (IgnoresFinish, "test_it_ends_when_a_tool_says_so"),
]


@pytest.mark.parametrize(("broken", "law"), AGENT_LAWS, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_agent_fails_its_law(broken, law) -> None:
    suite = type(
        "Suite",
        (AgentContract,),
        {"agent": broken, "turns": ["a"], "never_done": call("probe"), "tool_turn": call("probe")},
    )
    with pytest.raises(AssertionError):
        getattr(suite(), law)()
