"""The text of functions with verl's signature: what verl decodes, in every kind of attempt."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from tokenizers import AddedToken

from agentrl.chat.chat import Chat
from agentrl.chat.template import ChatTemplate
from agentrl.chat.tiny import TEMPLATE_FILE, build_tiny_tokenizer
from agentrl.plugins import AgentLoop, Interaction, InteractionReply
from agentrl.rollout.decoded_response import decoded_response
from agentrl.types import Message, ToolCall
from parts.scripted import Raw, play, tiny_chat
from parts.trajectories import make_trajectory

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "75*35"}}</tool_call>'
FUNCTIONS = '''
import re

def told(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.0, "text": solution_str}

def shaping(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's gsm8k_toolcall_shaping: 1 for the right number after ####, and 0.1 for a call."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return float(bool(found) and found[-1] == ground_truth) + 0.1 * ("<tool_call>" in solution_str)

def own_words(data_source, solution_str, ground_truth, extra_info=None):
    own = re.sub(r"<tool_response>.*?</tool_response>", "", solution_str, flags=re.DOTALL)
    return float(ground_truth in own)
'''
TALK = "<think>\nhm\n</think>\n\n"
TEMPLATE = (Path(__file__).parents[1] / "chat" / "templates" / "thinking.jinja").read_text()


@pytest.fixture
def functions(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return lambda name: f"{file}:{name}"


def text_of(trajectory) -> str:
    return trajectory.extra_info["reward_details"]["told"]["text"]


def called(functions, name, *turns, **options):
    return play(list(turns), tools=["calculator"], reward=functions(name), ground_truth="2625", **options)


def test_it_is_the_response_as_verl_decodes_it(functions):
    trajectory = called(functions, "told", CALL, "#### 2625")
    first = int(trajectory.action_mask.argmax())
    response = trajectory.token_ids[first:].tolist()
    assert text_of(trajectory) == tiny_chat().decode(response, skip_special=True)
    assert text_of(trajectory) == (f"{CALL}\nuser\n<tool_response>2625</tool_response>\nassistant\n#### 2625")


@pytest.mark.parametrize("runs_in", ["thread", "process"])
@pytest.mark.parametrize(("scope", "reward"), [("trajectory", 1.1), ("messages", 1.0)])
def test_a_reward_for_calls_is_paid_unless_the_text_is_of_messages(functions, scope, reward, runs_in):
    path, _, name = functions("shaping").rpartition(":")
    config = {"custom_function": {"path": path, "name": name, "runs_in": runs_in}}
    if scope == "messages":
        config["solution_str"] = "messages"
    trajectory = play([CALL, "#### 2625"], tools=["calculator"], ground_truth="2625", reward_config=config)
    assert trajectory.reward == pytest.approx(reward)


def test_what_a_tool_answers_is_not_paid_as_the_models_words(functions):
    assert called(functions, "own_words", CALL, "I do not know.").reward == 0.0
    messages = {"solution_str": "messages"}
    assert called(functions, "own_words", CALL, "I do not know.", reward_config=messages).reward == 1.0


def test_special_tokens_vanish_and_other_tags_stay():
    chat = tiny_chat()
    sampled = chat.encode("<|im_start|><tool_call>a</tool_call><|im_end|>")
    trajectory = make_trajectory([-1, *[0] * len(sampled)])
    trajectory = trajectory.replace(token_ids=np.array([0, *sampled], np.int32))
    assert decoded_response(trajectory, (), chat) == "<tool_call>a</tool_call>"


# ------------------------------------------------------------------------------------ segments, conversations


class Talk(AgentLoop):
    """Generates three times, and a user speaks again in between."""

    name: ClassVar[str] = "talk_of_thoughts"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        for number in range(3):
            await session.generate()
            if number < 2:
                session.add_user_message(f"again {number}")


@pytest.fixture(scope="module")
def thinking_chat() -> Chat:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    ends = [tokenizer.token_to_id("<|im_end|>")]
    return Chat(tokenizer, ChatTemplate({"default": TEMPLATE}, {}), eos_token_ids=ends, tool_format="hermes")


def test_a_fork_adds_what_follows_the_history_that_it_repeats(functions, thinking_chat):
    turns = ["one", "two", "three"]
    thought = [Raw(TALK + turn) for turn in turns]
    forked = play(thought, agent=Talk, reward=functions("told"), chat=thinking_chat)
    assert forked.metrics["num_forks"] == 2.0
    plain = play([Raw(turn) for turn in turns], agent=Talk, reward=functions("told"), chat=thinking_chat)
    assert plain.metrics["num_forks"] == 0.0
    assert text_of(forked).replace(TALK, "") == text_of(plain)
    assert text_of(forked).count("hm") == 3


class Restarting(AgentLoop):
    """Answers, sums the answer up, and goes on from the summary."""

    name: ClassVar[str] = "restarting"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        turn = await session.generate()
        session.restart([Message("user", f"So far: {turn.message.content}.")])
        await session.generate()


def test_what_an_agent_restarts_from_is_a_prompt(functions):
    trajectory = play(["first", "second"], agent=Restarting, reward=functions("told"))
    assert text_of(trajectory) == "first\nsecond"


class Beside(AgentLoop):
    """Asks in a conversation of its own before it answers."""

    name: ClassVar[str] = "beside"
    uses_tools: ClassVar[bool] = False

    async def run(self, task, session) -> None:
        await session.conversation("helper", [Message("user", "help")]).generate()
        if task.extra_info.get("answers", True):
            await session.generate()


@pytest.mark.parametrize(("answers", "text"), [(True, "mine"), (False, "helped")])
def test_it_is_the_conversation_that_the_messages_show(functions, answers, text):
    trajectory = play(
        ["helped", "mine"][: 1 + answers],
        agent=Beside,
        reward=functions("told"),
        extra_info={"answers": answers},
    )
    assert text_of(trajectory) == text
    assert trajectory.messages[-1].content == text


def test_messages_without_tokens_are_written_with_tags():
    calls = (ToolCall("1", "f", {"a": 1}),)
    response = (Message("assistant", "so", calls), Message("tool", "2"), Message("assistant", "3"))
    trajectory = make_trajectory([-1, 0])
    trajectory = trajectory.replace(token_ids=np.full(2, -1, np.int32))
    assert decoded_response(trajectory, response, tiny_chat()) == (
        'so\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        "<tool_response>\n2\n</tool_response>\n3"
    )


# ---------------------------------------------------------------------------------------------- without tools


class Hears(Interaction):
    """Notes what it hears."""

    name: ClassVar[str] = "hears"
    heard: ClassVar[list[str]] = []

    async def respond(self, messages):
        self.heard.append(messages[-1].content)
        return InteractionReply("go on", is_done=len(messages) > 2)


@pytest.mark.parametrize(
    "said",
    [
        f"<thinking>I list.</thinking>\n{CALL}",
        f"{CALL} and <tool_call>{{broken",
        "before <tool_call>\n[1, 2]</tool_call> after",
    ],
)
def test_without_tools_text_that_looks_like_a_call_is_text(functions, said):
    Hears.heard.clear()
    trajectory = play([said, "done"], agent="interaction_agent", interaction=Hears, reward=functions("told"))
    assert Hears.heard == [said, "done"]
    assert [message.tool_calls for message in trajectory.messages] == [()] * 4
    assert text_of(trajectory).startswith(said)
    assert trajectory.metrics["num_tool_calls"] == 0.0


def test_without_tools_special_tokens_of_the_text_stay_but_not_the_end_of_the_turn():
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<call>", special=True)])
    tiny = tiny_chat()
    template = ChatTemplate({"default": TEMPLATE_FILE.read_text()}, {})
    chat = Chat(tokenizer, template, eos_token_ids=tiny.eos_token_ids, tool_format="hermes")
    conversation = chat.open([Message("user", "q")], ())
    conversation.next_prompt()
    message = conversation.add_generation(chat.encode("<call>f()<|im_end|>"), is_truncated=False)
    assert message.content == "<call>f()"
