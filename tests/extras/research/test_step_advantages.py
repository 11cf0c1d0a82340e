"""Advantages of a stored step are those that the controller computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import ConfigError
from agentrl.extras.research.step_advantages import compute_apart, step_advantages
from agentrl.types import Outcome, RewardEvent
from parts.trajectories import make_trajectory

REWARDS = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A step with a group of two kinds of rewards, one that is solved, a failed member and a greedy one."""
    made = [
        make_trajectory([-1, 0, 0, -1, 1], group_id=g, member=m, rewards=(RewardEvent("r", reward, 4),))
        for g, rewards in enumerate(REWARDS)
        for m, reward in enumerate(rewards)
    ]
    made.append(make_trajectory([-1, 0], group_id=0, member=4, outcome=Outcome.ABORTED))
    made.append(make_trajectory([-1, 0], group_id=0, member=5, reward=1.0, is_greedy=True))
    (tmp_path / "trajectories").mkdir()
    write_parquet(tmp_path / "trajectories" / "step_000001.parquet", encode(made), step=1, learned_by=0)
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **algorithm: object) -> None:
    (folder / "config.yaml").write_text(
        json.dumps(
            {
                "data": {"train_files": ["x.parquet"]},
                "model": {"path": "x"},
                "rollout": {"group_size": 4, "on_outcome": {"aborted": "mask"}},
                "algorithm": {"advantage": "grpo", **algorithm},
            }
        )
    )


def test_grpo_is_the_margin_over_the_spread_of_the_group(run: Path) -> None:
    """By hand: rewards 1, 0, 0, 0 have the mean 1/4 and the sample deviation 1/2."""
    found = step_advantages(run, run / "trajectories" / "step_000001.parquet")
    for row, wanted in zip(found[:4], (1.5, -0.5, -0.5, -0.5), strict=True):
        assert row == pytest.approx([0, wanted, wanted, 0, wanted], abs=1e-4)
    assert found[4:] == [[0.0] * 5] * 4 + [[0.0] * 2] * 2


def test_what_is_not_stored_is_refused_also_from_the_process_apart(run: Path) -> None:
    file = run / "trajectories" / "step_000001.parquet"
    write_config(run, advantage="gae")
    with pytest.raises(ConfigError, match="the critic's values, which are not stored"):
        step_advantages(run, file)
    write_config(run, kl={"coefficient": 0.1, "place": "reward", "estimator": "k1"})
    with pytest.raises(ConfigError, match="the KL of each token, which is not stored"):
        compute_apart(run, file)


def test_the_program_prints_json(run: Path) -> None:
    file = run / "trajectories" / "step_000001.parquet"
    command = [sys.executable, "-m", "agentrl.extras.research.step_advantages", str(run), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == step_advantages(run, file)
