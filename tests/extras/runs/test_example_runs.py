"""Training runs of examples whose worlds are the project's own: the commands of their pages, in small."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("example", "rows"),
    [
        pytest.param("shop", "shop_rows.py", id="a shop in a database"),
        pytest.param("mending", "mending.py", id="repositories to mend"),
    ],
)
def test_an_example_trains(world, tmp_path: Path, example: str, rows: str) -> None:
    data, policy, run = tmp_path / "data", tmp_path / "warm_start", tmp_path / "run"
    subprocess.run([sys.executable, str(EXAMPLES / rows), str(data)], check=True, timeout=120)
    sft = world.start(
        *("sft", str(EXAMPLES / f"{example}_sft.yaml"), "trainer.steps=30"),
        *(f"data.train_files=[{data}/sft.jsonl]", f"trainer.output={policy}"),
    )
    assert sft.wait(600) == 0, sft.output()
    plugins = [f"agent.plugins=[{EXAMPLES}/shop.py]"] if example == "shop" else []
    train = world.start(
        *("train", str(EXAMPLES / f"{example}.yaml"), f"model.path={policy}", f"trainer.run_dir={run}"),
        *(f"data.train_files=[{data}/train.jsonl]", "data.val_files=[]", *plugins),
        *("trainer.steps=3", "trainer.test_freq=-1", "tracking.report=false", "rollout.num_actors=1"),
        *("buffer.groups_per_step=2", "rollout.group_size=4", "rollout.max_concurrent_trajectories=8"),
    )
    assert train.wait(900) == 0, train.output()
    assert train.left_behind() == []
    records = world.records(run).train
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(0 <= record["rollout/reward_mean"] <= 1 for record in records)
    assert all(math.isfinite(record["learner/loss"]) for record in records)
    assert "attempt failed" not in train.output()
