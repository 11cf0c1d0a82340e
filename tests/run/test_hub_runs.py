"""The examples of docs/hubs.md, in small: the commands of the page, the real packages, a few steps."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from parts.installed import interpreter_with, reasoning_gym_folder

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = (
    *("trainer.steps=3", "trainer.test_freq=-1", "tracking.report=false", "buffer.groups_per_step=2"),
    *("rollout.group_size=4", "rollout.num_actors=1"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def learned(world, tmp_path: Path, example: str, data: list[str], *overrides: str) -> list[dict]:
    """Run the commands of an example and return the records of its steps; nothing runs any more then."""
    rows = tmp_path / "data"
    made = world.start("data", data[0], str(rows), *data[1:])
    assert made.wait() == 0, made.output()
    script = [sys.executable, str(EXAMPLES / f"{example}_rows.py"), str(rows)]
    subprocess.run(script, check=True, timeout=120)
    sft = world.start(
        *("sft", str(EXAMPLES / f"{example}_sft.yaml"), "trainer.steps=30"),
        *(f"data.train_files=[{rows}/sft.jsonl]", f"trainer.output={tmp_path}/warm_start"),
    )
    assert sft.wait(600) == 0, sft.output()
    train = world.start(
        *("train", str(EXAMPLES / f"{example}.yaml"), *SMALL, f"model.path={tmp_path}/warm_start"),
        *(f"data.train_files=[{rows}/train.parquet]", "data.val_files=[]", f"trainer.run_dir={tmp_path}/run"),
        *overrides,
    )
    assert train.wait(900) == 0, train.output()
    assert train.left_behind() == []
    records = world.records(tmp_path / "run").train
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(math.isfinite(record["rollout/reward_mean"]) for record in records)
    assert "attempt failed" not in train.output()
    return records


def test_words_of_reasoning_gym(world, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", reasoning_gym_folder())
    words = json.dumps({"spell_backward": {"max_word_len": 3}})
    system = "--system=Answer between <answer> and </answer>."
    options = ["--generators=spell_backward", f"--config={words}", "--train=200", "--val=8", system]
    records = learned(world, tmp_path, "spell_backward", ["reasoning_gym", *options])
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)


def test_the_ladder_of_openenv(world, tmp_path) -> None:
    python = interpreter_with("openenv==0.10.0")
    server = {"command": [python, str(EXAMPLES / "ladder_server.py"), "--port", "{port}"]}
    options = ["--shown=text", "--field=move", "--no-about", "--system=", "--train=32", "--val=4"]
    records = learned(
        world,
        tmp_path,
        "ladder",
        ["openenv", f"--server=ladder={json.dumps(server)}", *options],
        f"agent.environment_config.openenv.servers.ladder.command={json.dumps(server['command'])}",
    )
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)


def test_numbers_of_verifiers(world, tmp_path) -> None:
    python, folder = interpreter_with("verifiers==0.4.0"), EXAMPLES / "verifiers_environments"
    options = [f"--python={python}", f"--path={folder}", "--train=32", "--val=4"]
    records = learned(
        world,
        tmp_path,
        "larger_number",
        ["verifiers", "--environment=larger_number", *options],
        f"agent.environment_config.verifiers.python={python}",
        f"agent.environment_config.verifiers.path=[{folder}]",
    )
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)
