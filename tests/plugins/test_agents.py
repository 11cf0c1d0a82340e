"""The built-in agent loops: what they play, and how each comes to an end.

Their contract is in test_contracts.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jsonschema_rs
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, PluginError
from agentrl.extras.agents.react_agent import NO_STEP, Action, FinalAnswer, Malformed, parse_step
from agentrl.extras.gateway.openai_agent import rewards_of, task_view
from agentrl.plugins import AGENT_ALIASES, Interaction, InteractionReply, load_plugins, tools_for
from agentrl.rollout.shared_tools import validator
from agentrl.testing import Raw, call, play
from agentrl.types import Message, Outcome, Task

PLUGINS = load_plugins()
SUM = call("calculator", expression="6*7")


@pytest.mark.parametrize(("alias", "name"), AGENT_ALIASES.items())
def test_short_names_stand_for_agents(alias, name):
    assert PLUGINS.agents.get(alias) is PLUGINS.agents.get(name)


def test_only_agents_that_use_tools_are_offered_some():
    task = Task("t", "s", (Message("user", "q"),), "a", tools_kwargs={"calculator": {}, "mine": {}})
    offered = {
        name: tools_for(task, PLUGINS.agents.get(name), ("calculator",)) for name in PLUGINS.agents.names()
    }
    users = {"tool_agent", "interaction_agent", "react_agent", "math_expression"}
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


@pytest.mark.parametrize("agent", ["tool_agent", "interaction_agent", "react_agent"])
@pytest.mark.parametrize(
    ("settings", "limit", "conversation", "outcome"),
    [
        ({}, 2, "uaua", "completed"),
        ({"max_turns": 2}, 100, "uaua", "turn_limit"),
        ({"max_turns": 2}, 2, "uaua", "completed"),
        ({"max_user_turns": 1}, 100, "uaua", "turn_limit"),
        ({"max_user_turns": 0}, 100, "ua", "turn_limit"),
        ({"max_user_turns": 1}, 2, "uaua", "completed"),
    ],
)
def test_the_partner_hears_every_answer_also_the_last(agent, settings, limit, conversation, outcome):
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


# ----------------------------------------------------------------------------------------------- openai_agent

FUNCTIONS = """
import os
import openai

async def solve(task, *, base_url, api_key, model):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply = await client.chat.completions.create(model=model, messages=task["messages"])
    return {"brevity": 0.5, "tone": 1} if "42" in reply.choices[0].message.content else None

def solve_in_a_thread(task, *, base_url, api_key, model):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model=model, messages=task["messages"])
    return task["extra_info"]["returned"]

class Callable:
    async def __call__(self, task, **endpoint):
        await solve(task, **endpoint)

solve_by_object = Callable()
nothing = 42
"""
PROGRAM = """
import json, os, subprocess, sys, time
import openai
task = json.load(sys.stdin)
client = openai.OpenAI()
client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
print("noise " * 100000)
print("last words", file=sys.stderr)
{end}
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def play_program(config: Mapping[str, Any], turns=("42",), **options):
    return play(turns, agent="openai_agent", agent_config={"openai_agent": dict(config)}, **options)


@pytest.mark.parametrize("name", ["solve", "solve_by_object"])
def test_an_async_function_is_an_agent(functions, name):
    trajectory = play_program({"target": f"{functions}:{name}"})
    assert (trajectory.outcome, roles(trajectory)) == (Outcome.COMPLETED, "ua"), trajectory.failure
    assert trajectory.reward == (1.5 if name == "solve" else 0.0)


@pytest.mark.parametrize(
    ("returned", "reward"), [(None, 0.0), ("the answer is 42", 0.0), (0.25, 0.25), ({"a": 1, "b": -0.5}, 0.5)]
)
def test_a_function_runs_in_a_thread_and_returns_rewards(functions, returned, reward):
    trajectory = play_program({"target": f"{functions}:solve_in_a_thread"}, extra_info={"returned": returned})
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, reward), trajectory.failure


@pytest.mark.parametrize("returned", [True, [1.0], {"messages": []}, float("nan"), {"a": None}])
def test_what_is_no_reward_is_named(functions, returned):
    with pytest.raises(PluginError, match="return None, a number or name -> number"):
        rewards_of(returned)
    trajectory = play_program({"target": f"{functions}:solve_in_a_thread"}, extra_info={"returned": returned})
    assert trajectory.outcome is Outcome.ABORTED


