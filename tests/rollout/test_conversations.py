"""Several conversations in one attempt: each has its own tokens, segments, tools and rewards."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.trajectories import decode, encode
from agentrl.plugins import AgentLoop, Reward, RewardResult
from agentrl.types import Message, Outcome

NAMES = ("main", "planner", "worker", "worker")
"""Of the conversations in the tests; the first is the session's own."""


class Several(AgentLoop):
    """Lets a conversation of NAMES speak for each entry of `plan`, (conversation, restarts before), with a
    reward for each turn.
    """

    name: ClassVar[str] = "several"
    uses_tools: ClassVar[bool] = False
    plan: ClassVar[list[tuple[int, bool]]] = []
    seen: ClassVar[list[tuple[int, int]]] = []

    async def run(self, task, session) -> None:
        self.seen.clear()
        opened = [session, *(session.conversation(n, [Message("user", f"I am {n}")]) for n in NAMES[1:])]
        for number, (which, restarts) in enumerate(self.plan):
            conversation = opened[which]
            if restarts:
                conversation.restart([Message("user", f"afresh {number}")])
            self.seen.append((conversation.num_context_tokens, conversation.num_tokens_left))
            await conversation.generate()
            conversation.add_reward("step", float(number))
            conversation.add_user_message(f"again {number}")


def play(stage, plan, words, **agent):
    Several.plan = list(plan)
    spoken = iter([f"said {index} " + "so " * count for index, count in enumerate(words)])
    options = {"tools": (), "max_turns": 20, **agent}
    world = stage.World(lambda turn, _: next(spoken), plugins=[Several], agent=options)
    (trajectory,) = world.play(stage.task(agent="several"))
    return trajectory, world.client.requests


def rows_of(trajectory) -> list[list[int]]:
    return [row.tolist() for row in np.split(trajectory.token_ids, trajectory.segment_starts[1:])]


@settings(max_examples=15)
@given(data=st.data(), max_response=st.integers(20, 150))
def test_each_conversation_is_what_the_model_saw_and_every_token_is_counted_once(stage, data, max_response):
    steps = st.tuples(st.integers(0, 3), st.booleans())
    plan = data.draw(st.lists(steps, min_size=1, max_size=6))
    words = data.draw(st.lists(st.integers(0, 9), min_size=len(plan), max_size=len(plan)))
    trajectory, requests = play(stage, plan, words, max_response_tokens=max_response)
    played = plan[: len(requests)]
    # Independently: the rows of each conversation, from what the servers were asked and answered.
    rows: list[tuple[int, list[int]]] = []
    open_row: dict[int, int] = {}
    for (which, restarts), (prompt, generation) in zip(played, requests, strict=True):
        whole = [*prompt, *generation.token_ids.tolist()]
        if which in open_row and not restarts:
            assert whole[: len(rows[open_row[which]][1])] == rows[open_row[which]][1]
            rows[open_row[which]] = (which, whole)
        else:
            open_row[which] = len(rows)
            rows.append((which, whole))
    assert rows_of(trajectory) == [row for _, row in rows]
    assert list(trajectory.segment_conversations) == [which for which, _ in rows]
    assert [one.name for one in trajectory.conversations] == list(NAMES)
    sampled = [(turn, token) for turn, (_, g) in enumerate(requests) for token in g.token_ids.tolist()]
    mask = trajectory.action_mask
    recorded = zip(trajectory.turn_ids[mask].tolist(), trajectory.token_ids[mask].tolist(), strict=True)
    assert sorted(recorded, key=lambda pair: pair[0]) == sampled
    assert trajectory.num_action_tokens == len(sampled) <= max_response
    assert trajectory.metrics["num_forks"] == len(rows) - len({which for which, _ in rows})
    for (context, left), (prompt, generation) in zip(Several.seen, requests, strict=False):
        assert context == len(prompt)
        assert len(generation.token_ids) <= left
    # Rewards lie on the last token of their turn; each part has the tokens and rewards of its conversation.
    steps_given = [event for event in trajectory.rewards if event.name == "agent/step"]
    assert [trajectory.turn_ids[event.position] for event in steps_given] == list(range(len(steps_given)))
    parts = AttemptFacts.of(trajectory).parts()
    assert sum(part.attempt.num_action_tokens for part in parts) == trajectory.num_action_tokens
    num_runs = len(AttemptFacts.of(trajectory).turns)
    assert sorted(run for part in parts for run in part.runs) == list(range(num_runs))
    for name in set(NAMES):
        own = [turn for turn, (which, _) in enumerate(played) if NAMES[which] == name]
        if own:
            metrics = trajectory.metrics
            # The row's own reward lies in the session's conversation, if that spoke.
            earned = sum(e.value for e in steps_given if trajectory.turn_ids[e.position] in own)
            extra = metrics[f"conversation/{name}/reward"] - earned
            assert extra == 0 or name == "main" or not any(which == 0 for which, _ in played)
            assert metrics[f"conversation/{name}/num_turns"] == len(own)
    (stored,) = decode(encode([trajectory]))
    assert stored.conversations == trajectory.conversations
    assert stored.segment_conversations == trajectory.segment_conversations


def test_rewards_see_the_sessions_own_conversation_and_all_others(stage):
    trajectory, _ = play(stage, [(1, False), (0, False), (2, False)], [1, 1, 1])
    assert [message.content.split(" so")[0] for message in trajectory.messages] == [
        *("What is 6 * 7?", "said 1")
    ]
    said = [[m.content.split(" so")[0] for m in one.messages] for one in trajectory.conversations]
    assert said == [["What is 6 * 7?", "said 1"], ["I am planner", "said 0"], ["I am worker", "said 2"], []]


