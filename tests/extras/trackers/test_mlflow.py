"""MLflow: resumed runs, names, servers that are not there, and that a run never waits for it."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param_name, _validate_tag_name

from agentrl.errors import ConfigError
from agentrl.extras.trackers.background import BackgroundTracker
from agentrl.extras.trackers.mlflow_tracker import valid_name
from agentrl.ports import ReservedPort
from agentrl.tracking.alarms import Alarm
from agentrl.tracking.attempt_table import SampledAttempts
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.tracker import open_trackers
from parts.tracked import MlflowRun

ALARM = Alarm(1, "raised", "r", "m/m", 1.0, "at_most", 0.5, "do")


def open_mlflow(folder, *, uri=None, restored_step=None, config=None):
    return open_trackers(
        ("console", "mlflow"),
        wandb_mode="offline",
        mlflow_uri=uri,
        run_dir=folder,
        project="p",
        experiment="e",
        resolved_config=config or {"lr": 0.5},
        restored_step=restored_step,
    )


def test_a_resumed_run_continues_and_may_have_another_config(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for restored_step, config in ((None, {"lr": 0.5}), (1, {"lr": 0.25})):
        with open_mlflow(tmp_path, restored_step=restored_step, config=config) as trackers:
            assert trackers.names == ("mlflow",)
            step = (restored_step or 0) + 1
            trackers.write("train", step=step, version=step, values={"rollout/a": 0.5 * step})
    run = MlflowRun(tmp_path)
    assert run.scalars["rollout/a"] == {1: 0.5, 2: 1.0}
    assert (run.params, run.status) == ({"lr": "0.5"}, "FINISHED")


@given(st.text(st.characters(), max_size=400))
def test_mlflow_accepts_every_name(name):
    for validate in (_validate_metric_name, _validate_param_name, _validate_tag_name):
        validate(valid_name(name))  # raises
    assert valid_name(valid_name(name)) == valid_name(name)


@pytest.mark.parametrize("name", ["rollout/lag/p90", "val/pass@1/low", "attempts/failed_share/tool/search"])
def test_names_of_metrics_stay_what_they_are(name):
    assert valid_name(name) == name.replace("@", "_")


def test_a_server_that_is_not_there_costs_one_line(tmp_path, capsys):
    with (
        ReservedPort() as port,
        open_mlflow(tmp_path, uri=f"http://127.0.0.1:{port.number}/?k=v") as trackers,
    ):
        assert trackers.names == ()
        trackers.write("train", step=1, version=1, values={})
    lines = [line for line in capsys.readouterr().out.splitlines() if "mlflow" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "tracker mlflow could not start and is disabled (RuntimeError: http://127.0.0.1:"
    )
    assert lines[0].endswith("metrics.jsonl has everything")


def test_the_password_of_a_server_is_not_shown(tmp_path, capsys, monkeypatch):
    with ReservedPort() as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{port.number}")
        with open_mlflow(tmp_path) as trackers:
            assert trackers.names == ()
    shown = capsys.readouterr().out
    assert "http://***@127.0.0.1:" in shown
    assert "secret" not in shown


def test_a_run_that_gets_mlflow_when_it_resumes_has_its_config(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with open_mlflow(tmp_path, restored_step=3) as trackers:
        assert trackers.names == ("mlflow",)
    assert MlflowRun(tmp_path).params == {"lr": "0.5"}


class StoreError(Exception):
    """What an object store's own client raises."""


def test_a_store_that_takes_no_files_costs_the_tables_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from agentrl.extras.trackers.mlflow_tracker import MlflowClient

    def refuse(*_):
        raise StoreError("no credentials")

    monkeypatch.setattr(MlflowClient, "log_text", refuse)
    with open_mlflow(tmp_path) as trackers:
        trackers.log_attempts(SampledAttempts(1, 1, ()))
        trackers.write("train", step=2, version=2, values={"rollout/a": 1.0})
    assert MlflowRun(tmp_path).scalars["rollout/a"] == {2: 1.0}


def test_without_mlflow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    monkeypatch.delitem(sys.modules, "agentrl.extras.trackers.mlflow_tracker")
    with pytest.raises(ConfigError, match=r"trainer.logger=mlflow needs MLflow .*agentrl\[mlflow\]"):
        open_mlflow(tmp_path)


class Held:
    """A tracker whose service answers when `answers` is set; it refuses the record of step `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.answers, self.fails_at = threading.Event(), fails_at
        self.seen: list[object] = []

    def log(self, record: StepRecord) -> None:
        self.answers.wait()
        if record.step == self.fails_at:
            raise ConnectionError("gone")
        self.seen.append(record.step)

    def log_alarm(self, alarm: Alarm) -> None:
        self.seen.append(alarm.rule)

    def log_attempts(self, table) -> None:
        self.seen.append(table)

    def close(self) -> None:
        self.seen.append("closed")


def record(step: int) -> StepRecord:
    return StepRecord("train", step, step, 0.0)


def fill(tracker: BackgroundTracker) -> None:
    for step in (4, 5):  # the first may find a place: the thread took a record, or not yet
        tracker.log(record(step))


def test_no_step_waits_for_a_slow_service_and_all_of_it_arrives_in_order():
    inner = Held()
    tracker = BackgroundTracker(inner)
    tracker.log(record(1))
    tracker.log_alarm(ALARM)
    tracker.log_attempts("table")
    assert inner.seen == []
    inner.answers.set()
    tracker.close()
    assert inner.seen == [1, "r", "table", "closed"]


def test_an_error_is_raised_by_a_later_call_and_nothing_follows_it():
    inner = Held(fails_at=2)
    inner.answers.set()
    tracker = BackgroundTracker(inner)
    tracker.log(record(1))
    tracker.log(record(2))
    tracker._thread.join()
    for call in (lambda: tracker.log(record(3)), tracker.close):
        with pytest.raises(ConnectionError, match="gone"):
            call()
    assert inner.seen == [1]


def test_a_service_that_never_answers_holds_neither_a_step_nor_the_end():
    inner = Held()
    tracker = BackgroundTracker(inner, max_waiting=3, close_timeout_s=0.0)
    for step in (1, 2, 3):
        tracker.log(record(step))
    with pytest.raises(TimeoutError, match="3 records behind"):
        fill(tracker)
    late = BackgroundTracker(inner, close_timeout_s=0.0)
    late.log(record(1))
    with pytest.raises(TimeoutError, match="within 0 s"):
        late.close()
    inner.answers.set()
