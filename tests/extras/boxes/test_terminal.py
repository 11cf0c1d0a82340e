"""Tasks in Harbor's layout: read into rows, played in a box of their image, judged by their own tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError, DataError, ToolError
from agentrl.extras.boxes.terminal import TerminalTask, reward_of, task_folders
from agentrl.plugins import load_plugins
from agentrl.testing import Call, play
from agentrl.types import Outcome, Trajectory
from parts.box_kinds import BUBBLEWRAP_IS_HERE, IMAGE, podman_command, root, why_no_podman
from parts.root_file_system import can_be_made

TOML = """version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
[environment]
docker_image = "{image}"
"""
SCRIPT = """#!/bin/bash
if [ "$(cat hello.txt)" = "Hello" ] && [ -e /tests/expected ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo '{"reward": 0.25}' > /logs/verifier/reward.json
fi
"""


def task(folder: Path, *, image: str = "", script: str = SCRIPT) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(TOML.replace("{image}", image))
    (folder / "instruction.md").write_text("Write Hello to hello.txt.\n")
    (folder / "tests/test.sh").write_text(script)
    (folder / "tests/expected").write_text("")
    return folder


def attempt(folder: Path, config: dict[str, object], *calls: Call) -> Trajectory:
    row = TerminalTask.read(folder).row()
    kwargs = dict(row["extra_info"]["environment_kwargs"])
    kwargs.pop("name")
    return play(
        [*calls, "done"],
        environment="terminal",
        environment_kwargs=kwargs,
        environment_config={"terminal": config},
        reward="terminal",
        max_turns=len(calls) + 1,
    )


def bash(command: str) -> Call:
    return Call("bash", {"command": command})


def reward(trajectory: Trajectory) -> float:
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    (given,) = trajectory.rewards
    return given.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bubblewrap", "podman"])
def test_a_task_is_judged_by_its_own_tests(tmp_path: Path, kind: str) -> None:
    if not can_be_made() or (kind == "bubblewrap" and not BUBBLEWRAP_IS_HERE):
        pytest.skip("bubblewrap is not installed, or there is no /usr/bin/python3 to make an image of")
    if kind == "podman" and (why := why_no_podman()):
        pytest.skip(why)
    config: dict[str, object] = {"kind": kind, "folder": "/testbed"}
    if kind == "podman":
        config["command"] = podman_command()
    image = str(root()) if kind == "bubblewrap" else IMAGE
    hello = task(tmp_path / "hello", image=image)
    solved = bash("ls /tests; cat a.txt; echo Hello > hello.txt")
    played = attempt(hello, config, solved)
    assert reward(played) == 1.0
    (answer,) = [message.content for message in played.messages if message.role == "tool"]
    assert "expected" not in answer  # the tests come when the agent is done
    assert "of the image" in answer
    # A reward that the model wrote itself is removed before the tests run.
    assert (
        reward(attempt(hello, config, bash("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")))
        == 0.25
    )
    silent = attempt(task(tmp_path / "silent", image=image, script="echo nothing\n"), config, bash("true"))
    assert silent.outcome is Outcome.ENVIRONMENT_ERROR
    assert silent.failure is not None
    assert "its tests wrote no reward to /logs/verifier: nothing" in silent.failure.text


def test_tasks_are_written_as_rows(tmp_path: Path) -> None:
    for name in ("one", "two"):
        task(tmp_path / "tasks" / name, image="of-the-task")
    out = tmp_path / "rows" / "train.jsonl"
    done = CliRunner().invoke(
        app, ["data", "harbor", str(tmp_path / "tasks"), str(out), "--images", "my/{task}"]
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["extra_info"]["environment_kwargs"]["image"] for row in rows] == ["my/one", "my/two"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Write Hello to hello.txt."}]
    assert TerminalTask.read(tmp_path / "tasks/one").image == "of-the-task"


def test_what_is_no_task_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task\.toml: No such file"):
        TerminalTask.read(tmp_path)
    folder = task(tmp_path / "task")
    (folder / "tests/test.sh").unlink()
    with pytest.raises(DataError, match=r"it has no tests/test\.sh"):
        TerminalTask.read(folder)
    (folder / "task.toml").write_text("[")
    with pytest.raises(DataError, match="cannot be read"):
        TerminalTask.read(folder)
    with pytest.raises(ConfigError, match="which kind 'process' has not"):
        load_plugins().environments.create("terminal", {"terminal": {"kind": "process"}})


@pytest.mark.parametrize("inside", ["", "older"])
def test_tasks_in_the_older_layout_are_told_how_to_be_converted(tmp_path: Path, inside: str) -> None:
    task(tmp_path / "tasks" / "harbors")
    older = tmp_path / "tasks" / inside
    older.mkdir(exist_ok=True)
    (older / "task.yaml").write_text("instruction: Write Hello to hello.txt.")
    with pytest.raises(
        DataError, match=r"older layout .*harbor tasks migrate -i .* tests/test\.sh"
    ) as raised:
        task_folders(tmp_path / "tasks")
    assert "\n" not in str(raised.value)
    (older / "task.toml").write_text("")  # a task of both layouts is one of Harbor's
    assert len(task_folders(tmp_path / "tasks")) == (2 if inside else 1)


@pytest.mark.parametrize(
    ("content", "value"), [(b"0.5\n", 0.5), (b'{"reward": 1, "speed": 2}', 1.0), (b'{"passed": 0}', 0.0)]
)
def test_a_reward_is_a_number_or_the_one_of_an_object(content: bytes, value: float) -> None:
    assert reward_of(content, "reward.txt") == value


@pytest.mark.parametrize("content", [b"", b"nan", b'{"a": 1, "b": 2}', b"[1]", b"yes", b"\xff"])
def test_another_text_is_no_reward(content: bytes) -> None:
    with pytest.raises(ToolError, match="has no reward"):
        reward_of(content, "reward.txt")
