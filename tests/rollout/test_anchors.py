"""Anchors: equal where turns of a task were taken in the same state, and nowhere else; one per turn, whatever
becomes of the tokens.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.plugins import AgentLoop, Interaction, InteractionReply, Tool, ToolResult
from agentrl.rollout.anchors import anchor
from agentrl.types import Message

TEXT = st.text(max_size=3)
MESSAGES = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "tool"]), content=TEXT, name=st.none() | TEXT),
    max_size=3,
)
STATES = st.lists(TEXT, max_size=2)


@given(first=st.tuples(TEXT, MESSAGES, STATES), second=st.tuples(TEXT, MESSAGES, STATES))
def test_equal_states_and_no_others_have_equal_anchors(first, second):
    def state(task_id, messages, reported):
        return (
            (task_id, "reported", reported)
            if reported
            else (task_id, [(m.role, m.name, m.content) for m in messages])
        )

    assert (anchor(*first) == anchor(*second)) == (state(*first) == state(*second))
    assert -(2**63) <= anchor(*first) < 2**63


def test_what_is_said_to_be_the_state_is_never_taken_for_what_was_shown():
    shown = Message("user", "b", name="a")
    assert anchor("t", [shown], []) != anchor("t", [], ["user", "a", "b"])
    assert anchor("t", [], []) != anchor("t", [], [""])


def test_ids_of_calls_and_text_that_is_no_unicode_are_no_matter():
    one, other = (Message("tool", "4 \ud800", tool_call_id=call_id) for call_id in ("x", "y"))
    assert anchor("t", [one], []) == anchor("t", [other], []) != anchor("t", [Message("tool", "4 ?")], [])


class Maze(Tool):
    """Says which step it was, and reports where the walker stands: left and right take each other back."""

    name: ClassVar[str] = "maze"
    description: ClassVar[str] = "walk"
    parameters: ClassVar = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
    runtime = "trio"
    reports: ClassVar[bool] = True
    place: int = 0
    steps: int = 0

    async def call(self, arguments) -> ToolResult:
        self.place += arguments["by"]
        self.steps += 1
        return ToolResult(f"step {self.steps}", state=f"at {self.place}" if self.reports else None)


def walk(stage, steps, *, reports=True, **fields):
    """Return the attempt that calls the maze once per turn, and then stops."""
    lines = [stage.call("maze", f'{{"by": {step}}}') for step in steps]
    plugin = type("Maze", (Maze,), {"reports": reports, "__module__": __name__})
    world = stage.World(
        lambda turn, _: [*lines, "#### 42"][turn],
        agent={"tools": ("maze",), "max_turns": 9},
        plugins=[plugin],
    )
    [trajectory] = world.play(stage.task(**fields))
    assert len(trajectory.anchors) == trajectory.turn_ids.max() + 1 == len(steps) + 1
    return trajectory.anchors.tolist()


def test_a_tool_reports_the_state_that_turns_are_compared_by(stage):
    there_and_back = walk(stage, [1, -1, 1, 1])
    start, at_1, at_0, again_at_1, at_2 = there_and_back
    assert at_1 == again_at_1
    assert len({start, at_0, at_1, at_2}) == 4  # nobody says that the prompt is place 0
    assert walk(stage, [2, -1])[1:] == [at_2, at_1]
    assert walk(stage, [1], task_id="t:1")[0] != start


def test_without_a_report_the_state_is_what_the_model_was_shown(stage):
    assert walk(stage, [1, 1], reports=False) == walk(stage, [-5, 3], reports=False)  # "step 1", "step 2"
    assert len(set(walk(stage, [1, 1], reports=False))) == 3
    assert walk(stage, [1], reports=False)[0] == walk(stage, [1])[0]  # the prompt
    assert walk(stage, [1], reports=False)[1] != walk(stage, [1])[1]


class Guide(Interaction):
    """Answers by chance of wording, and reports the same state for all of it."""

    name: ClassVar[str] = "guide"
    runtime = "trio"
    asked: ClassVar[int] = 0

    async def respond(self, messages) -> InteractionReply:
        type(self).asked += 1
        return InteractionReply(f"word {self.asked}", is_done=False, state="the same")


def test_a_partner_reports_the_state_too(stage):
    world = stage.World(lambda *_: "hm", agent={"tools": (), "max_turns": 3}, plugins=[Guide])
    [trajectory] = world.play(stage.task(agent="interaction_agent", interaction_kwargs={"name": "guide"}))
    start, second, third = trajectory.anchors.tolist()
    assert second == third != start


class Prompter(AgentLoop):
    """Says the same twice, and then something else."""

    name: ClassVar[str] = "prompter"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        await session.generate()
        for text in ("go on", "go on", "stop"):
            session.add_user_message(text)
            await session.generate()


@pytest.mark.parametrize("sampled", ["hm", "quite something else"])
def test_what_the_policy_says_is_no_part_of_the_state(stage, sampled):
    world = stage.World(lambda *_: sampled, plugins=[Prompter], agent={"tools": ()})
    [trajectory] = world.play(stage.task(agent="prompter"))
    first = trajectory.anchors
    assert first[1] == first[2] != first[3]
    np.testing.assert_array_equal(first[0], anchor("t:0", stage.task().messages, []))
