"""`agentrl play` whose process a plugin ends or never gives back: one line names the plugin and the user's
line.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.chat.tiny import write_tiny_tokenizer

CONFIG = """
data: {train_files: [rows.jsonl]}
model: {path: model}
agent: {default: tool_agent, max_response_tokens: 1024, plugins: [mine.py]}
"""
ROW = (
    '{"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1"}], "reward_model": '
    '{"ground_truth": "2"}, "extra_info": {OF_PARTNER}}'
)
MINE = """
import asyncio, ctypes, os, time, trio
import agentrl.plugins as rl

def end():
    HOW

@rl.tool
def in_thread() -> str:
    '''End.'''
    end()

class OfClass(rl.Tool):
    name = "of_class"
    description = "Ends."
    parameters = {"type": "object", "properties": {}}

    async def call(self, arguments):
        await asyncio.sleep(0.01)
        end()

class Boss(rl.Interaction):
    name = "boss"

    async def respond(self, messages):
        if IS_BOSS:
            end()
        return rl.InteractionReply("", is_done=True)

class Ending(rl.AgentLoop):
    name = "ending"

    async def run(self, task, session):
        await session.generate()
        for _ in range(100):
            end()
            await trio.sleep(0.1)

class World(rl.Environment):
    name = "world"

    async def start(self, **_):
        end()

def compute_score(data_source, solution_str, ground_truth, extra_info):
    end()
"""
TURNS = "- calls: [{name: in_thread, arguments: {}}]\n- boss\n- more\n"
HOW = {
    "os._exit(0)": ("os._exit(0)", 1),
    "ctypes.string_at(0)": ("a crash (Segmentation fault)", -signal.SIGSEGV),
}
WHO = {
    "tool 'in_thread'": ["agent.tools=[in_thread]"],
    "tool 'of_class'": ["agent.tools=[of_class]"],
    "interaction 'boss'": [],
    "agent 'ending'": ["agent.default=ending"],
    "environment 'world'": ["agent.environment=world"],
    "reward 'custom'": ["reward.custom_function.path=mine.py"],
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def start(project: Path, how: str, who: str) -> subprocess.Popen[str]:
    (project / "mine.py").write_text(MINE.replace("HOW", how).replace("IS_BOSS", str("boss" in who)))
    partner = '"interaction_kwargs": {"name": "boss"}' if "boss" in who else ""
    (project / "rows.jsonl").write_text(ROW.replace("OF_PARTNER", partner))
    tool = "of_class" if "of_class" in who else "in_thread"
    (project / "turns.yaml").write_text(TURNS.replace("in_thread", tool) if "tool" in who else "- boss\n" * 3)
    if "reward" in who or "environment" in who:
        (project / "turns.yaml").write_text("- '#### 2'\n" * 3)
    command = [sys.executable, "-m", "agentrl.cli", "play", "config.yaml", "--model", "turns.yaml"]
    return subprocess.Popen(
        [*command, *WHO[who]], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("who", WHO)
def test_what_ends_the_process_is_named(project: Path, how: str, who: str) -> None:
    ended = start(project, how, who)
    said, _ = ended.communicate(timeout=120)
    what, status = HOW[how]
    assert said.splitlines()[-1] == (
        f"error (infrastructure): {who} ended its process: {what} at {project}/mine.py:6"
    )
    assert ended.returncode == status


@pytest.mark.parametrize("how", ["while True: pass", "time.sleep(1000)"])
@pytest.mark.parametrize("who", ["agent 'ending'", "tool 'of_class'"])
def test_a_loop_that_is_not_given_back_is_told_and_ctrl_c_ends_all(project: Path, how: str, who: str) -> None:
    running = start(project, how, who)
    told = f"{who} at {project}/mine.py:6 has not given back the event loop for 5 s"
    said = ""
    assert running.stdout is not None
    while told not in said:
        line = running.stdout.readline()
        assert line, said
        said += line
    running.send_signal(signal.SIGINT)
    began = time.monotonic()
    running.communicate(timeout=60)
    assert running.returncode == 130
    assert time.monotonic() - began < 30


def test_ctrl_c_ends_an_agent_that_catches_it(project: Path) -> None:
    how = "\n    ".join(
        ["while True:", "    try:", "        time.sleep(1000)", "    except BaseException:", "        pass"]
    )
    running = start(project, how, "agent 'ending'")
    assert running.stdout is not None
    while "has not given back" not in (line := running.stdout.readline()):
        assert line
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"interrupted; agent 'ending' at {project}/mine.py:8 had not ended after 10 s" in said


def test_a_loop_that_is_not_given_back_ends_the_command_after_the_deadline(project: Path) -> None:
    running = start(project, "while True: pass", "agent 'ending'")
    running.kill()
    running.communicate()
    command = [sys.executable, "-m", "agentrl.cli", "play", "config.yaml", "--model", "turns.yaml"]
    ended = subprocess.run(
        [*command, *WHO["agent 'ending'"], "agent.trajectory_timeout_s=1"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert f"error (infrastructure): agent 'ending' at {project}/mine.py:6 has not given back" in ended.stderr


def test_many_short_stops_are_told_like_a_long_one(project: Path) -> None:
    running = start(project, "time.sleep(1.2)", "agent 'ending'")
    assert running.stdout is not None
    told = f"agent 'ending' at {project}/mine.py:6 has kept the event loop 5 times within 60 s"
    while told not in (line := running.stdout.readline()):
        assert line
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130
