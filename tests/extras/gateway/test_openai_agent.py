"""The agent that starts a program of the user, and plays it through the gateway."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.errors import ConfigError, PluginError
from agentrl.extras.gateway.openai_agent import rewards_of, task_view
from agentrl.plugins import load_plugins
from agentrl.testing import call, play
from agentrl.types import Message, Outcome, Task

PLUGINS = load_plugins()
SUM = call("calculator", expression="6*7")


def roles(trajectory) -> str:
    """Return the conversation as initials: u(ser) a(ssistant) t(ool) s(ystem)."""
    return "".join(message.role[0] for message in trajectory.messages)


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
