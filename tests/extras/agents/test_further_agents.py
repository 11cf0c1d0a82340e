"""ReAct and the example of an agent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.extras.agents.react_agent import NO_STEP, Action, FinalAnswer, Malformed, parse_step
from agentrl.plugins import AGENT_ALIASES, load_plugins, tools_for
from agentrl.testing import call, play
from agentrl.types import Message, Outcome, Task
from plugins.test_agents import HEARD, OWN, check_that_the_partner_hears

PLUGINS = load_plugins()
SUM = call("calculator", expression="6*7")


def roles(trajectory) -> str:
    """Return the conversation as initials: u(ser) a(ssistant) t(ool) s(ystem)."""
    return "".join(message.role[0] for message in trajectory.messages)


@pytest.mark.parametrize(("alias", "name"), [pair for pair in AGENT_ALIASES.items() if pair[1] not in OWN])
def test_short_names_stand_for_agents(alias, name):
    assert PLUGINS.agents.get(alias) is PLUGINS.agents.get(name)


def test_only_agents_that_use_tools_are_offered_some():
    task = Task("t", "s", (Message("user", "q"),), "a", tools_kwargs={"calculator": {}, "mine": {}})
    agents = {name: PLUGINS.agents.get(name) for name in PLUGINS.agents.names() if name not in OWN}
    offered = {name: tools_for(task, agent, ("calculator",)) for name, agent in agents.items()}
    users = {"react_agent", "math_expression"}
    assert all(tools == (("calculator", "mine") if name in users else ()) for name, tools in offered.items())


@pytest.mark.parametrize(("settings", "limit", "conversation", "outcome"), HEARD)
def test_the_partner_hears_every_answer_also_the_last(settings, limit, conversation, outcome):
    check_that_the_partner_hears("react_agent", settings, limit, conversation, outcome)


# ------------------------------------------------------------------------------------------------------ ReAct

SCHEMAS = [PLUGINS.tools.get("calculator")().schema()]


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (
            'Thought: t\nAction: calculator\nAction Input: {"expression": "6*7"}',
            Action("calculator", {"expression": "6*7"}),
        ),
        (
            'Action: `calculator`\nAction Input:\n```json\n{"expression":\n "6*7"}\n```',
            Action("calculator", {"expression": "6*7"}),
        ),
        ("Action: calculator\nAction Input: 6*7", Action("calculator", {"expression": "6*7"})),
        ("Action: calculator\nAction Input: 42", Action("calculator", {"expression": "42"})),
        ('Action: calculator\nAction Input: "6*7"', Action("calculator", {"expression": "6*7"})),
        ("action: calculator\nACTION INPUT: {}\nObservation: 42\nFinal Answer: 42", Action("calculator", {})),
        ("Thought: done\nFinal Answer: 42\nreally", FinalAnswer("42\nreally")),
        ("Final Answer: 42\nAction: calculator\nAction Input: {}", FinalAnswer("42")),
        ("Final Answer:", FinalAnswer("")),
        ("Action: calculator", Malformed("`Action:` is not followed by `Action Input:`")),
        ("Action: unknown\nAction Input: 6*7", Malformed("`Action Input:` is not a JSON object")),
        ('Action: unknown\nAction Input: {"a": NaN}', Malformed("`Action Input:` is not a JSON object")),
        (
            'Action: unknown\nAction Input: {"a": "\\ud800"}',
            Malformed("`Action Input:` is not a JSON object"),
        ),
        ("Action: unknown\nAction Input: {}", Action("unknown", {})),
        ("Observation: 42\nFinal Answer: 42", Malformed(NO_STEP)),
        ("The answer is 42.", Malformed(NO_STEP)),
        ("", Malformed(NO_STEP)),
    ],
)
def test_steps_of_react(text, step):
    assert parse_step(text, SCHEMAS) == step


PIECES = [
    "Thought:",
    "Action:",
    "Action Input:",
    "Observation:",
    "Final Answer:",
    "```json\n",
    "```",
    "{",
    "}",
    "[" * 5000,
    "\n",
]


@given(
    st.lists(
        st.sampled_from(PIECES) | st.text() | st.sampled_from(["calculator", '{"expression": "1"}']),
        max_size=12,
    ).map("".join)
)
def test_reading_a_step_never_raises(text):
    step = parse_step(text, SCHEMAS)
    assert isinstance(step, Action | FinalAnswer | Malformed)
    if isinstance(step, Action):
        json.dumps(step.arguments, allow_nan=False, ensure_ascii=False).encode()


def test_react_sees_its_tools_in_the_prompt_and_observations_as_user_messages():
    prompts = []

    def model(turn, prompt):
        prompts.append(prompt)
        return [
            'Thought: multiply\nAction: calculator\nAction Input: {"expression": "6*7"}',
            "Final Answer: 42",
        ][turn]

    trajectory = play(
        model,
        agent="react_agent",
        tools=["calculator"],
        prompt=[Message("system", "Be brief."), Message("user", "6*7?")],
    )
    assert (roles(trajectory), trajectory.outcome) == ("suaua", Outcome.COMPLETED), trajectory.failure
    assert trajectory.messages[0].content.startswith("Be brief.")
    assert "- calculator: " in trajectory.messages[0].content
    assert "<tool_call>" not in prompts[0], "the template's own format must not be shown"
    assert trajectory.messages[3].content == "Observation: 42"
    assert trajectory.metrics["num_tool_calls"] == 1


def test_react_says_what_was_wrong():
    turns = [
        "I do not know.",
        "Action: oracle\nAction Input: {}",
        "Action: calculator\nAction Input: 6*",
        "Final Answer: 42",
    ]
    trajectory = play(turns, agent="react_agent", tools=["calculator"])
    told = [message.content for message in trajectory.messages if message.role == "user"][1:]
    assert told[0].startswith("Observation: not understood: there is neither")
    assert "unknown tool 'oracle'" in told[1]
    assert len(told) == 3
    assert trajectory.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("turns", "settings", "conversation", "outcome"),
    [
        (["Action: finish\nAction Input: 42"], {"max_turns": 1}, "sua", "completed"),
        (["Action: calculator\nAction Input: 1", "hm"], {"max_turns": 2}, "suaua", "turn_limit"),
        (
            ["Thought: " + "very long " * 50, "Final Answer: 42"],
            {"max_turn_tokens": 30},
            "suaua",
            "completed",
        ),
        (["Final Answer: " + "very long " * 50], {"max_turn_tokens": 30}, "sua", "truncated"),
    ],
    ids=["finish", "turns", "cut", "cut answer"],
)
def test_every_end_of_react(turns, settings, conversation, outcome):
    trajectory = play(turns, agent="react_agent", tools=["calculator", "finish"], **settings)
    assert (roles(trajectory), trajectory.outcome) == (conversation, Outcome(outcome)), trajectory.failure


# -------------------------------------------------------------------------------------------- math_expression


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (["12 * 34 - 5", "#### 403"], ["It is 403"]),
        (["12 boxes", "easy:\n12*34-5", "#### 403"], ["That could not be evaluated", "It is 403"]),
    ],
)
def test_math_expression_evaluates_and_lets_the_model_correct_itself_once(turns, told):
    trajectory = play(
        turns,
        agent="math_expression",
        tools=["calculator"],
        reward="arithmetic",
        ground_truth="403",
        agent_config={"math_expression": {"evaluated_reward": 0.25}},
    )
    assert [m.content.split(".")[0].split(" (")[0] for m in trajectory.messages if m.role == "user"][
        1:
    ] == told
    assert trajectory.reward == 1.25


def test_math_expression_gives_up_after_the_second_try():
    trajectory = play(["what?", "what?"], agent="math_expression", tools=["calculator"])
    assert (trajectory.outcome, roles(trajectory)) == (Outcome.COMPLETED, "uaua")


def test_math_expression_needs_the_calculator():
    trajectory = play(["1"], agent="math_expression")
    assert trajectory.outcome is Outcome.ABORTED
    assert "agent.tools=[calculator]" in str(trajectory.failure)