def test_if_the_sessions_own_never_speaks_the_last_one_is_shown(stage):
    trajectory, _ = play(stage, [(1, False), (2, False)], [1, 1])
    assert [message.content.split(" so")[0] for message in trajectory.messages] == ["I am worker", "said 1"]
    assert trajectory.conversations[0].messages == ()


class Alone(AgentLoop):
    name: ClassVar[str] = "alone"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        await session.generate()


def test_an_attempt_with_one_conversation_stores_nothing_new(stage):
    world = stage.World(lambda turn, _: "hello", plugins=[Alone], agent={"tools": ()})
    (trajectory,) = world.play(stage.task(agent="alone"))
    assert trajectory.conversations == ()
    assert trajectory.segment_conversations == ()
    assert not any(name.startswith("conversation/") for name in trajectory.metrics)


class Helped(AgentLoop):
    """The planner has no tools; the worker has one."""

    name: ClassVar[str] = "helped"

    async def run(self, task, session) -> None:
        planner = session.conversation("planner", task.messages, tools=[])
        worker = session.conversation("worker", task.messages, tools=["calculator"])
        for conversation in (planner, worker):
            turn = await conversation.generate()
            await conversation.call_tools(turn)
            await conversation.generate()


def test_a_conversation_shows_and_runs_only_its_tools(stage):
    world = stage.World(
        lambda turn, _: stage.call() if turn == 0 else "done", plugins=[Helped], agent={"max_turns": 8}
    )
    (trajectory,) = world.play(stage.task(agent="helped"))
    planner, worker = trajectory.conversations[1:]
    assert [message.role for message in planner.messages] == ["user", "assistant", "assistant"]
    assert planner.messages[1].content == stage.call(), "without tools, a call is text"
    assert worker.messages[2].content == "42"
    prompts = [stage.chat.decode(prompt) for prompt, _ in world.client.requests]
    assert ["calculator" in prompt.partition("<|im_start|>user")[0] for prompt in prompts] == [
        *(False, False, True, True)
    ]


class Mistaken(AgentLoop):
    name: ClassVar[str] = "mistaken"
    act: ClassVar = None

    async def run(self, task, session) -> None:
        await session.generate()
        type(self).act(session, [Message("user", "x")])


MISTAKES = {
    "'main' is the session's own": lambda session, given: session.conversation("main", given),
    "a name has 1 to 64 letters": lambda session, given: session.conversation("a b", given),
    "pass a list of agentrl.types.Message": lambda session, given: session.conversation("a", ["x"]),
    "opponent 'old' has no server: set agent.opponents.old.model.path or agent.opponents.old.urls": (
        lambda session, given: session.conversation("a", given, opponent="old")
    ),
    "which did not speak: there is no token to reward": (
        lambda session, given: session.conversation("a", given).add_reward("r", 1.0)
    ),
    "opens a conversation with tools=['hammer']": (
        lambda session, given: session.conversation("a", given, tools=["hammer"])
    ),
}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_of_the_agent_is_one_line(stage, wrong):
    Mistaken.act = MISTAKES[wrong]
    world = stage.World(lambda turn, _: "hello", plugins=[Mistaken])
    (trajectory,) = world.play(stage.task(agent="mistaken"))
    assert trajectory.outcome is Outcome.ABORTED
    assert wrong in str(trajectory.failure)
    assert "\n" not in str(trajectory.failure)


class ZeroSum(Reward):
    """Gives what `values` says to conversations by name."""

    name: ClassVar[str] = "zero_sum"
    runs_in = "inline"
    values: ClassVar[dict[str, float]] = {}
    spoke: ClassVar[list[tuple[str, ...]]] = []

    def score(self, attempt) -> RewardResult:
        self.spoke.append(attempt.spoke)
        return RewardResult(0.5, {"accuracy": 1.0}, by_conversation=self.values)


def scored(stage, plan, values):
    Several.plan, ZeroSum.values = plan, values
    world = stage.World(
        lambda turn, _: f"turn {turn}",
        plugins=[Several, ZeroSum],
        agent={"tools": (), "max_turns": 9},
        reward={"sources": {"sums": "zero_sum"}},
    )
    (trajectory,) = world.play(stage.task(agent="several"))
    return trajectory


def test_rewards_by_conversation_lie_on_the_last_turn_of_each(stage):
    trajectory = scored(stage, [(1, False), (2, False), (1, False)], {"planner": 1.0, "worker": -1.0})
    placed = {trajectory.turn_ids[e.position]: e.value for e in trajectory.rewards if e.name == "zero_sum"}
    assert placed == {1: -1.0, 2: 1.0}
    assert trajectory.metrics["conversation/planner/reward"] == 1.0 + 0 + 2  # with those of the agent
    assert trajectory.metrics["reward/zero_sum"] == 0.5, "the value is only reported"
    assert ZeroSum.spoke[-1] == ("planner", "worker")


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"third": 1.0}, "'third', which does not exist; conversations: main, planner, worker"),
        ({"planner": 1.0}, "'planner', which did not speak, so there is no token to reward"),
    ],
)
def test_a_reward_for_nobody_is_a_reward_error(stage, values, wrong):
    trajectory = scored(stage, [(2, False)], values)
    assert trajectory.outcome is Outcome.REWARD_ERROR
    assert wrong in str(trajectory.failure)
    assert trajectory.rewards == ()
