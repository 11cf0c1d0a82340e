"""`agentrl report`: the summary and the picture of a run from its folder alone, also while the run goes
on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import CheckpointError, DataError
from agentrl.extras.view.report_refresher import ReportRefresher
from agentrl.extras.view.run_report import report_run
from agentrl.tracking.metrics import StepRecord

BUFFER = {
    "buffer/drawn": 44.0,
    "buffer/consumed": 30.0,
    "buffer/leased": 6.0,
    "buffer/ready": 4.0,
    "buffer/queued": 0.0,
}


def train(step: int) -> StepRecord:
    ended = {
        "buffer/dropped_stale": 1.0,
        "buffer/dropped_reward_error": 3.0,
        "attempts/completed": 7.0,
        "attempts/tool_error": 1.0,
    }
    values = {**BUFFER, **ended}
    return StepRecord("train", step, step + 1, 3.0 * step, {**values, "rollout/reward_mean": 0.5})


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A run that stopped after two steps: nothing of its end is there."""
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(train(step).to_line() for step in (1, 2)))
    (tmp_path / "validations.json").write_text(
        json.dumps({"initial": {"val/accuracy": 0.25, "val/trajectories": 8, "val/failed": 2}})
    )
    return tmp_path


def test_an_interrupted_run_has_a_summary_and_a_picture(interrupted: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(interrupted)])
    summary = (interrupted / "summary.md").read_text()
    assert done.stdout.splitlines() == [
        f"wrote {interrupted / 'summary.md'}",
        f"wrote {interrupted / 'report.png'}",
    ]
    assert "| initial | 0.250 |" in summary
    assert "- 2 steps, version 3" in summary
    assert (
        "- groups: 44 drawn, 30 trained on, 6 being played, 4 ready, 4 dropped (reward_error 3, stale 1)"
        in summary
    )
    assert "- attempts: 16 ended, 14 completed, 2 failed (12.5 %: tool_error 2)" in summary
    assert (interrupted / "report.png").stat().st_size > 10_000
    assert {path.name for path in interrupted.iterdir()} == {
        "metrics.jsonl",
        "validations.json",
        "summary.md",
        "report.png",
    }


def test_a_run_that_has_ended_keeps_the_counts_of_its_end(interrupted: Path) -> None:
    counts = {
        "drawn": 50,
        "queued": 0,
        "leased": 0,
        "ready": 5,
        "consumed": 45,
        "dropped": {},
        "discarded": {},
    }
    (interrupted / "result.json").write_text(json.dumps({"step": 2, "counts": counts}))
    report_run(interrupted)
    assert "- groups: 50 drawn, 45 trained on, 5 ready" in (interrupted / "summary.md").read_text()
    (interrupted / "result.json").write_text(
        json.dumps({"step": 1, "counts": counts})
    )  # of an earlier end: the run was made longer
    report_run(interrupted)
    assert "- groups: 44 drawn" in (interrupted / "summary.md").read_text()


def test_what_is_no_run_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not the folder of a training run: it has no metrics\.jsonl"):
        report_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        report_run(tmp_path)


def test_a_run_that_goes_on_refreshes_its_report_in_a_process_of_its_own(interrupted: Path) -> None:
    said: list[str] = []
    never = ReportRefresher(interrupted, interval_s=0.0, say=said.append)
    never.consider()
    never.close()
    assert not (interrupted / "report.png").exists()

    refresher = ReportRefresher(interrupted, interval_s=1e-9, say=said.append)
    refresher.consider()
    assert refresher._process is not None
    refresher._process.wait(120)
    refresher.close()
    assert (interrupted / "report.png").exists()
    assert said == []


def test_a_report_that_cannot_be_refreshed_is_said_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    refresher = ReportRefresher(tmp_path / "nowhere", interval_s=1e-9, say=said.append)
    refresher.consider()
    assert refresher._process is not None
    refresher._process.wait(120)
    refresher.consider()
    refresher.close()
    assert [text.rpartition(": error: ")[0] for text in said] == ["the report was not refreshed"]


def test_the_summary_has_a_line_for_each_opponent(tmp_path: Path) -> None:
    def record(kind: str, step: int, **values: float) -> StepRecord:
        named = {key.replace("__", "/"): value for key, value in values.items()}
        return StepRecord(kind, step, step, 1.0 * step, {**(BUFFER if kind == "train" else {}), **named})

    records = [
        record("validation", 0, val__opponent__frozen__trajectories=8, val__opponent__frozen__accuracy=0.25)
    ]
    for step in range(1, 21):
        own = {"opponents/past/behind/1/trajectories": 4, "opponents/past/behind/1/accuracy": 0.5}
        both = {"rollout/opponent/past/trajectories": 4, "rollout/opponent/past/accuracy": 0.5}
        records.append(record("train", step, **{"opponents/past/step": step, **own, **both}))
    records.append(
        record("validation", 20, val__opponent__frozen__trajectories=8, val__opponent__frozen__accuracy=0.75)
    )
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(one.to_line() for one in records))
    report_run(tmp_path)
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert "- opponent frozen: in validation 0.250 -> 0.750" in lines
    assert (
        "- opponent past: 80 attempts trained on, accuracy 0.500; by the step of its policy 0: 4, 0.500; "
        "1: 4, 0.500; 2: 4, 0.500; 3: 4, 0.500; ...; 16: 4, 0.500; 17: 4, 0.500; 18: 4, 0.500; 19: 4, 0.500"
    ) in lines
