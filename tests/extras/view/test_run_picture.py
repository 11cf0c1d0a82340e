"""The picture of the curves, and the curves themselves."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentrl.errors import CheckpointError
from agentrl.extras.view.run_panels import draw_outcomes
from agentrl.extras.view.run_picture import draw_figure, draw_report
from agentrl.extras.view.series import Series, smooth, windows
from agentrl.tracking.metrics import MetricsFile, StepRecord


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
        "speed/sampled_tokens_per_s": 3000.0,
        "time/take_s": 1.0,
        "time/update_s": 2.0,
        "time/step_s": 3.0,
    }
    return StepRecord("train", step, step, 3.0 * step, values)


def validation(step: int) -> StepRecord:
    return StepRecord(
        "validation", step, step, 3.0 * step, {"val/accuracy": step / 50, "val/accuracy/tool_agent": 0.5}
    )


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
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "completed 85.7%",
        "reward_error 14.3%",
    ]


# ---------------------------------------------------------------------------------------------- what is drawn

STEPS = np.arange(1, 40)
WHOLE = [validation(0), *map(train, STEPS.tolist()), validation(40)]


def panels_of(records: Sequence[StepRecord], max_staleness: int | None = 1) -> dict[str, list[Axes]]:
    """The axes of each panel, by its title; those of its lower strips have none."""
    panels: dict[str, list[Axes]] = {}
    for axes in draw_figure(Series(records), "the run", max_staleness).axes:
        title = axes.get_title() or axes.get_title(loc="left") or next(reversed(panels))
        panels.setdefault(title, []).append(axes)
    return panels


def curve(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    [line] = [line for line in axes.lines if line.get_label() == label]
    x, y = (np.asarray(values, float).tolist() for values in line.get_data())
    return x, y


def heights(axes: Axes, label: str) -> list[float]:
    """How high a layer of a stack is at each step."""
    [layer] = [layer for layer in axes.collections if layer.get_label() == label]
    vertices = np.asarray(layer.get_paths()[0].vertices)
    return [float(np.ptp(vertices[vertices[:, 0] == step, 1])) for step in STEPS]


def test_curves_are_those_of_the_metrics():
    [reward] = panels_of(WHOLE)["Training: reward and accuracy"]
    pale, _, pale_accuracy, _ = (line.get_data() for line in reward.lines)
    assert np.allclose(pale, (STEPS, STEPS / 40))
    assert np.allclose(pale_accuracy, (STEPS, STEPS / 50))
    assert np.allclose(curve(reward, "reward"), (STEPS, smooth(STEPS / 40, span=5)))
    assert np.allclose(curve(reward, "accuracy"), (STEPS, smooth(STEPS / 50, span=5)))


def test_validations_are_points_over_steps_and_minutes():
    panels = panels_of(WHOLE)
    [by_agent], [over_time] = panels["Validation: accuracy by agent"], panels["Over elapsed time"]
    assert curve(by_agent, "all rows") == ([0, 40], [0, 0.8])
    assert curve(by_agent, "tool_agent") == ([0, 40], [0.5, 0.5])
    assert curve(over_time, "validation accuracy") == ([0, 2], [0, 0.8])
    assert np.allclose(over_time.lines[0].get_data(), (STEPS * 3 / 60, STEPS / 40))


@pytest.mark.parametrize("bound", [None, 0, 3])
def test_the_lag_is_drawn_with_its_bound(bound):
    [lag] = panels_of(WHOLE, bound)["Lag of trained tokens"]
    assert heights(lag, "range") == pytest.approx([0.5] * 39)
    assert curve(lag, "mean") == (STEPS.tolist(), [0.5] * 39)
    bounds = [
        (line.get_label(), *line.get_data()[1])
        for line in lag.lines
        if str(line.get_label()).startswith("bound")
    ]
    assert bounds == ([] if bound is None else [(f"bound: max_staleness = {bound}", bound, bound)])
    assert lag.get_ylim()[1] > max(1, bound or 0)


def test_times_are_stacked_without_the_whole_step():
    _, phases = panels_of(WHOLE)["Speed and time per step"]
    assert [layer.get_label() for layer in phases.collections] == ["update", "take"], "the longest below"
    assert heights(phases, "update") == pytest.approx([2.0] * 39)
    assert heights(phases, "take") == pytest.approx([1.0] * 39)
    assert phases.get_ylim()[1] > 3


def test_what_is_undefined_is_left_out():
    entropy, kl, norm = panels_of(WHOLE)["Learner"]
    assert entropy.lines[0].get_data()[0].tolist() == [step for step in STEPS.tolist() if step != 3]
    assert [axes.texts[0].get_text() for axes in (kl, norm)] == ["not measured"] * 2


def test_ends_of_attempts_are_shares_that_fill_the_panel():
    [outcomes] = panels_of(WHOLE)["Outcomes of all attempts"]
    share = 3 / (9 * 39 + 3)
    failed = np.where(STEPS == 2, 3 / 12, 0)
    assert heights(outcomes, f"reward_error {share:.1%}") == pytest.approx(failed.tolist())
    assert heights(outcomes, f"completed {1 - share:.1%}") == pytest.approx((1 - failed).tolist())


def test_a_step_in_which_no_attempt_ends_leaves_no_gap():
    records = [
        StepRecord("train", step, step, 1.0, {"attempts/completed": 4.0 * (step % 3 > 0)})
        for step in range(1, 200)
    ]
    [outcomes] = panels_of(records)["Outcomes of all attempts"]
    vertices = np.asarray(outcomes.collections[0].get_paths()[0].vertices)
    assert vertices[vertices[:, 1] > 0, 1].tolist() == pytest.approx([1.0] * np.sum(vertices[:, 1] > 0))
    assert np.unique(vertices[:, 0]).size == 60


@given(st.integers(0, 300), st.integers(1, 70))
def test_windows_are_consecutive_and_about_equally_long(number, at_most):
    found = windows(np.arange(number, dtype=float), at_most=at_most)
    assert np.concatenate([[], *found]).tolist() == list(range(number))
    assert len(found) == min(number, at_most)
    assert not found or max(map(len, found)) - min(map(len, found)) <= 1


def test_the_second_of_two_equal_curves_is_not_drawn():
    records = [
        StepRecord("train", step, step, 1.0, {"rollout/reward_mean": 0.5, "rollout/accuracy": 0.5})
        for step in (1, 2)
    ]
    [reward] = panels_of(records)["Training: reward and accuracy"]
    assert [line.get_label() for line in reward.lines] == ["reward"]
    assert curve(reward, "reward") == ([1, 2], [0.5, 0.5])


def test_the_title_says_how_far_the_run_came():
    texts = [text.get_text() for text in draw_figure(Series(WHOLE), "the run", None).texts]
    assert texts[0] == "the run"
    assert texts[1].startswith("40 steps   ·   ")
    assert texts[1].endswith("   ·   validation accuracy 0.000 → 0.800")


def test_without_metrics_there_is_no_report(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        draw_report(tmp_path)
    with pytest.raises(CheckpointError, match="is empty"):
        draw_report(run_of(tmp_path))


def test_series_leave_out_what_is_undefined_and_stack_what_is_absent_as_nothing():
    series = Series([validation(0), train(2), train(3), validation(10)])
    assert [curve.tolist() for curve in series.train("learner/entropy")] == [[2], [0.5]]
    assert [curve.tolist() for curve in series.validation("val/accuracy", over_minutes=True)] == [
        [0, 0.5],
        [0, 0.2],
    ]
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
