"""An attempt whose template edits the history: several rows, one trajectory, one reward, and a budget that
holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from agentrl.chat.chat import Chat
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tiny import build_tiny_tokenizer
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.controller.credit import credit
from agentrl.data.trajectories import decode, encode, from_ipc, to_ipc
from agentrl.learner.packing import pack
from agentrl.plugins import AgentLoop
from agentrl.types import Group, Outcome
from parts.trajectories import facts

SOURCE = (Path(__file__).parents[1] / "chat" / "templates" / "thinking.jinja").read_text()
THOUGHT = "<think>\nhm\n</think>\n\n"


class Talk(AgentLoop):
    """Generates three times, and a user speaks again in between."""

    name: ClassVar[str] = "talk"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        for number in range(3):
            await session.generate()
            session.add_reward("step", float(number))
            if number < 2:
                session.add_user_message(f"again {number}")


@pytest.fixture(scope="module")
def thinking_chat() -> Chat:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    ends = [tokenizer.token_to_id("<|im_end|>")]
    return Chat(tokenizer, ChatTemplate({"default": SOURCE}, {}), eos_token_ids=ends, tool_format="hermes")


def play(stage, chat, texts, **agent):
    world = stage.World(lambda turn, _: texts[turn], chat=chat, plugins=[Talk], agent={"tools": (), **agent})
    (trajectory,) = world.play(stage.task(agent="talk"))
    return trajectory, world.client.requests


def check_rows(trajectory, requests) -> None:
    """Each row is what the server saw and sampled last in it; every request's tokens stand in the row that it
    belongs to.
    """
    rows = np.split(trajectory.token_ids, trajectory.segment_starts[1:])
    turns = np.split(trajectory.turn_ids, trajectory.segment_starts[1:])
    for row, turn_ids in zip(rows, turns, strict=True):
        sampled = sorted(set(turn_ids[turn_ids >= 0].tolist()))
        assert sampled, "a row without a turn"
        assert turn_ids[0] == -1
        for turn in sampled:
            prompt, generation = requests[turn]
            whole = [*prompt, *generation.token_ids.tolist()]
            assert row[: len(whole)].tolist() == whole
            assert np.flatnonzero(turn_ids == turn).tolist() == list(range(len(prompt), len(whole)))
        assert len(row) == len(whole)
    for name, source in (("behavior_logprobs", "logprobs"), ("versions", "versions")):
        values = np.concatenate([getattr(generation, source) for _, generation in requests])
        np.testing.assert_array_equal(getattr(trajectory, name)[trajectory.action_mask], values)


def test_thinking_that_is_stripped_begins_rows(stage, thinking_chat):
    trajectory, requests = play(stage, thinking_chat, [THOUGHT + "one", THOUGHT + "two", THOUGHT + "three"])
    check_rows(trajectory, requests)
    assert trajectory.outcome is Outcome.COMPLETED
    assert (
        len(trajectory.segment_starts),
        trajectory.metrics["num_forks"],
        trajectory.metrics["num_turns"],
    ) == (3, 2.0, 3.0)
    rows = np.split(trajectory.token_ids, trajectory.segment_starts[1:])
    assert [thinking_chat.decode(row.tolist()).count("<think>") for row in rows] == [1, 1, 1]
    assert [message.reasoning.strip() for message in trajectory.messages if message.role == "assistant"] == [
        "hm"
    ] * 3


def test_only_what_is_edited_begins_a_row(stage, thinking_chat):
    trajectory, requests = play(stage, thinking_chat, ["one", THOUGHT + "two", "three"])
    check_rows(trajectory, requests)
    assert (len(trajectory.segment_starts), trajectory.metrics["num_forks"]) == (2, 1.0)
    trajectory, requests = play(stage, thinking_chat, ["one", "two", "three"])
    check_rows(trajectory, requests)
    assert (trajectory.segment_starts, trajectory.metrics["num_forks"]) == ((0,), 0.0)


def test_rewards_find_their_turns_in_whichever_row_they_are(stage, thinking_chat):
    trajectory, _ = play(stage, thinking_chat, [THOUGHT + "one", THOUGHT + "two", THOUGHT + "three"])
    steps = [event for event in trajectory.rewards if event.name == "agent/step"]
    assert [trajectory.turn_ids[event.position] for event in steps] == [0, 1, 2]
    last = next(event for event in trajectory.rewards if event.name == "number")
    assert last.position == trajectory.num_tokens - 1


def test_rows_travel_to_the_learner_as_segments_of_one_sequence(stage, thinking_chat):
    texts = [THOUGHT + "one", THOUGHT + "two", "three"]
    trajectory, requests = play(stage, thinking_chat, texts)
    (arrived,) = decode(from_ipc(to_ipc(encode([trajectory]))))
    other = arrived.replace(member=1, rewards=())
    group = facts(Group(arrived.group_id, (arrived, other)))
    [samples] = credit(group, AlgorithmConfig(), group_size=2)
    [[microbatch]] = pack([ref.load() for ref in samples], max_tokens=10_000, world_size=1)
    prompts = [len(prompt) + len(generation.token_ids) for prompt, generation in requests]
    assert microbatch.segment_lengths.tolist() == prompts * 2
    assert microbatch.num_sequences == 2
    for place in (0, 1):
        own = microbatch.sequence_ids == place
        assert len(set(microbatch.advantages[own].tolist())) == 1
        np.testing.assert_array_equal(microbatch.targets[own], arrived.token_ids[arrived.action_mask])
    assert microbatch.predictor_positions.min() > 0


@settings(max_examples=40)
@given(
    thinks=st.lists(st.booleans(), min_size=3, max_size=3),
    words=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    max_response=st.integers(1, 120),
)
def test_the_budget_holds_in_each_row_and_for_what_is_sampled_in_all(
    stage, thinking_chat, thinks, words, max_response
):
    texts = [THOUGHT * thought + "so " * count for thought, count in zip(thinks, words, strict=True)]
    trajectory, requests = play(stage, thinking_chat, texts, max_response_tokens=max_response)
    check_rows(trajectory, requests)
    prompt = len(requests[0][0])
    lengths = np.diff([*trajectory.segment_starts, trajectory.num_tokens])
    assert lengths.max() <= prompt + max_response
    assert trajectory.num_response_tokens == lengths.max() - prompt <= max_response
    assert trajectory.num_action_tokens <= max_response
    assert trajectory.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED)
