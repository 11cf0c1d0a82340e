# ruff: noqa: RUF012 - the attributes of contracts are read, never written
"""The third party's own tests: the contract of each kind, and one played conversation."""

from agentrl.plugins import load_plugins
from agentrl.testing import call
from agentrl.testing.contracts import (
    AgentContract,
    InteractionContract,
    RewardContract,
    RewardExample,
    ToolContract,
)


class TestWordCount(ToolContract):
    tool = "word_count"
    valid_calls = [{"text": "one two"}]


class TestNotebook(ToolContract):
    tool = "notebook"
    valid_calls = [{"note": "buy milk"}, {"note": "sell it"}]
    create_kwargs = {"title": "Business"}


class TestTwentyQuestions(InteractionContract):
    interaction = "twenty_questions"
    interaction_kwargs = {"thing": "cat", "facts": ["purr"]}
    says = ["Does it purr?", "Is it a cat?"]
    bad_kwargs = [{}]


class TestTwoDrafts(AgentContract):
    agent = "two_drafts"
    turns = ["a draft", "a better draft"]
    tool_turn = call("probe")


class TestBrevity(RewardContract):
    reward = "brevity"
    config = {"max_words": 2}
    examples = [RewardExample("short", 1.0), RewardExample(["short", "not so short"], 0.0)]


def test_where_they_come_from():
    assert load_plugins().tools.source("word_count") == "acme-plugins 1.0: acme_plugins.word_count:word_count"


def test_all_together(play):
    trajectory = play(
        agent="tool_agent",
        tools=["notebook", "word_count"],
        interaction="twenty_questions",
        interaction_kwargs={"thing": "cat", "facts": ["purr"]},
        turns=[[call("notebook", note="a pet"), call("word_count", text="a b c")], "Does it purr?", "A cat!"],
        reward_config={"interaction_reward_weight": 1.0},
    )
    assert [message.content for message in trajectory.messages if message.role == "tool"] == [
        "Notes\na pet",
        "3",
    ]
    assert trajectory.messages[-2].content == "Yes."
    assert trajectory.reward == 0.9
    assert trajectory.metrics["twenty_questions/questions"] == 2.0
