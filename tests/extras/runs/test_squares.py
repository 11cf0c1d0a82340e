"""The example of docs/models.md: its commands in small, on both servers, and the curve of its page."""

import json
import math
from pathlib import Path

import pytest

import agentrl
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.testing.one_row.play import play_row
from agentrl.types import Outcome
from parts.vision import squares
from sglang_cpu.environment import built_python

ROOT = Path(__file__).parents[3]
TRAIN, SFT = (str(ROOT / "examples" / name) for name in ("squares.yaml", "squares_sft.yaml"))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares")
    squares().write_data(folder / "data")
    squares().write_model(folder / "model")
    return folder


def options(example, model):
    return [
        f"agent.plugins=[{ROOT}/examples/squares.py]",
        f"data.train_files=[{example}/data/train.parquet]",
        f"data.val_files=[{example}/data/val.parquet]",
        f"model.path={model}",
    ]


def imitate(world, example, *overrides):
    command = world.start(
        *("sft", SFT, f"agent.plugins=[{ROOT}/examples/squares.py]", f"model.path={example}/model"),
        *(f"data.train_files=[{example}/data/sft.parquet]", f"trainer.output={example}/policy", *overrides),
    )
    assert command.wait(1200) == 0, command.output()


def train(world, example, run_dir, *overrides):
    """Return the records of the steps."""
    command = world.start(
        "train", TRAIN, *options(example, f"{example}/policy"), *overrides, f"trainer.run_dir={run_dir}"
    )
    assert command.wait(3000) == 0, command.output()
    assert command.left_behind() == []
    assert "attempt failed" not in command.output()
    return world.records(run_dir).train


SMALL = (
    *("trainer.steps=3", "trainer.test_freq=-1", "tracking.report=false", "data.val_files=[]"),
    *("buffer.groups_per_step=2", "rollout.group_size=4", "rollout.num_actors=1", "buffer.max_staleness=0"),
)


def check_steps(records, run_dir):
    """The servers compute what the learner computes, and the trajectories show the images."""
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(math.isfinite(record["learner/loss"]) for record in records)
    assert all(record["learner/mismatch_max"] < 1e-4 for record in records)
    played = [
        trajectory
        for path in sorted((run_dir / "trajectories").glob("step_*.parquet"))
        for trajectory in decode(read_parquet(path), images=run_dir / "images")
    ]
    shown = [trajectory for trajectory in played if trajectory.images]
    assert shown
    assert {len(placed.image.read()) > 0 for one in shown for placed in one.images} == {True}


def test_it_imitates_plays_and_is_evaluated(world, example, tmp_path):
    imitate(world, example, "trainer.steps=2", "trainer.batch_size=8")
    (tmp_path / "turns.yaml").write_text("- calls: [{name: look, arguments: {}}]\n- '3'\n")
    config = agentrl.load_config(TRAIN, options(example, f"{example}/policy"))
    said = []
    for row in range(4):
        played = play_row(
            config, row=row, model=str(tmp_path / "turns.yaml"), read=lambda: None, say=said.append
        )
        assert played.trajectory.outcome is Outcome.COMPLETED, played.trajectory.failure
        assert [placed.num_tokens for placed in played.trajectory.images] == [4]
    evaluation = world.start(
        *("eval", TRAIN, "--model", f"{example}/policy", "--on", f"{example}/data/val.parquet"),
        *("--n", "1", "--out", str(tmp_path / "eval"), *options(example, f"{example}/policy")),
        "data.max_val_rows=8",
    )
    assert evaluation.wait(300) == 0, evaluation.output()


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world_size", [1, 2])
def test_it_trains(world, example, tmp_path, world_size):
    imitate(world, example, "trainer.steps=20")
    ranks = f"learner.world_size={world_size}"
    check_steps(train(world, example, tmp_path / "run", *SMALL, ranks), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(2400)
def test_it_trains_on_sglang(world, example, tmp_path):
    imitate(world, example, "trainer.steps=20")
    server = ("server=sglang_cpu", f"rollout.sglang.python={built_python()}")
    patience = "rollout.server_start_timeout_s=400"
    check_steps(train(world, example, tmp_path / "run", *SMALL, *server, patience), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(4800)
def test_it_learns_to_count(world, example, tmp_path):
    imitate(world, example)
    train(world, example, tmp_path / "run", "eval.n=4")
    validation = json.loads((tmp_path / "run/result.json").read_text())["validation"]
    assert validation["initial"]["val/accuracy"] < 0.65
    assert validation["final"]["val/accuracy"] >= 0.8
