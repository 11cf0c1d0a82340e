"""A mistake is answered by one line with cause and cure, the right exit code, and nothing left behind."""

import json
import socket
import sys

import psutil
import pytest

from agentrl.cli import main
from agentrl.data.files import open_rows


def row(world) -> dict:
    (first,) = open_rows(str(world.folder / "data/train.parquet")).rows(1)
    return first


def write_row(world, name: str, **changes) -> str:
    path = world.folder / name
    path.write_text(json.dumps({**row(world), **changes}) + "\n")
    return str(path)


def refuse(world, *arguments: str, code: int) -> str:
    """Run the command, check how it ended, return its error line."""
    command = world.start(*arguments)
    assert command.wait() == code, command.output()
    assert command.left_behind() == [], "something was left running"
    return error_line(command.output())


def error_line(output: str) -> str:
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.startswith("error")]
    assert len(lines) == 1, output
    return lines[0]


@pytest.fixture
def refused_training(world, monkeypatch, capfd):
    """Train in this process with overrides that are refused before anything starts; return the error line."""

    def train(*overrides: str, config=world.config) -> str:
        before = set(psutil.Process().children(recursive=True))
        monkeypatch.setattr(sys, "argv", ["agentrl", "train", str(config), *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        output = "".join(capfd.readouterr())
        assert ended.value.code == 2, output
        assert set(psutil.Process().children(recursive=True)) <= before, "something was left running"
        return error_line(output)

    return train


def test_mistakes_in_the_config(world, refused_training):
    missing = refused_training(config=world.folder / "confg.yaml")
    assert "confg.yaml" in missing
    assert "config.yaml" in missing, "the nearest file is named"
    unknown = refused_training("rollout.group_sise=4")
    assert "rollout.group_sise" in unknown
    assert "rollout.group_size" in unknown
    known_elsewhere = refused_training("data.train_batch_size=4")
    assert "buffer.groups_per_step" in known_elsewhere
    no_model = refused_training("model.path=/nowhere")
    assert "/nowhere" in no_model
    upload = refused_training("trainer.upload_to=s3://user:hush@bucket/run")
    assert "contains credentials" in upload
    assert "hush" not in upload
    nowhere = refused_training(
        "trainer.upload_to=file:///proc/run", f"trainer.run_dir={world.folder}/nowhere"
    )
    assert "file:///proc/run/.agentrl_probe cannot be written" in nowhere
    source = refused_training("data.curriculum.source_weights={aime: 1}")
    assert (
        "source_weights names aime, but no training row that is kept has this source; the data has " in source
    )


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("agent", {"agent_name": "tool_agnt"}, ("tool_agnt", "tool_agent")),
        ("truth", {"reward_model": {"style": "rule", "ground_truth": None}}, ("ground", "truth.jsonl")),
        ("source", {"data_source": "unheard_of"}, ("unheard_of", "gsm8k")),
    ],
)
def test_mistakes_in_the_data(world, refused_training, name, changes, words):
    path = write_row(world, f"{name}.jsonl", **changes)
    line = refused_training(f"data.train_files=[{path}]", f"trainer.run_dir={world.folder}/bad_{name}")
    assert all(word in line for word in words), line


def test_an_unknown_tool(world, refused_training):
    line = refused_training("agent.tools=[calculater]", f"trainer.run_dir={world.folder}/bad_tool")
    assert "calculater" in line
    assert "calculator" in line


def test_a_server_that_does_not_come_up(world):
    """The port of `urls` is open but speaks no HTTP: the run says which server, and ends with 1."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        line = refuse(
            world,
            "train",
            str(world.config),
            f"rollout.urls=['{url}']",
            "rollout.server_start_timeout_s=2",
            f"trainer.run_dir={world.folder}/bad_server",
            code=1,
        )
    assert url in line


def test_a_port_in_use(world):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refuse(world, "serve", str(world.folder / "model"), "--port", port, code=2)
    assert port in line


@pytest.mark.slow
def test_a_run_in_which_nothing_finishes_says_so(world):
    """Every attempt runs out of time and its group is dropped: the run ends by buffer.stall_timeout_s, with
    the counts.
    """
    line = refuse(
        world,
        "train",
        str(world.config),
        "agent.trajectory_timeout_s=0.001",
        "buffer.stall_timeout_s=3",
        "rollout.max_failed_share=null",
        f"trainer.run_dir={world.folder}/stalled",
        code=1,
    )
    assert "no trajectory finished for buffer.stall_timeout_s=3" in line
    assert "most attempts failed with: agent.trajectory_timeout_s=0.001 passed" in line


READER = """
from pathlib import Path
from agentrl.types import Message, Task

def read(row):
    if Path({flag!r}).exists():
        raise KeyError("question")
    return Task("", row["data_source"], (Message("user", row["prompt"][0]["content"]),), "tool_agent", ground_truth="1")
"""  # noqa: E501


@pytest.mark.slow
def test_a_row_that_cannot_be_read_any_more_ends_the_run_by_its_name_and_the_run_goes_on(world):
    """What was saved before is there: with the row mended, the same command resumes and ends well."""
    flag, run_dir = world.folder / "late", world.folder / "late_row"
    reader = world.folder / "late_reader.py"
    reader.write_text(READER.format(flag=str(flag)))
    arguments = [
        "train",
        str(world.config),
        f"data.reader='{reader}:read'",
        "trainer.steps=6",
        "trainer.save_freq=1",
    ]
    arguments += [f"trainer.run_dir={run_dir}", "buffer.max_staleness=0"]
    command = world.start(*arguments)
    command.wait_until(lambda: world.num_steps(run_dir) >= 2)
    flag.touch()
    assert command.wait() == 2, command.output()
    (line,) = [line for line in command.output().splitlines() if line.startswith("error")]
    assert "train.parquet: row " in line
    assert "failed: KeyError: 'question'" in line
    steps = world.num_steps(run_dir)
    flag.unlink()
    again = world.start(*arguments)
    assert again.wait() == 0, again.output()
    assert "resumed from step_" in again.output()
    assert world.num_steps(run_dir) >= max(6, steps)
