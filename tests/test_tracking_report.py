"""The picture of the curves, and the curves themselves."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from agentrl.errors import CheckpointError
from agentrl.tracking.metrics import MetricsFile, StepRecord
from agentrl.tracking.report import draw_report
from agentrl.tracking.report_panels import draw_outcomes
from agentrl.tracking.series import Series, smooth


def run_of(folder: Path, *records: StepRecord) -> Path:
    file = MetricsFile(folder / "metrics.jsonl")
    for record in records:
        file.log(record)
    file.close()
    return folder


def train(step: int) -> StepRecord:
    values = {
        "rollout/reward_mean": step / 40,
        "rollout/accuracy": step / 50,
        "rollout/lag/mean": 0.5,
        "rollout/lag/max": 1.0,
        "attempts/completed": 9.0,
        "attempts/reward_error": 3.0 if step == 2 else math.nan,
        "rollout/outcome/completed": 0.9,
        "rollout/outcome/truncated": 0.1 if step % 2 else math.nan,
        "learner/entropy": math.inf if step == 3 else 0.5,
        "speed/tokens_per_s": 3000.0,
        "time/take_s": 1.0,
        "time/update_s": 2.0,
        "time/step_s": 3.0,
    }
    return StepRecord("train", step, step, 3.0 * step, values)


def validation(step: int) -> StepRecord:
    return StepRecord("validation", step, step, 3.0 * step, {"val/accuracy": step / 50, "val/accuracy/tool_agent": 0.5})


@pytest.mark.parametrize(
    "records",
    [
        [train(1)],
        [validation(0)],
        [StepRecord("train", 1, 1, 1.0, {})],
        [validation(0), *map(train, range(1, 40)), validation(40)],
    ],
    ids=["one step", "one validation", "nothing measured", "a whole run"],
)
def test_a_report_is_drawn_from_whatever_was_measured(tmp_path, records):
    path = draw_report(run_of(tmp_path, *records), max_staleness=1)
    header = path.read_bytes()[:24]
    assert path == tmp_path / "report.png"
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:])
    assert width > 1.5 * height > 1000


def test_the_outcomes_drawn_are_those_of_all_attempts():
    axes = Figure().subplots()
    draw_outcomes(axes, Series([train(1), train(2)]))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["completed 85.7%", "reward_error 14.3%"]


def test_without_metrics_there_is_no_report(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        draw_report(tmp_path)
    with pytest.raises(CheckpointError, match="no record"):
        draw_report(run_of(tmp_path))


def test_series_leave_out_what_is_undefined_and_stack_what_is_absent_as_nothing():
    series = Series([validation(0), train(2), train(3), validation(10)])
    assert [curve.tolist() for curve in series.train("learner/entropy")] == [[2], [0.5]]
    assert [curve.tolist() for curve in series.validation("val/accuracy", over_minutes=True)] == [[0, 0.5], [0, 0.2]]
    assert series.names("validation", "val/accuracy/") == ["tool_agent"]
    steps, values = series.stacked(["rollout/outcome/truncated", "rollout/outcome/timeout"])
    assert steps.tolist() == [2, 3]
    assert values.tolist() == [[0, 0.1], [0, 0]]
    assert (series.last_step, series.wall_s, series.num_records) == (10, 30.0, 4)


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=40), st.sampled_from([1, 3]))
def test_smoothing_is_the_mean_of_the_neighbours(values, span):
    half = span // 2
    expected = [np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    assert smooth(np.array(values), span=span) == pytest.approx(expected, abs=1e-9)
