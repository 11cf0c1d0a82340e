"""One trajectory: its tokens are the truth, its budgets hold, and whatever fails inside becomes its
outcome.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from typing import ClassVar

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.evaluation import EvalConfig
from agentrl.errors import ServerError, ToolError
from agentrl.plugins import AgentLoop, Reward, RewardResult, Tool, ToolResult
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.types import NO_VERSION, Lease, Message, Outcome
from parts.rewards import FEEDBACK


class Notebook(Tool):
    """Remembers within a trajectory; `do` says how to misbehave."""

    name: ClassVar[str] = "notebook"
    description: ClassVar[str] = "notes"
    parameters: ClassVar = {
        "type": "object",
        "properties": {"note": {"type": "string"}, "do": {"type": "string"}},
        "required": ["note"],
    }
    runtime = "trio"
    opened: ClassVar[list[str]] = []
    closed: ClassVar[list[str]] = []

    async def start(self, *, owner: str = "nobody") -> None:
        self.owner = owner
        self.notes: list[str] = []
        self.opened.append(owner)

    async def call(self, arguments) -> ToolResult:
        match arguments.get("do"):
            case "hang":
                await trio.sleep_forever()
            case "raise":
                raise RuntimeError("secret /path/of/host")
            case "break":
                raise ToolError("the notebook burned")
            case "slow":
                await trio.sleep(1)
        self.notes.append(arguments["note"])
        return ToolResult(f"{self.owner}: {' '.join(self.notes)}", reward=0.5, metrics={"notes": 1.0})

    async def close(self) -> None:
        await trio.sleep(0.1)
        self.closed.append(self.owner)


@pytest.fixture(autouse=True)
def _clean_notebook():
    Notebook.opened.clear()
    Notebook.closed.clear()


def note(stage, text: str, do: str = "") -> str:
    return stage.call("notebook", f'{{"note": "{text}", "do": "{do}"}}')


def check_tokens(trajectory, requests, *, num_prompt_tokens: int) -> None:
    """The laws that hold for every trajectory, whatever happened in it; `requests` are its own, in order."""
    mask, ids = trajectory.action_mask, trajectory.token_ids.tolist()
    for (earlier, sampled), (later, _) in itertools.pairwise(requests):
        assert later[: len(earlier) + len(sampled.token_ids)] == earlier + sampled.token_ids.tolist()
    last_prompt, last = requests[-1]
    assert ids == last_prompt + last.token_ids.tolist()
    for name, expected in (
        ("token_ids", "token_ids"),
        ("behavior_logprobs", "logprobs"),
        ("versions", "versions"),
    ):
        sampled_values = np.concatenate([getattr(generation, expected) for _, generation in requests])
        np.testing.assert_array_equal(getattr(trajectory, name)[mask], sampled_values)
    assert (trajectory.behavior_logprobs[~mask] == 0).all()
    assert (trajectory.versions[~mask] == NO_VERSION).all()
    assert (trajectory.turn_ids[~mask] == -1).all()
    assert sorted(set(trajectory.turn_ids[mask].tolist())) == list(range(len(requests)))
    assert (
        sum(message.role == "assistant" for message in trajectory.messages)
        == len(requests)
        == trajectory.metrics["num_turns"]
    )
    assert num_prompt_tokens == int(np.flatnonzero(mask)[0])


# ----------------------------------------------------------------------------------------------------- tokens


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.tuples(st.text("ab é<", max_size=12), st.integers(0, 3)), min_size=1, max_size=5),
    max_response=st.integers(1, 400),
    max_turn=st.none() | st.integers(1, 60),
)
def test_tokens_are_the_truth(stage, turns, max_response, max_turn):
    def script(turn, _):
        text, calls = turns[min(turn, len(turns) - 1)]
        return text + stage.call() * calls

    agent = {
        "max_turns": 4,
        "max_response_tokens": max_response,
        "max_turn_tokens": max_turn,
        "max_tool_calls_per_turn": 2,
    }
    world = stage.World(script, agent=agent)
    (trajectory,) = world.play(stage.task())
    prompt = len(world.client.requests[0][0])
    check_tokens(trajectory, world.client.requests, num_prompt_tokens=prompt)
    assert trajectory.num_tokens - prompt <= max_response
    assert trajectory.outcome in {Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.TURN_LIMIT}
    (event,) = trajectory.rewards
    assert event.position == np.flatnonzero(trajectory.action_mask)[-1]
    shown = stage.chat.decode(trajectory.token_ids.tolist())
    assert shown.count("<tool_response>") == sum(message.role == "tool" for message in trajectory.messages)


def test_a_calculation_is_played_and_scored(stage):
    world = stage.World(lambda turn, _: stage.call() if turn == 0 else "#### 42")
    (trajectory,) = world.play(stage.task())
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].content == "42"
    assert (trajectory.outcome, trajectory.reward, trajectory.failure) == (Outcome.COMPLETED, 1.0, None)
    assert trajectory.metrics["num_tool_calls"] == 1
    assert trajectory.metrics["accuracy"] == trajectory.metrics["reward/number/accuracy"] == 1.0
    assert trajectory.rewards[0].name == "number"


def test_context_that_does_not_fit_is_not_appended(stage):
    for max_response in range(30, 110, 3):
        world = stage.World(
            lambda turn, _: stage.call() if turn == 0 else "#### 42",
            agent={"max_response_tokens": max_response},
        )
        (trajectory,) = world.play(stage.task())
        roles = [message.role for message in trajectory.messages]
        # Either the answer of the tool was read by the model, or neither tokens nor messages have it.
        assert roles in (["user", "assistant"], ["user", "assistant", "tool", "assistant"])
        assert ("<tool_response>" in stage.chat.decode(trajectory.token_ids.tolist())) == ("tool" in roles)
        is_whole = (
            trajectory.messages[-1].content == "#### 42"
            and trajectory.token_ids[-1] == stage.chat.eos_token_ids[0]
        )
        assert trajectory.outcome is (Outcome.COMPLETED if is_whole else Outcome.TRUNCATED)


def test_a_turn_cut_by_its_own_limit_is_closed_and_the_talk_goes_on(stage):
    task = stage.task(agent="interaction_agent", interaction_kwargs={"name": "tutor", "ground_truth": "42"})
    world = stage.World(
        lambda turn, _: "well, let me think" if turn == 0 else "#### 42", agent={"max_turn_tokens": 8}
    )
    (trajectory,) = world.play(task)
    assert trajectory.outcome is Outcome.COMPLETED
    check_tokens(trajectory, world.client.requests, num_prompt_tokens=len(world.client.requests[0][0]))
    end = stage.chat.eos_token_ids[0]
    first_end = trajectory.token_ids.tolist().index(end, len(world.client.requests[0][0]))
    assert not trajectory.action_mask[first_end]  # the model did not sample the end of its cut turn


# ---------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("overlong", "kept"),
    [("truncate_left", "end"), ("truncate_right", "begin"), ("truncate_middle", "begin")],
)
def test_an_overlong_prompt_is_cut_as_configured(stage, overlong, kept):
    task = stage.task("begin " + "x" * 300 + " end", agent="single_turn_agent")
    world = stage.World(lambda *_: "hi", prompt=PromptLimits(64, overlong))
    (trajectory,) = world.play(task)
    assert len(world.client.requests[0][0]) <= 64
    assert kept in trajectory.messages[0].content
    assert trajectory.messages[0].content in stage.chat.decode(world.client.requests[0][0])


def test_an_overlong_prompt_is_refused_otherwise(stage):
    (trajectory,) = stage.World(lambda *_: "hi", prompt=PromptLimits(5, "filter")).play(stage.task())
    assert trajectory.outcome is Outcome.ABORTED
    assert "data.max_prompt_tokens is 5" in str(trajectory.failure)


def test_a_prompt_that_fills_the_context_is_no_wrong_answer(stage):
    world = stage.World(lambda *_: "hi", prompt=PromptLimits(2000, "filter"))
    (trajectory,) = world.play(stage.task("x" * 1500))
    assert (trajectory.outcome, trajectory.rewards) == (Outcome.ABORTED, ())
    assert "no room" in str(trajectory.failure)


# ------------------------------------------------------------------------------------------------------ tools


def test_parallel_calls_run_side_by_side_and_are_answered_in_order(stage):
    calls = note(stage, "a", "slow") + stage.call() + note(stage, "b", "slow")
    world = stage.World(
        lambda turn, _: calls if turn == 0 else "done",
        agent={"tools": ("calculator", "notebook")},
        plugins=[Notebook],
    )
    task = stage.task(tools_kwargs={"notebook": {"create_kwargs": {"owner": "me"}}})
    (trajectory,) = world.play(task)
    tools = [message for message in trajectory.messages if message.role == "tool"]
    assert [tool.name for tool in tools] == ["notebook", "calculator", "notebook"]
    assert [tool.tool_call_id for tool in tools] == [call.id for call in trajectory.messages[1].tool_calls]
    assert tools[1].content == "42"
    assert trajectory.metrics["tool_s"] == pytest.approx(1.0)  # not 2: side by side
    assert trajectory.metrics["notebook/notes"] == 2.0


def test_state_survives_and_is_closed_once(stage):
    world = stage.World(
        lambda turn, _: note(stage, str(turn)) if turn < 3 else "done",
        agent={"tools": ("notebook",)},
        plugins=[Notebook],
    )
    (trajectory,) = world.play(stage.task(tools_kwargs={"notebook": {"create_kwargs": {"owner": "me"}}}))
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["me: 0", "me: 0 1", "me: 0 1 2"]
    assert Notebook.opened == Notebook.closed == ["me"]


def test_a_tool_that_is_not_called_is_not_started(stage):
    world = stage.World(lambda *_: "hi", agent={"tools": ("notebook",)}, plugins=[Notebook])
    world.play(stage.task())
    assert Notebook.opened == Notebook.closed == []


@pytest.mark.parametrize(
    ("called", "answer"),
    [
        (
            '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
            "not run: unknown tool 'nope'; tools: calculator",
        ),
        ('<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>', "must be a JSON object"),
        (
            '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>',
            '"expression" is a required property; expected arguments: {',
        ),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": 5}}</tool_call>',
            'expression: 5 is not of type "string"',
        ),
        ("<tool_call>{oops</tool_call>", "not valid JSON"),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>',
            "error: division by zero",
        ),
    ],
)
def test_a_wrong_call_is_answered_with_what_would_be_right(stage, called, answer):
    world = stage.World(lambda turn, _: called if turn == 0 else "done")
    (trajectory,) = world.play(stage.task())
    assert answer in trajectory.messages[2].content
    assert trajectory.metrics["num_tool_errors"] == trajectory.metrics["num_tool_calls"] == 1
    assert trajectory.outcome is Outcome.COMPLETED


def test_calls_beyond_the_limit_are_answered_too(stage):
    world = stage.World(
        lambda turn, _: stage.call() * 4 if turn == 0 else "done", agent={"max_tool_calls_per_turn": 2}
    )
    (trajectory,) = world.play(stage.task())
    answers = [message.content for message in trajectory.messages if message.role == "tool"]
    assert answers == ["42", "42", *["not run: at most 2 tool calls per turn"] * 2]


def test_a_call_that_takes_too_long_is_answered(stage):
    agent = {"tools": ("notebook",), "tool_timeout_s": 3.0}
    world = stage.World(
        lambda turn, _: note(stage, "a", "hang") if turn == 0 else "done", agent=agent, plugins=[Notebook]
    )
    (trajectory,) = world.play(stage.task())
    assert trajectory.messages[2].content == "timed out after 3 s"
    assert trajectory.metrics["tool_s"] == pytest.approx(3.0)
    assert Notebook.closed == ["nobody"]


@pytest.mark.parametrize(("do", "failure"), [("raise", "RuntimeError"), ("break", "the notebook burned")])
def test_a_broken_tool_is_data_and_never_text_for_the_model(stage, do, failure):
    world = stage.World(
        lambda *_: note(stage, "a", "slow") + note(stage, "b", do),
        agent={"tools": ("notebook",)},
        plugins=[Notebook],
    )
    (trajectory,) = world.play(stage.task())
    assert (trajectory.outcome, trajectory.rewards) == (Outcome.TOOL_ERROR, ())
    assert failure in str(trajectory.failure)
    assert "\n" not in str(trajectory.failure)
    assert "secret" not in stage.chat.decode(trajectory.token_ids.tolist())
    assert Notebook.closed == ["nobody"]
    check_tokens(trajectory, world.client.requests, num_prompt_tokens=len(world.client.requests[0][0]))


def test_long_output_is_cut_in_the_middle(stage):
    world = stage.World(
        lambda turn, _: note(stage, "z" * 200) if turn == 0 else "done",
        agent={"tools": ("notebook",), "max_tool_output_tokens": 40},
        plugins=[Notebook],
    )
    (trajectory,) = world.play(stage.task())
    text = trajectory.messages[2].content
    assert text.startswith("nobody")
    assert "tokens cut ...]" in text
    assert len(stage.chat.encode(text)) <= 40


class Echo(Tool):
    """An asyncio tool, as users write them."""

    name: ClassVar[str] = "echo"
    description: ClassVar[str] = "echo"
    parameters: ClassVar = {"type": "object", "properties": {"text": {"type": "string"}}}
    log: ClassVar[list[str]] = []

    async def start(self, greeting: str) -> None:
        await asyncio.sleep(0)
        self.greeting = greeting

    async def call(self, arguments) -> ToolResult:
        try:
            if arguments["text"] == "hang":
                await asyncio.Event().wait()
            return ToolResult(
                await asyncio.wait_for(asyncio.sleep(0, f"{self.greeting} {arguments['text']}"), 5)
            )
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.log.append("closed")


def test_asyncio_tools_are_guests(stage):
    Echo.log.clear()
    said = stage.call("echo", '{"text": "you"}') + stage.call("echo", '{"text": "hang"}')
    world = stage.World(
        lambda turn, _: said if turn == 0 else "done",
        agent={"tools": ("echo",), "tool_timeout_s": 0.5},
        plugins=[Echo],
    )
    (trajectory,) = world.play(
        stage.task(tools_kwargs={"echo": {"create_kwargs": {"greeting": "hello"}}}), real_time=True
    )
    assert [m.content for m in trajectory.messages if m.role == "tool"] == [
        "hello you",
        "timed out after 0.5 s",
    ]
    assert Echo.log == ["cancelled", "closed"]


# --------------------------------------------------------------------------------------- interactions, limits


def test_the_partner_is_heard_until_it_is_done(stage):
    task = stage.task(agent="interaction_agent", interaction_kwargs={"name": "tutor", "ground_truth": "42"})
    world = stage.World(lambda turn, _: f"#### {40 + turn}")
    (trajectory,) = world.play(task)
    assert [m.content for m in trajectory.messages] == [
        "What is 6 * 7?",
        "#### 40",
        FEEDBACK,
        "#### 41",
        FEEDBACK,
        "#### 42",
    ]
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.metrics["reward/interaction"] == 1.0
    assert [event.name for event in trajectory.rewards] == ["number"]  # weight 0: reported only


def test_turn_rewards_lie_on_the_last_token_of_their_turn(stage):
    task = stage.task(agent="interaction_agent", interaction_kwargs={"name": "tutor", "ground_truth": "42"})
    world = stage.World(lambda turn, _: f"#### {41 + turn}", reward={"interaction_reward_weight": 0.5})
    (trajectory,) = world.play(task)
    first, second, final = trajectory.rewards
    ends = [int(np.flatnonzero(trajectory.turn_ids == turn)[-1]) for turn in (0, 1)]
    assert [(e.name, e.value, e.position) for e in (first, second)] == [
        ("interaction/tutor", 0.0, ends[0]),
        ("interaction/tutor", 0.5, ends[1]),
    ]
    assert (final.value, final.position) == (1.0, ends[1])


def test_a_tool_agent_plays_the_partner_of_its_row(stage):
    task = stage.task(interaction_kwargs={"name": "tutor", "ground_truth": "42"})
    world = stage.World(lambda turn, _: ["#### 1", stage.call(), "#### 42"][turn])
    (trajectory,) = world.play(task)
    assert [m.role for m in trajectory.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)


@pytest.mark.parametrize("agent", ["tool_agent", "interaction_agent"])
def test_the_turn_limit_is_an_outcome(stage, agent):
    task = stage.task(agent=agent, interaction_kwargs={"name": "tutor", "ground_truth": "42"})
    world = stage.World(
        lambda *_: stage.call() if agent == "tool_agent" else "#### 1", agent={"max_turns": 3}
    )
    (trajectory,) = world.play(task)
    assert (trajectory.outcome, trajectory.metrics["num_turns"]) == (Outcome.TURN_LIMIT, 3)
    assert trajectory.messages[-1].role == "assistant"
    assert len(trajectory.rewards) == 1


def test_a_single_turn_agent_sees_no_tools(stage):
    world = stage.World(lambda *_: "#### 42")
    (trajectory,) = world.play(stage.task(agent="single_turn_agent"))
    assert "calculator" not in stage.chat.decode(world.client.requests[0][0])
    assert trajectory.reward == 1.0


# --------------------------------------------------------------------------------------------------- failures


class Faulty(AgentLoop):
    name: ClassVar[str] = "faulty"

    async def run(self, task, session) -> None:
        await session.generate()
        match task.ability:
            case "raise":
                raise KeyError("no\nsuch")
            case "swallow":
                while True:
                    try:
                        await session.generate()
                    except Exception:  # noqa: BLE001 - what users write
                        return
            case "nursery":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.interact)
                    nursery.start_soon(self._break)
            case "hang":
                await trio.sleep_forever()

    async def _break(self) -> None:
        raise ServerError("gone")


class Silent(AgentLoop):
    name: ClassVar[str] = "silent"

    async def run(self, task, session) -> None:
        return


@pytest.mark.parametrize(
    ("ability", "outcome", "failure"),
    [
        ("raise", Outcome.ABORTED, "agent 'faulty' raised KeyError: 'no\\nsuch' (test_session.py:"),
        ("swallow", Outcome.TURN_LIMIT, None),
        ("nursery", Outcome.MODEL_ERROR, "gone"),
        ("hang", Outcome.TIMEOUT, "agent.trajectory_timeout_s=60 passed"),
    ],
)
def test_what_an_agent_loop_does_wrong_is_data(stage, ability, outcome, failure):
    world = stage.World(
        lambda *_: "hm", plugins=[Faulty], agent={"trajectory_timeout_s": 60.0, "max_turns": 3}
    )
    (trajectory,) = world.play(stage.task(agent="faulty", ability=ability))
    assert trajectory.outcome is outcome
    assert trajectory.failure is None if failure is None else str(trajectory.failure).startswith(failure)
    assert bool(trajectory.rewards) == (outcome is Outcome.TURN_LIMIT)
    check_tokens(trajectory, world.client.requests, num_prompt_tokens=len(world.client.requests[0][0]))


def test_an_agent_loop_that_says_nothing_is_not_scored(stage):
    (trajectory,) = stage.World(lambda *_: "hm", plugins=[Silent]).play(stage.task(agent="silent"))
    assert (trajectory.outcome, trajectory.rewards) == (Outcome.ABORTED, ())
    assert trajectory.num_tokens == 0


class Moody(Reward):
    name: ClassVar[str] = "moody"
    gate: ClassVar[threading.Event] = threading.Event()

    def score(self, attempt) -> RewardResult:
        task = attempt.task
        match task.ground_truth:
            case "raise":
                raise OSError("grader is down")
            case "hang":
                self.gate.wait()
        return RewardResult(float(task.ground_truth))


@pytest.mark.parametrize(
    ("truth", "failure"),
    [("raise", "grader is down"), ("nan", "finite numbers"), ("hang", "timed out after 5 s")],
)
def test_a_reward_that_fails_is_never_a_zero(stage, truth, failure):
    Moody.gate.clear()
    timeout = {"timeout_s": 5.0} if truth == "hang" else {}
    world = stage.World(lambda *_: "hm", plugins=[Moody], reward={"sources": {"sums": "moody"}, **timeout})

    async def release(manager):
        try:
            return await manager.play([Lease(0, stage.task(truth=truth), 1, 0)], EvalConfig())
        finally:
            Moody.gate.set()  # the thread would outlive the test

    (trajectory,) = world.run(release)
    assert (trajectory.outcome, trajectory.rewards) == (Outcome.REWARD_ERROR, ())
    assert failure in str(trajectory.failure)


def test_an_async_reward_runs_under_asyncio(stage, tmp_path):
    file = tmp_path / "async_reward.py"
    file.write_text(
        "import asyncio\nasync def compute_score(**row):\n    await asyncio.sleep(0)\n    return {'score': "
        "2, 'bonus': 1}\n"
    )
    world = stage.World(lambda *_: "hm", reward={"custom_function": {"path": str(file)}})
    (trajectory,) = world.play(stage.task())
    assert trajectory.reward == 2.0
    assert trajectory.metrics["reward/custom/bonus"] == 1.0


def test_prompt_messages_are_kept_as_given(stage):
    messages = (
        Message("system", "Be brief."),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
    )
    (trajectory,) = stage.World(lambda *_: "#### 42").play(stage.task(messages=messages))
    assert trajectory.messages[:4] == messages
    assert trajectory.metrics["num_turns"] == 1


# ---------------------------------------------------------------------------- plugins of the other event loop


class OfTheOtherLoop(Tool):
    """A trio tool that awaits asyncio code."""

    name: ClassVar[str] = "other_loop"
    description: ClassVar[str] = "waits"
    parameters: ClassVar = {"type": "object", "properties": {}}
    runtime = "trio"

    async def call(self, arguments) -> ToolResult:
        await asyncio.wait_for(asyncio.sleep(0), 1)
        return ToolResult("never")


class OfTrio(OfTheOtherLoop):
    name: ClassVar[str] = "of_trio"
    runtime = "asyncio"

    async def call(self, arguments) -> ToolResult:
        await trio.sleep(0.01)
        return ToolResult("never")


class Wrapped(OfTheOtherLoop):
    name: ClassVar[str] = "wrapped"

    @functools.wraps(OfTheOtherLoop.call)
    def call(self, arguments) -> ToolResult:
        return ToolResult("at once")


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (OfTheOtherLoop, "awaits asyncio code (test_session.py:"),
        (OfTheOtherLoop, 'but runs under trio: write `runtime = "asyncio"` in its class'),
        (OfTrio, 'but runs under asyncio: write `runtime = "trio"` in its class'),
        (Wrapped, "`call` returned ToolResult without being async, but is awaited: write `async def call`"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the coroutine that no loop took
def test_a_tool_of_the_other_event_loop_is_told_its_runtime(stage, tool, words):
    world = stage.World(
        lambda turn, _: stage.call(tool.name, "{}"), agent={"tools": (tool.name,)}, plugins=(tool,)
    )
    (trajectory,) = world.play(stage.task(), real_time=True)
    assert trajectory.outcome is Outcome.TOOL_ERROR
    assert words in str(trajectory.failure)


class AsyncioAgent(AgentLoop):
    """Awaits asyncio code in `wait`, in a nursery of its own or not."""

    name: ClassVar[str] = "asyncio_agent"
    wait = staticmethod(lambda: asyncio.sleep(1))

    async def run(self, task, session) -> None:
        await session.generate()
        if self.config.get("in_nursery"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.wait)
        await self.wait()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: asyncio.sleep(1),
        lambda: asyncio.sleep(0),
        lambda: asyncio.wait_for(asyncio.sleep(1), 1),
        lambda: asyncio.to_thread(print),
    ],
)
@pytest.mark.parametrize("in_nursery", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_asyncio_code_in_an_agent_is_told_the_cure(stage, wait, in_nursery):
    agent = type("Waiting", (AsyncioAgent,), {"wait": staticmethod(wait), "__module__": __name__})
    config = {"agent_config": {"asyncio_agent": {"in_nursery": in_nursery}}}
    world = stage.World(lambda turn, _: "hi", agent=config, plugins=(agent,))
    (trajectory,) = world.play(stage.task(agent="asyncio_agent"))
    assert trajectory.outcome is Outcome.ABORTED
    assert "agent 'asyncio_agent' awaits asyncio code" in str(trajectory.failure)
    assert "call it as `await session.run_asyncio(function, *args)`" in str(trajectory.failure)


def test_an_agent_without_its_tool_is_told_which(stage):
    needy = type(
        "Needy", (AsyncioAgent,), {"name": "needy", "required_tools": ("calculator",), "__module__": __name__}
    )
    world = stage.World(lambda turn, _: "hi", agent={"tools": ()}, plugins=(needy,))
    (trajectory,) = world.play(stage.task(agent="needy"))
    assert trajectory.outcome is Outcome.ABORTED
    assert (
        "agent 'needy' needs the tool 'calculator', but t:0 is offered none: write agent.tools=[calculator]"
        in str(trajectory.failure)
    )
