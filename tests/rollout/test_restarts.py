"""A conversation that goes on from other messages: a new segment of the same attempt, within its budgets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plugins import AgentLoop
from agentrl.types import Message, Outcome
from parts.scripted import call
from parts.scripted import play as play_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "summary_agent.py"


class Forgetful(AgentLoop):
    """Speaks once per entry of `restarts`, and forgets everything before a True one."""

    name: ClassVar[str] = "forgetful"
    uses_tools: ClassVar[bool] = False
    restarts: ClassVar[list[bool]] = []
    seen: ClassVar[list[tuple[int, int]]] = []

    async def run(self, task, session) -> None:
        self.seen.clear()
        for number, restarts in enumerate(self.restarts):
            if restarts:
                session.restart([Message("user", f"afresh {number}")])
            self.seen.append((session.num_context_tokens, session.num_tokens_left))
            await session.generate()
            session.add_reward("step", float(number))
            session.add_user_message(f"again {number}")


def play(stage, restarts, words, **agent):
    Forgetful.restarts = list(restarts)
    spoken = iter([f"said {index} " + "so " * count for index, count in enumerate(words)])
    world = stage.World(lambda turn, _: next(spoken), plugins=[Forgetful], agent={"tools": (), **agent})
    (trajectory,) = world.play(stage.task(agent="forgetful"))
    return trajectory, world.client.requests


def rows_of(column: np.ndarray, trajectory) -> list[list]:
    return [row.tolist() for row in np.split(column, trajectory.segment_starts[1:])]


@settings(max_examples=15)
@given(data=st.data(), max_response=st.integers(20, 150))
def test_each_segment_is_what_the_model_saw_and_the_budgets_hold(stage, data, max_response):
    restarts = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))
    words = data.draw(st.lists(st.integers(0, 9), min_size=len(restarts), max_size=len(restarts)))
    trajectory, requests = play(stage, restarts, words, max_response_tokens=max_response)
    whole = [[*prompt, *generation.token_ids.tolist()] for prompt, generation in requests]
    # A request that the next one does not extend is the last of its segment.
    extended = [later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(whole)]
    lasts = [tokens for tokens, goes_on in zip(whole, [*extended, False], strict=True) if not goes_on]
    assert rows_of(trajectory.token_ids, trajectory) == lasts
    assert extended == [not restart for restart in restarts[1 : len(whole)]]
    for name, source in (("behavior_logprobs", "logprobs"), ("versions", "versions")):
        sampled = np.concatenate([getattr(generation, source) for _, generation in requests])
        np.testing.assert_array_equal(getattr(trajectory, name)[trajectory.action_mask], sampled)
    assert trajectory.num_action_tokens <= max_response
    assert max(map(len, lasts)) <= 512 + max_response
    for (context, left), (prompt, generation) in zip(Forgetful.seen, requests, strict=False):
        assert context == len(prompt)
        assert len(generation.token_ids) <= left
    if trajectory.outcome is Outcome.TRUNCATED:
        assert len(Forgetful.seen) > len(requests) or Forgetful.seen[-1][1] >= 1
    assert trajectory.metrics.get("num_restarts", 0) == sum(restarts[: len(Forgetful.seen)])


def test_rewards_and_messages_are_those_of_the_turns(stage):
    trajectory, _ = play(stage, [False, True, False], [1, 1, 1])
    steps = [event for event in trajectory.rewards if event.name == "agent/step"]
    assert [trajectory.turn_ids[event.position] for event in steps] == [0, 1, 2]
    assert [message.content.split(" so")[0] for message in trajectory.messages] == [
        *("afresh 1", "said 1", "again 1", "said 2")
    ]


class Ending(AgentLoop):
    name: ClassVar[str] = "ending"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        await session.generate()
        session.restart([Message("user", "nobody sees this")])


def test_a_restart_that_nothing_follows_changes_nothing(stage):
    world = stage.World(lambda turn, _: "hello", plugins=[Ending], agent={"tools": ()})
    (trajectory,) = world.play(stage.task(agent="ending"))
    assert [message.content for message in trajectory.messages] == ["What is 6 * 7?", "hello"]
    assert trajectory.segment_starts == (0,)
    assert trajectory.outcome is Outcome.COMPLETED


class Mistaken(AgentLoop):
    name: ClassVar[str] = "mistaken"
    uses_tools: ClassVar[bool] = False
    given: ClassVar[list] = []

    async def run(self, task, session) -> None:
        await session.generate()
        session.restart(self.given)


@pytest.mark.parametrize("given", [[], [{"role": "user", "content": "a"}]])
def test_a_restart_from_nothing_is_the_agents_failure(stage, given):
    Mistaken.given = given
    world = stage.World(lambda turn, _: "hello", plugins=[Mistaken], agent={"tools": ()})
    (trajectory,) = world.play(stage.task(agent="mistaken"))
    assert trajectory.outcome is Outcome.ABORTED
    assert "pass a list of agentrl.types.Message, at least one" in str(trajectory.failure)


def test_the_example_goes_on_from_its_own_notes():
    prompts = []

    def say(turn: int, prompt: str):
        prompts.append(prompt)
        if "Write down what you found out" in prompt:
            return "6*7 is 42"
        return "#### 42" if "Your notes so far" in prompt else call("calculator", expression="6*7")

    trajectory = play_script(
        say,
        agent="summary_agent",
        tools=["calculator"],
        plugins=[str(EXAMPLE)],
        agent_config={"summary_agent": {"max_context_tokens": 700}},
        max_turns=30,
    )
    assert trajectory.failure is None
    assert len(trajectory.segment_starts) == 2
    assert trajectory.outcome is Outcome.COMPLETED
    assert "What is the answer?\n\nYour notes so far:\n6*7 is 42" in prompts[-1]
    assert "<tool_call>\n{" not in prompts[-1].rpartition("Your notes")[2]
    sampled = [turn for turn in np.unique(trajectory.turn_ids) if turn >= 0]
    assert len(sampled) == len(prompts), "the notes are sampled turns like others"
