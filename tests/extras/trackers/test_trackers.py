"""wandb and TensorBoard: what they get of a run, and what they never get."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agentrl.config.tracking import TrackingConfig
from agentrl.errors import ConfigError
from agentrl.tracking.tracker import Trackers, open_trackers

SECRET = "hunter2-very-secret"
CONFIG = {
    "rollout": {"urls": [f"http://me:{SECRET}@host:1"]},
    "agent": {"tool_config": {"search": {"api_key": SECRET}}},
    "lr": 0.5,
}


@pytest.fixture(autouse=True)
def _no_wandb_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))


def open_in(folder: Path, *logger: str, restored_step: int | None = None, mode: str = "offline") -> Trackers:
    names = {"project": "p", "experiment": "e"}
    return open_trackers(
        logger,
        wandb_mode=TrackingConfig(wandb_mode=mode).wandb_mode,
        mlflow_uri=None,
        run_dir=folder,
        resolved_config=CONFIG,
        total_steps=3,
        restored_step=restored_step,
        **names,
    )


def test_wandb_offline_needs_no_network_and_gets_no_secret(tmp_path):
    ids = []
    for restored_step in (None, 1):
        with open_in(tmp_path, "wandb", restored_step=restored_step) as trackers:
            assert trackers.names == ("wandb",)
            trackers.write(
                "train",
                step=(restored_step or 0) + 1,
                version=1,
                values={"rollout/reward_mean": 0.5, "learner/loss": math.nan},
            )
        ids.append((tmp_path / "wandb_id.txt").read_text())
    runs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert ids[0] == ids[1]
    assert all(ids[0] in run.name for run in runs)
    logged = b"".join(run.read_bytes() for run in runs)
    assert b"rollout/reward_mean" in logged
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]


def test_wandb_online_without_a_key_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        open_in(tmp_path, "wandb", mode="online")


def test_tensorboard_has_the_finite_values_and_forgets_steps_beyond_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for restored_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        with open_in(tmp_path, "tensorboard", restored_step=restored_step) as trackers:
            for step in steps:
                values = {"rollout/a": step + (100.0 if restored_step else 0.0), "rollout/b": math.inf}
                trackers.write("train", step=step, version=step, values=values)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["rollout/a", "version", "wall_s"]
    assert {e.step: e.value for e in events.Scalars("rollout/a")} == {1: 1.0, 2: 102.0}
    assert not [p for p in (tmp_path / "tensorboard").iterdir() if SECRET.encode() in p.read_bytes()]


def test_a_tracker_that_cannot_open_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with open_in(tmp_path, "console", "tensorboard") as trackers:
        assert trackers.names == ()
    assert "tracker tensorboard could not start and is disabled" in capsys.readouterr().out