def test_the_task_of_a_program_is_json_without_the_truth():
    task = Task(
        "t:1", "s", (Message("user", "é?"),), "openai_agent", ground_truth="secret", extra_info={"index": 1}
    )
    view = task_view(task)
    assert json.loads(json.dumps(view)) == view
    assert view["messages"] == [{"role": "user", "content": "é?"}]
    assert "secret" not in json.dumps(view)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({}, ConfigError, "set either target"),
        ({"target": "a:b", "command": ["a"]}, ConfigError, "set either target"),
        ({"program": "x"}, ConfigError, "program"),
        (
            {"command": ["a"], "pass_env": ["NOT_SET_ANYWHERE"]},
            ConfigError,
            "openai_agent.pass_env: .*'NOT_SET_ANYWHERE' is not set",
        ),
        ({"target": "solve"}, PluginError, "write file.py:function or module:function"),
        ({"target": "nowhere.py:solve"}, PluginError, "nowhere.py"),
        ({"target": "{functions}:missing"}, PluginError, "'missing'"),
        ({"target": "{functions}:nothing"}, PluginError, "is a int, not a function"),
    ],
)
def test_a_wrong_config_is_named_before_anything_is_played(functions, config, error, words):
    filled = {
        key: value.replace("{functions}", str(functions)) if isinstance(value, str) else value
        for key, value in config.items()
    }
    with pytest.raises(error, match=words):
        PLUGINS.agents.get("openai_agent")(filled)


def command(tmp_path: Path, end: str) -> dict[str, Any]:
    (tmp_path / "program.py").write_text(PROGRAM.replace("{end}", end))
    return {
        "command": [sys.executable, str(tmp_path / "program.py")],
        "env": {"PIDS": str(tmp_path / "pids")},
    }


def are_gone(pids: Path) -> bool:
    """Tell whether the program and its child end within seconds: orphans are reaped by somebody else."""
    deadline = time.monotonic() + 10
    left = [int(pid) for pid in pids.read_text().split()]
    while time.monotonic() < deadline:
        left = [
            pid
            for pid in left
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]
        if not left:
            return True
        time.sleep(0.05)
    return False


def test_a_command_gets_none_of_the_keys_of_the_run(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "SERVER_KEY", "MY_SEARCH_KEY"):
        monkeypatch.setenv(name, f"secret of {name}")
    dump = f"open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(dict(os.environ)))"
    seen = {}
    for passed in ((), ("MY_SEARCH_KEY",)):
        trajectory = play_program(command(tmp_path, dump) | {"pass_env": passed})
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
        seen[passed] = json.loads((tmp_path / "seen").read_text())
        assert {"PIDS", "PATH", "HOME", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"} <= seen[
            passed
        ].keys()
    assert not [value for value in seen[()].values() if "secret of" in value]
    assert seen["MY_SEARCH_KEY",]["MY_SEARCH_KEY"] == "secret of MY_SEARCH_KEY"
    assert seen["MY_SEARCH_KEY",].keys() - seen[()].keys() == {"MY_SEARCH_KEY"}


@pytest.mark.parametrize(
    ("end", "outcome", "failure"),
    [
        ("", Outcome.COMPLETED, ""),
        ("sys.exit(3)", Outcome.ABORTED, "ended with status 3: last words"),
        ("os.kill(os.getpid(), 9)", Outcome.ABORTED, "ended with status -9: last words"),
        ("client.chat.completions.create(model='x', messages=task['messages'])", Outcome.TURN_LIMIT, ""),
    ],
    ids=["ends", "fails", "killed", "falls over the turn limit"],
)
def test_a_command_is_an_agent_and_leaves_nothing_behind(tmp_path, end, outcome, failure):
    trajectory = play_program(command(tmp_path, end), max_turns=1)
    assert trajectory.outcome is outcome, trajectory.failure
    assert failure in str(trajectory.failure)
    assert trajectory.metrics["num_turns"] == 1
    assert are_gone(tmp_path / "pids")


def test_a_command_is_killed_with_its_children_at_the_deadline(tmp_path):
    trajectory = play_program(command(tmp_path, "time.sleep(600)"), trajectory_timeout_s=8)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert trajectory.metrics["num_turns"] == 1
    assert are_gone(tmp_path / "pids")


def test_a_command_that_does_not_exist_is_named():
    trajectory = play_program({"command": [f"/nowhere/{os.getpid()}"]})
    assert trajectory.outcome is Outcome.ABORTED
    assert "cannot be started" in str(trajectory.failure)
