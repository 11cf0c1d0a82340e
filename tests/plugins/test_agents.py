"""The built-in agent loops: what they play, and how each comes to an end.

Their contract is in test_contracts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import jsonschema_rs
import pytest

from agentrl.errors import PluginError
from agentrl.plugins import AGENT_ALIASES, Interaction, InteractionReply, load_plugins, tools_for
from agentrl.rollout.shared_tools import validator
from agentrl.types import Message, Outcome, Task
from parts.scripted import Raw, call, play

PLUGINS = load_plugins()
SUM = call("calculator", expression="6*7")


OWN = {"single_turn_agent", "tool_agent", "interaction_agent"}
"""Agents of the core."""


@pytest.mark.parametrize(("alias", "name"), [pair for pair in AGENT_ALIASES.items() if pair[1] in OWN])
def test_short_names_stand_for_agents(alias, name):
    assert PLUGINS.agents.get(alias) is PLUGINS.agents.get(name)


def test_only_agents_that_use_tools_are_offered_some():
    task = Task("t", "s", (Message("user", "q"),), "a", tools_kwargs={"calculator": {}, "mine": {}})
    offered = {name: tools_for(task, PLUGINS.agents.get(name), ("calculator",)) for name in OWN}
    users = {"tool_agent", "interaction_agent"}
    assert all(tools == (("calculator", "mine") if name in users else ()) for name, tools in offered.items())


def test_a_tool_without_a_schema_is_named():
    broken = type(
        "Broken", (PLUGINS.tools.get("calculator"),), {"name": "broken", "parameters": {"type": "objekt"}}
    )
    with pytest.raises(PluginError, match="tool 'broken': `parameters` is not a JSON schema") as caught:
        validator(broken)
    assert isinstance(caught.value.__cause__, jsonschema_rs.ValidationError)


def roles(trajectory) -> str:
    """Return the conversation as initials: u(ser) a(ssistant) t(ool) s(ystem)."""
    return "".join(message.role[0] for message in trajectory.messages)


class Critic(Interaction):
    """Rewards every answer, and is done when it has given `limit` of them."""

    name: ClassVar[str] = "critic"
    runtime = "trio"

    async def start(self, *, limit: int = 100) -> None:
        self.left = limit

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        self.left -= 1
        return InteractionReply("and?", is_done=not self.left, reward=1.0)


# -------------------------------------------------------------------------------- tool and interaction agents


@pytest.mark.parametrize(
    ("turns", "settings", "conversation", "outcome"),
    [
        (["42"], {}, "ua", "completed"),
        ([SUM, "42"], {}, "uata", "completed"),
        ([[SUM, SUM], "42"], {}, "uatta", "completed"),
        ([call("finish", answer="42")], {}, "ua", "completed"),
        ([SUM, call("finish", answer="42")], {"max_turns": 2}, "uata", "completed"),
        ([SUM, SUM], {"max_turns": 2}, "uata", "turn_limit"),
        ([Raw('<tool_call>{"name": broken</tool_call>'), "42"], {}, "uata", "completed"),
        (["a long answer " * 40], {"max_response_tokens": 20}, "ua", "truncated"),
        ([SUM, "42"], {"max_turn_tokens": 12, "max_turns": 1}, "ua", "turn_limit"),
    ],
    ids=[
        "no call",
        "call",
        "parallel",
        "finish",
        "finish last",
        "turns",
        "broken",
        "tokens",
        "cut call in the last turn",
    ],
)
def test_every_end_of_the_tool_agent(turns, settings, conversation, outcome):
    trajectory = play(turns, tools=["calculator", "finish"], **settings)
    assert (roles(trajectory), trajectory.outcome) == (conversation, Outcome(outcome)), trajectory.failure


HEARD = [
    ({}, 2, "uaua", "completed"),
    ({"max_turns": 2}, 100, "uaua", "turn_limit"),
    ({"max_turns": 2}, 2, "uaua", "completed"),
    ({"max_user_turns": 1}, 100, "uaua", "turn_limit"),
    ({"max_user_turns": 0}, 100, "ua", "turn_limit"),
    ({"max_user_turns": 1}, 2, "uaua", "completed"),
]


@pytest.mark.parametrize("agent", ["tool_agent", "interaction_agent"])
@pytest.mark.parametrize(("settings", "limit", "conversation", "outcome"), HEARD)
def test_the_partner_hears_every_answer_also_the_last(agent, settings, limit, conversation, outcome):
    check_that_the_partner_hears(agent, settings, limit, conversation, outcome)


def check_that_the_partner_hears(agent, settings, limit, conversation, outcome):
    trajectory = play(
        lambda turn, prompt: "Final Answer: 42",
        agent=agent,
        interaction=Critic,
        interaction_kwargs={"limit": limit},
        reward_config={"interaction_reward_weight": 1.0},
        **settings,
    )
    assert roles(trajectory).lstrip("s") == conversation
    assert trajectory.outcome == Outcome(outcome), trajectory.failure
    assert trajectory.reward == conversation.count("a"), "one verdict for each answer"


def test_tools_and_a_partner_in_one_conversation():
    trajectory = play(
        [SUM, "it is 43", SUM, "it is 42"],
        agent="interaction_agent",
        tools=["calculator"],
        interaction=Critic,
        interaction_kwargs={"limit": 2},
        max_user_turns=1,
    )
    assert (roles(trajectory), trajectory.outcome) == ("uatauata", Outcome.COMPLETED), trajectory.failure


def test_the_interaction_agent_refuses_a_row_without_partner():
    trajectory = play(["42"], agent="interaction_agent")
    assert trajectory.outcome is Outcome.ABORTED
    assert "needs interaction_kwargs" in str(trajectory.failure)
