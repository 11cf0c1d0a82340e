"""The packaged recipes: what is said of them, and the commands of their scripts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.extras.plan.explain import find_warnings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "recipes"
RECIPES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
SCRIPTS = sorted(file.stem.removeprefix("run_") for file in FOLDER.glob("run_*.sh"))

RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "$#" "$@" >> "$RECORD"\n'
"""Stands in the place of `agentrl` and writes down how it was called: the number of arguments, and each in a
line.
"""


@dataclass(frozen=True)
class Call:
    """One command of a script: its words up to the first argument, and the values of its parameters."""

    name: str
    values: dict

    @property
    def config(self):
        return load_config(self.values["config"], self.values["overrides"] or [])


def parse(arguments: list[str]) -> Call:
    """Read a command line as `agentrl` does, without running it; an unknown command or option is an error of
    click's.
    """
    command, name = typer.main.get_command(app), "agentrl"
    context = command.make_context(name, list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, context._protected_args + context.args)
        context = command.make_context(name, rest, parent=context)
    return Call(context.command_path.removeprefix("agentrl "), context.params)


def play_script(name: str, folder: Path, *arguments: str) -> list[Call]:
    """Run the recipe's script in an empty folder with a recorder in the place of `agentrl`, as after a run
    with checkpoints.
    """
    binary = folder / "bin" / "agentrl"
    binary.parent.mkdir()
    binary.write_text(RECORDER)
    binary.chmod(0o755)
    for step in (20, 40):
        (folder / f"run/checkpoints/step_{step:06d}").mkdir(parents=True)
    places = {
        "RUN": "run",
        "GSM8K": "gsm8k source",
        "AIME": "aime",
        "DAPO_MATH": "math.parquet",
        "RECORD": str(folder / "record"),
    }
    environment = {**os.environ, **places, "PATH": f"{binary.parent}:{os.environ['PATH']}"}
    script = str(FOLDER / f"run_{name}.sh")
    subprocess.run(
        ["bash", script, *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    lines = iter((folder / "record").read_text().splitlines())
    return [parse([next(lines) for _ in range(int(count))]) for count in lines]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_from_anywhere_and_without_a_gpu(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, tiny = load_config(f"recipes/{name}"), load_config(f"recipes/{name}", ["size=tiny"])
    assert not list(find_warnings(plain))
    assert plain.model.path.startswith("Qwen/Qwen2.5-")
    assert (plain.rollout.backend, tiny.rollout.backend) == ("sglang", "embedded")
    assert plain.trainer.steps is not None
    assert plain.trainer.steps % plain.trainer.save_freq == 0
    assert (tiny.algorithm, tiny.agent, tiny.data, tiny.trainer) == (
        plain.algorithm,
        plain.agent,
        plain.data,
        plain.trainer,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_of_a_script_exist_and_compose(name, tmp_path):
    calls = play_script(name, tmp_path, "trainer.steps=7", "trainer.logger=[console,wandb]")
    names = [call.name for call in calls]
    assert names[0].startswith("data ")
    assert names[1:4] == ["config explain", "train", "train"]
    assert set(names[4:]) <= {"export"}
    assert [call.values["config"] for call in calls[1:4]] == [f"recipes/{name}"] * 3
    training, evaluation = (call.config for call in calls[2:4])
    assert not list(find_warnings(training))
    assert calls[1].values["overrides"] == ["trainer.steps=7", "trainer.logger=[console,wandb]"]
    for config in (training, evaluation):  # what follows the script's name reaches all
        assert (config.trainer.steps, config.trainer.logger) == (7, ("console", "wandb"))
    written = Path(calls[0].values["out"])
    assert all(Path(file).parent == written for file in training.data.val_files)
    assert calls[0].values["source"] == ("aime" if name.startswith("aime") else "gsm8k source")
    assert not training.trainer.val_only
    assert evaluation.trainer.val_only
    assert evaluation.trainer.run_dir != training.trainer.run_dir == "run"
    assert evaluation.model.path == "run/policy"
    assert evaluation.data == training.data
    for export in calls[4:]:
        assert export.values["checkpoint"] == "run/checkpoints/step_000040"
        assert not export.values["adapter"] or training.model.lora.rank > 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_its_data_says_what_is_missing(name, tmp_path):
    environment = {
        key: value for key, value in os.environ.items() if key not in ("GSM8K", "AIME", "DAPO_MATH")
    }
    script = str(FOLDER / f"run_{name}.sh")
    result = subprocess.run(["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "name the f" in result.stderr
    assert not any(tmp_path.iterdir())
