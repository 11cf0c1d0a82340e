"""The tool `python`: what the model reads, what stays between its calls, and a trajectory that goes on after
a hostile one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.errors import ConfigError, SandboxError, ToolError
from agentrl.extras.sandbox import Sandbox
from agentrl.extras.sandbox.python_tool import Python
from agentrl.plugins import load_plugins
from agentrl.servers.router import Router
from agentrl.types import Outcome
from parts import rollout_stage


def talk(*programs: str, config: dict | None = None) -> list:
    """Return the answers to calls of one trajectory."""

    async def main() -> list:
        tool = Python({"wall_s": 30.0, **(config or {})})
        await tool.start()
        try:
            return [await tool.call({"code": code}) for code in programs]
        finally:
            await tool.close()

    return trio.run(main)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("6 * 7", "42"),
        ("x = 1", "(no output)"),
        ("import sys\nprint('a')\nprint('b', file=sys.stderr)\n'c'", "a\nb\n'c'"),
    ],
)
def test_the_model_reads_what_was_printed(code: str, text: str) -> None:
    (result,) = talk(code)
    assert (result.text, result.is_error) == (text, False)


@pytest.mark.parametrize(
    ("code", "config", "parts"),
    [
        ("print('a')\n1 / 0", {}, ["a\nTraceback", "line 2", "ZeroDivisionError: division by zero"]),
        ("def f(:", {}, ["SyntaxError"]),
        ("import sys; sys.exit(3)", {}, ["[exit code 3]"]),
        ("while True: pass", {"cpu_s": 1.0}, ["s of processor time: it computed for too long]"]),
        (
            "import time; print('first'); time.sleep(99)",
            {"wall_s": 1.0},
            ["first\n[ended after 1.0 s: it took too long]"],
        ),
        ("bytearray(10**11)", {}, ["MemoryError"]),
        ("import os; os.kill(os.getpid(), 11)", {}, ["[ended by signal 11 (SIGSEGV)]"]),
        ("print('x' * 10**5)", {"output_kib": 1}, ["x\n[the output was cut]\n[ended: it printed too much]"]),
        ("for i in range(100): open(str(i), 'w')", {"max_files": 50}, ["OSError", "No space left"]),
    ],
)
def test_failures_are_told_in_words(code: str, config: dict, parts: list[str]) -> None:
    (result,) = talk(code, config=config)
    assert result.is_error
    for part in parts:
        assert part in result.text


def test_no_path_of_the_host_is_shown() -> None:
    (result,) = talk("import json, sys\nprint(sys.path, sys.prefix, sys.executable)\njson.loads('{')")
    assert "json/decoder.py" in result.text
    for path in (sys.prefix, sys.base_prefix, str(Path(__file__).parents[3]), str(Path.home())):
        assert path not in result.text


def test_files_stay_within_a_trajectory_and_variables_do_not() -> None:
    _, second, third = talk("x = 1; open('notes', 'w').write('kept')", "open('notes').read()", "x")
    assert second.text == "'kept'"
    assert "NameError" in third.text
    (other,) = talk("import os; os.listdir()")
    assert other.text == "[]"


def test_nothing_is_left_on_the_host(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    talk("open('x', 'w').write('y' * 1000)")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_sandbox_is_no_answer(monkeypatch) -> None:
    async def broken(self, program) -> None:
        raise SandboxError("no more processes")

    monkeypatch.setattr(Sandbox, "run", broken)
    with pytest.raises(ToolError, match="tool 'python': no more processes"):
        talk("1")


def test_a_wrong_config_is_refused_before_anything_is_played() -> None:
    with pytest.raises(ConfigError, match=r"agent\.tool_config\.python: unknown timeout"):
        Python({"timeout": 3})


def test_it_is_registered() -> None:
    assert load_plugins().tools.get("python") is Python


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """The scripted rollout stack of tests/rollout: the real loop, parser, template and session."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Chat.load(str(folder))


def test_a_trajectory_goes_on_after_a_hostile_call(rollout) -> None:
    chat = rollout
    programs = ["while 1: __import__('os').fork()", "open('/etc/x', 'w')", "print(6*7)"]

    def script(turn: int, text: str) -> str:
        if turn < len(programs):
            return rollout_stage.call("python", f'{{"code": "{programs[turn]}"}}')
        return "#### 42" if "42" in text.rpartition("assistant")[0] else "no"

    config = {"python": {"cpu_s": 1.0, "wall_s": 2.0, "max_processes": 16}}
    agent = {
        "tools": ("python",),
        "tool_config": config,
        "max_tool_output_tokens": 200,
        "max_response_tokens": 2000,
    }
    world = rollout_stage.World(chat, script, agent=agent, prompt=rollout_stage.PromptLimits(1024, "filter"))
    world.router = Router(lambda url: world.client, vocab_size=chat.vocab_size, context_tokens=4096)
    (trajectory,) = world.play(rollout_stage.make_task(), real_time=True)
    assert trajectory.outcome == Outcome.COMPLETED, trajectory.failure
    answers = [message.content for message in trajectory.messages if message.role == "tool"]
    assert len(answers) == 3
    assert "ended" in answers[0] or "Traceback" in answers[0], "ended by a limit, or its forks were refused"
    assert "PermissionError" in answers[1] or "Read-only file system" in answers[1]
    assert answers[2] == "42"
    assert trajectory.reward == 1.0
