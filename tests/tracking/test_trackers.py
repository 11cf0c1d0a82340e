"""Trackers: the fan-out, wandb offline, tensorboard's files, secrets."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from agentrl.config.tracking import TrackingConfig
from agentrl.tracking.alarms import Alarm
from agentrl.tracking.attempt_table import SampledAttempts
from agentrl.tracking.console import PlainConsole, QuietConsole
from agentrl.tracking.metrics import MetricsFile, StepRecord, read_metrics
from agentrl.tracking.redact import redact
from agentrl.tracking.tracker import Trackers, open_trackers

SECRET = "hunter2-very-secret"
CONFIG = {
    "rollout": {"urls": [f"http://me:{SECRET}@host:1"]},
    "agent": {"tool_config": {"search": {"api_key": SECRET}}},
    "lr": 0.5,
}


class Recorder:
    def __init__(self, *, fails_at: int | None = None) -> None:
        self.records: list[StepRecord] = []
        self.is_closed = False
        self._fails_at = fails_at

    def log(self, record: StepRecord) -> None:
        if record.step == self._fails_at:
            raise ConnectionError("no route to host\nand more")
        self.records.append(record)

    def log_alarm(self, alarm: Alarm) -> None:
        raise AssertionError(alarm)

    def log_attempts(self, table: SampledAttempts) -> None:
        raise AssertionError(table)

    def close(self) -> None:
        self.is_closed = True


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


def test_a_tracker_that_fails_is_reported_once_and_left_out(tmp_path):
    stream = io.StringIO()
    broken, sound = Recorder(fails_at=2), Recorder()
    with Trackers(
        MetricsFile(tmp_path / "m.jsonl"),
        PlainConsole(None, stream=stream),
        {"broken": broken, "sound": sound},
    ) as trackers:
        for step in (1, 2, 3):
            trackers.write("train", step=step, version=step, values={"rollout/a": float(step)})
        assert trackers.names == ("sound",)
    assert [r.step for r in broken.records] == [1]
    assert (
        [r.step for r in sound.records] == [1, 2, 3] == [r.step for r in read_metrics(tmp_path / "m.jsonl")]
    )
    assert sound.is_closed
    assert not broken.is_closed
    complaints = [line for line in stream.getvalue().splitlines() if "broken" in line]
    assert complaints == [
        "tracker broken failed and is disabled (ConnectionError: no route to host); metrics.jsonl has "
        "everything"
    ]


def test_a_plain_console_does_not_repeat_what_earlier_processes_of_the_run_have_shown(tmp_path):
    path, stream = tmp_path / "m.jsonl", io.StringIO()
    with Trackers(MetricsFile(path), QuietConsole()) as trackers:
        for step in (1, 2, 3):
            trackers.write("train", step=step, version=step, values={})
    with Trackers(MetricsFile(path, restored_step=3), PlainConsole(5, stream=stream)) as trackers:
        trackers.write("train", step=4, version=4, values={})
    [line] = stream.getvalue().splitlines()
    assert line.startswith("step 4/5 ")
    assert not line.endswith(" -"), "the steps before give the pace"


def test_running_time_leaves_out_the_time_between_stop_and_resume(tmp_path):
    now = [1000.0]
    path = tmp_path / "m.jsonl"
    for start, restored_step in ((1000.0, None), (5000.0, 1)):
        now[0] = start
        with Trackers(
            MetricsFile(path, restored_step=restored_step), QuietConsole(), clock=lambda: now[0]
        ) as trackers:
            for step in (1, 2) if restored_step is None else (2, 3):
                now[0] += 10.0
                trackers.write("train", step=step, version=step, values={})
    assert [(r.step, r.wall_s) for r in read_metrics(path)] == [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_wandb_disabled_is_not_opened(tmp_path):
    with open_in(tmp_path, "wandb", mode="disabled") as trackers:
        assert trackers.names == ()
    assert not (tmp_path / "wandb").exists()


def test_redact_knows_secrets_from_keys_that_only_sound_like_them():
    plain = {
        "max_response_tokens": 5,
        "data_source_key": "x",
        "api_key_env": "MY_KEY",
        "eos_token_ids": [1],
        "url": "http://host:1/p",
    }
    secret = {"api_key": "a", "OPENAI_API_KEY": "b", "password": "c", "hf_token": "d", "authorization": ["e"]}
    assert redact(plain) == plain
    assert set(redact(secret).values()) == {"***"}
    assert redact({"api_key": None, "nested": [{"secret": "x"}], "url": "https://me:pw@host/x"}) == {
        "api_key": None,
        "nested": [{"secret": "***"}],
        "url": "https://***@host/x",
    }
