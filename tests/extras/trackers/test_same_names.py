"""One run in all trackers: the same names and values in each, the table of a validation, the alarms."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from agentrl.buffer.lineage import Lineage
from agentrl.config.compose import dump_config
from agentrl.config.schema import Config
from agentrl.controller.listeners import FinishedStep
from agentrl.controller.observe import Observer
from agentrl.controller.run_dir import RunDir
from agentrl.tracking.metrics import read_metrics
from agentrl.types import Failure, Message, Outcome
from parts.observed import observed
from parts.tracked import MlflowRun, tensorboard_scalars, tensorboard_texts, wandb_scalars, wandb_tables
from parts.trajectories import make_trajectory
from parts.wandb_files import alerts

SECRET = "hunter2-very-secret"
NAMES = ("wandb", "tensorboard", "mlflow")


def validated():
    texts = (Message("user", "6*7?"), Message("assistant", "It is 42 | <b>\x1b[31m"))
    right = [
        make_trajectory([-1, 0, 0], group_id=row, task_id=f"val:{row}", reward=1.0, messages=texts)
        for row in range(5)
    ]
    failure = Failure("timed out")
    return [*right, make_trajectory([-1], group_id=5, outcome=Outcome.TIMEOUT, failure=failure)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two steps in every tracker: the second raises an alarm; then a validation."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(home))
        folder = tmp_path_factory.mktemp("run") / "run"
        config = Config.model_validate(
            {
                "trainer": {"run_dir": str(folder), "logger": NAMES},
                "agent": {"tool_config": {"search": {"api_key": SECRET}}},
                "tracking": {"attempts_per_validation": 3, "alarms": {"min_ess": 0.5}},
            }
        )
        opened = RunDir.open(config.trainer, dump_config(config))
        observer = observed(config, opened)
        facts = SimpleNamespace(
            learned_by=0,
            lags=Lineage.of([(0, 0)]).lags,
            version=1,
            groups=(),
        )
        for step, ess in enumerate((0.9, 0.4), start=1):
            update = {"correction/ess": ess, "loss": math.nan if step == 1 else 0.25}
            observer.step(FinishedStep(step, updates=[update], **vars(facts)))
        observer.validation(2, 2, {"val/reward_mean": 0.5}, baseline=None)
        observer.sample_attempts(validated(), step=2, version=2)
        observer.close()
        opened.close()
        return folder


@pytest.fixture(scope="module")
def mlflow_run(run_dir):
    return MlflowRun(run_dir)


def test_every_tracker_has_every_metric_under_the_same_name(run_dir, mlflow_run):
    expected: dict[str, dict[int, float]] = {}
    for record in read_metrics(run_dir / "metrics.jsonl"):
        for name, value in record.shown().items():
            expected.setdefault(name, {})[record.step] = value
    assert expected["alarms/raised"] == {1: 0.0, 2: 1.0}
    assert expected["learner/loss"] == {2: 0.25}
    for scalars in (wandb_scalars(run_dir), mlflow_run.scalars):
        assert scalars == expected
    stored = tensorboard_scalars(run_dir)
    assert stored.keys() == expected.keys()
    assert all(stored[name] == pytest.approx(expected[name], rel=1e-6) for name in stored)


def test_every_tracker_has_the_alarm(run_dir, mlflow_run):
    [(title, line)] = alerts(run_dir)
    assert title == "alarm ess_low"
    assert line.startswith("alarm ess_low at step 2: learner/correction/ess = 0.4 < 0.5; ")
    assert mlflow_run.tags["alarms/log/ess_low"] == line
    assert tensorboard_texts(run_dir)["alarms/log/ess_low"] == {2: f"    {line}"}
    [(step, [row])] = wandb_tables(run_dir, "alarms/log").items()
    assert (step, row["step"], row["rule"], row["value"]) == (2, 2, "ess_low", 0.4)


def test_every_tracker_has_the_same_table_of_attempts(run_dir, mlflow_run):
    tables = wandb_tables(run_dir, "val/attempts")
    assert list(tables) == [2]
    assert tables[2] == mlflow_run.table("val/attempts", 2)
    assert [row["task_id"] for row in tables[2]] == ["val:0", "val:2", "val:4"]
    assert tables[2][0]["conversation"] == "[user] 6*7?\n[assistant] It is 42 | <b>\\x1b[31m"
    text = tensorboard_texts(run_dir)["val/attempts"][2]
    assert mlflow_run.text("val/attempts/step_000002.md") == text
    assert text.count("| val:") == 3
    assert "    [assistant] It is 42 | <b>\\x1b[31m" in text


@pytest.mark.parametrize("limit", [0, 2])
def test_conversations_go_to_trackers_only_as_configured(tmp_path, limit):
    config = Config.model_validate(
        {
            "trainer": {"run_dir": str(tmp_path / "run"), "logger": ["tensorboard"]},
            "tracking": {"attempts_per_validation": limit},
        }
    )
    opened = RunDir.open(config.trainer, dump_config(config))
    observer = Observer(config, opened, resumed_at=None)
    observer.sample_attempts(validated(), step=2, version=2)
    observer.close()
    opened.close()
    texts = tensorboard_texts(tmp_path / "run")
    assert texts.get("val/attempts", {}).get(2, "").count("| val:") == limit


def test_mlflow_has_the_config_and_the_end_of_the_run(mlflow_run):
    assert mlflow_run.params["tracking.attempts_per_validation"] == "3"
    assert mlflow_run.params["agent.tool_config.search.api_key"] == "***"
    assert mlflow_run.status == "FINISHED"


def test_no_tracker_has_a_secret(run_dir):
    own = [path for path in run_dir.rglob("*") if path.is_file() and path.name != "config.yaml"]
    assert not [path for path in own if SECRET.encode() in path.read_bytes()]
