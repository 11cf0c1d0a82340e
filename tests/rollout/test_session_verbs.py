"""What an agent loop may do with its session: whose reward lies on which turn, what ends an attempt, and what
is refused.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from agentrl.errors import PluginError
from agentrl.plugins import AgentLoop, Interaction, InteractionReply, Tool, ToolResult
from agentrl.rollout.ending import TrajectoryEnd
from agentrl.types import Outcome


class Judge(Tool):
    """Rewards a turn with the number that it is called with; 3 is final."""

    name: ClassVar[str] = "judge"
    description: ClassVar[str] = "judges"
    parameters: ClassVar = {"type": "object", "properties": {"n": {"type": "number"}}}
    runtime = "trio"

    async def call(self, arguments) -> ToolResult:
        number = arguments["n"]
        return ToolResult(
            f"got {number}",
            reward=number or None,
            metrics={"seen": number},
            is_error=number == 1,
            is_final=number == 3,
        )

    async def score(self) -> float | None:
        return 9.0


class Friend(Interaction):
    name: ClassVar[str] = "friend"
    runtime = "trio"

    async def respond(self, messages) -> InteractionReply:
        return InteractionReply("go on", is_done=len(messages) > 6, reward=0.25, metrics={"heard": 1.0})

    async def score(self) -> float | None:
        return 7.0


class Diary(AgentLoop):
    """Does what a test says, and keeps what it saw."""

    name: ClassVar[str] = "diary"
    plan: ClassVar = None

    async def run(self, task, session) -> None:
        await type(self).plan(session)


def play(stage, plan, said, *, partner=True, **agent):
    """Return the trajectory and, once it has ended, its session."""
    seen = []

    async def keeping(session) -> None:
        seen.append(session)
        await plan(session)

    diary = type("Diary", (Diary,), {"plan": staticmethod(keeping), "__module__": __name__})
    world = stage.World(
        lambda turn, _: said[turn], agent={"tools": ("judge",), **agent}, plugins=[Judge, Friend, diary]
    )
    own = {"interaction_kwargs": {"name": "friend"}} if partner else {}
    [trajectory] = world.play(stage.task(agent="diary", **own))
    return trajectory, seen[0]


def judge(stage, number) -> str:
    return stage.call("judge", f'{{"n": {number}}}')


def test_rewards_lie_on_the_turn_that_was_last_when_they_were_given(stage):
    async def plan(session) -> None:
        await session.call_tools(await session.generate())
        session.add_reward("early", 0.5)
        await session.call_tools(await session.generate())
        await session.interact()
        await session.generate()
        session.add_reward("late", 0.75)

    said = [judge(stage, 2) + judge(stage, 0), judge(stage, 1), "bye"]
    trajectory, session = play(stage, plan, said)
    given = [(r.source, r.name, r.value, r.turn) for r in session.turn_rewards]
    assert given == [
        ("tool", "judge", 2.0, 0),
        ("agent", "early", 0.5, 0),
        ("tool", "judge", 1.0, 1),
        ("interaction", "friend", 0.25, 1),
        ("agent", "late", 0.75, 2),
        ("tool", "judge", 9.0, 2),
        ("interaction", "friend", 7.0, 2),
    ]
    metrics = trajectory.metrics
    assert (metrics["num_tool_calls"], metrics["num_tool_errors"], metrics["num_turns"]) == (3.0, 1.0, 3.0)
    assert (metrics["num_forks"], metrics["num_calls/judge"]) == (0.0, 3.0)
    assert (sum(v for n, v in metrics.items() if n.endswith("seen")), trajectory.outcome) == (
        3.0,
        Outcome.COMPLETED,
    )
    assert sum(v for n, v in metrics.items() if n.endswith("heard")) == 1.0
    assert [m.content for m in trajectory.messages if m.role == "user"][1:] == ["go on"]
    assert session.num_action_tokens == trajectory.num_action_tokens


def test_a_final_answer_of_a_tool_stays_final(stage):
    """It is the first of two calls: the second does not take it back, nor does a later turn."""
    found = []

    async def plan(session) -> None:
        found.append(
            (session.is_finished, session.has_interaction, [t["function"]["name"] for t in session.tools])
        )
        turn = await session.generate()
        found.append(session.is_finished)
        answers = await session.call_tools(turn)
        found.append(session.is_finished)
        assert [(m.role, m.content, m.name) for m in answers] == [
            ("tool", "got 3", "judge"),
            ("tool", "got 0", "judge"),
        ]
        await session.call_tools(await session.generate())
        found.append(session.is_finished)

    play(stage, plan, [judge(stage, 3) + judge(stage, 0), judge(stage, 0)], partner=False)
    assert found == [(False, False, ["judge"]), False, True, True]


def test_nothing_goes_on_after_the_end(stage):
    """The turn limit ends the attempt, also for a loop that goes on."""
    ends = []

    async def plan(session) -> None:
        turn = await session.generate()
        for verb in (
            session.generate,
            lambda: session.run_tools(turn.tool_calls),
            session.interact,
            session.generate,
        ):
            with pytest.raises(TrajectoryEnd) as end:
                await verb()
            ends.append(end.value.outcome)
        with pytest.raises(TrajectoryEnd):
            session.add_user_message("one more")
        session.stop_at_turn_limit()

    trajectory, session = play(stage, plan, [judge(stage, 2)], max_turns=1)
    assert ends == [Outcome.TURN_LIMIT] * 4
    assert (trajectory.outcome, session.outcome) == (Outcome.TURN_LIMIT, Outcome.TURN_LIMIT)
    assert trajectory.metrics.get("num_tool_calls", 0.0) == 0.0
    assert len(trajectory.messages) == 2


@pytest.mark.parametrize(
    ("max_turn_tokens", "stops", "outcome"),
    [
        (200, False, Outcome.COMPLETED),
        (2, False, Outcome.TRUNCATED),
        (200, True, Outcome.TURN_LIMIT),
        (2, True, Outcome.TURN_LIMIT),
    ],
)
def test_why_an_attempt_stopped(stage, max_turn_tokens, stops, outcome):
    async def plan(session) -> None:
        await session.generate()
        if stops:
            session.stop_at_turn_limit()

    trajectory, _ = play(stage, plan, ["some words"], max_turn_tokens=max_turn_tokens)
    assert trajectory.outcome is outcome
    assert trajectory.num_action_tokens <= max_turn_tokens


def test_a_cut_turn_is_forgotten_with_the_next(stage):
    async def plan(session) -> None:
        assert (await session.generate()).is_truncated
        session.add_user_message("shorter")
        assert not (await session.generate()).is_truncated

    trajectory, _ = play(stage, plan, ["far too many words", "a"], max_turn_tokens=4)
    assert trajectory.outcome is Outcome.COMPLETED


def test_the_partner_is_asked_only_where_there_is_one_and_something_was_said(stage):
    async def early(session) -> None:
        with pytest.raises(PluginError, match="before its first `generate`"):
            await session.interact()
        await session.generate()
        assert (await session.interact()).text == "go on"

    async def alone(session) -> None:
        await session.generate()
        with pytest.raises(
            PluginError, match="t:0: the agent interacts, but the row has no interaction_kwargs"
        ):
            await session.interact()

    for plan, partner in ((early, True), (alone, False)):
        trajectory, session = play(stage, plan, ["hm"], partner=partner)
        assert (trajectory.outcome, session.has_interaction) == (Outcome.COMPLETED, partner)


@pytest.mark.parametrize(
    ("asked", "is_ignored"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_p": 1.0}, False),
        ({"temperature": 0.5}, True),
        ({"temperature": 1.0, "top_p": 0.9}, True),
        ({"temperature": 1.0, "seed": 0, "presence_penalty": 0.0}, False),
        ({"temperature": 1.0, "presence_penalty": 0.5}, True),
        ({"chat_template_kwargs": {}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
    ],
)
def test_sampling_other_than_the_runs_is_seen(stage, asked, is_ignored):
    async def plan(session) -> None:
        await session.generate()

    _, session = play(stage, plan, ["hm"])
    assert session.ignores(asked) is is_ignored
