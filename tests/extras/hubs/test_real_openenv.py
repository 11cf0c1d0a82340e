"""OpenEnv's own server, of a pinned version in an environment of its own, on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.testing import Call, play
from agentrl.types import Outcome
from parts.installed import interpreter_with

ROOT = Path(__file__).parents[3]
OPENENV = "openenv==0.10.0"

MCP_SERVER = '''
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Sums(MCPEnvironment):
    """Sums of two numbers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("sums")

        @mcp.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"question": "2 + 3"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools")

    def step(self, action, timeout_s=None, **kwargs):
        seen = super().step(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = 1.0, True
        return seen

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = 1.0, True
        return seen

    @property
    def state(self):
        return State()


app = create_fastapi_app(Sums, CallToolAction, CallToolObservation, max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter_with(OPENENV)


def servers_left(script: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(word.endswith(script) for word in process.info["cmdline"] or [])
    ]


def data(out: Path, *arguments: str) -> list[dict]:
    result = CliRunner().invoke(app, ["data", "openenv", str(out), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return pq.read_table(out / "train.parquet").to_pylist()


def attempt(row: dict, server: dict, turns, **settings):
    world, partner = row["extra_info"]["environment_kwargs"], row["extra_info"]["interaction_kwargs"]
    name = world["server"]
    return play(
        turns,
        agent=row["agent_name"],
        interaction=partner and partner["name"],
        environment="openenv",
        environment_kwargs={key: value for key, value in world.items() if key != "name"},
        environment_config={"openenv": {"servers": {name: server}}},
        reward="openenv",
        extra_info={"tool_selection": row["extra_info"]["tool_selection"]},
        **{"max_turns": len(turns) + 1, "environment_timeout_s": 120.0, **settings},
    )


def test_the_ladder_is_played_by_turns_and_by_tools_and_its_server_ends(python, tmp_path) -> None:
    script = shutil.copy(ROOT / "examples/ladder_server.py", tmp_path / "ladder_of_this_test.py")
    server = {"command": [python, str(script), "--port", "{port}"]}
    given = f"--server=ladder={json.dumps(server)}"
    size = ("--shown=text", "--train=3", "--val=2")
    rows = data(tmp_path / "turns", given, *size, "--field=move", "--no-about")
    words = rows[0]["prompt"][-1]["content"].replace(",", "").split()
    here, goal = int(words[1]), int(words[3])
    way = "up" if goal > here else "down"
    climbed = attempt(rows[0], server, [way] * abs(goal - here))
    assert climbed.outcome is Outcome.COMPLETED, climbed.failure
    assert [event.value for event in climbed.rewards] == [1.0]
    assert not servers_left(script.name)

    rows = data(tmp_path / "tools", given, *size)
    assert '"move"' in rows[0]["prompt"][-1]["content"]
    call = Call("act", {"action": {"move": way}})
    wrong = Call("act", {"action": {"shout": way}})
    climbed = attempt(
        rows[0], server, [wrong, *[call] * abs(goal - here), "there"], max_tool_output_tokens=200
    )
    assert [event.value for event in climbed.rewards] == [1.0], climbed.failure
    answers = [message.content for message in climbed.messages if message.role == "tool"]
    assert answers[0].startswith("error: move: Field required")
    assert answers[-1] == f"on {goal}, to {goal}\n(the episode is over)"


def test_tools_of_an_mcp_environment_are_described_and_called(python, tmp_path) -> None:
    (tmp_path / "sums_server.py").write_text(MCP_SERVER)
    server = {"command": [python, str(tmp_path / "sums_server.py"), "{port}"]}
    (row,) = data(tmp_path, f"--server=sums={json.dumps(server)}", "--train=1", "--val=0")
    assert "add: Add two numbers." in row["prompt"][-1]["content"]
    played = attempt(row, server, [Call("call", {"tool": "add", "arguments": {"a": 2, "b": 3}}), "5"])
    assert [event.value for event in played.rewards] == [1.0], played.failure
    assert [message.content for message in played.messages if message.role == "tool"] == ["5"]


def test_a_server_that_cannot_start_is_never_a_wrong_answer(python, tmp_path) -> None:
    (tmp_path / "bad_server.py").write_text("raise SystemExit('no licence')")
    row = {
        "agent_name": "tool_agent",
        "extra_info": {
            "environment_kwargs": {"name": "openenv", "server": "s", "reset": "{}"},
            "interaction_kwargs": None,
            "tool_selection": ["act"],
        },
    }
    played = attempt(row, {"command": [python, str(tmp_path / "bad_server.py"), "{port}"]}, ["hello"])
    assert (played.outcome, played.rewards) == (Outcome.ENVIRONMENT_ERROR, ())
    assert "no licence" in str(played.failure)
