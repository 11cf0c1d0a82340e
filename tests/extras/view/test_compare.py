"""Runs side by side, and evaluations problem by problem as `agentrl compare` counts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import DataError, UserError
from agentrl.extras.view.app import Pages
from agentrl.extras.view.compare import compare_runs
from agentrl.extras.view.run import RunReader
from agentrl.extras.view.sources import open_sources
from agentrl.tracking.metrics import StepRecord
from agentrl.types import RewardEvent
from parts.trajectories import make_trajectory


def write_metrics(folder: Path, rewards: list[float], config: str, *, step_s: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    records = [
        StepRecord("train", step, step, step, {"rollout/reward_mean": reward, "time/step_s": step_s})
        for step, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_bytes(b"".join(record.to_line() for record in records))
    (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Two seeds of one config, and a run with another learning rate."""
    form = "trainer: {{seed: {seed}, run_dir: {place}}}\nlearner: {{lr: {lr}}}\n"
    return [
        write_metrics(tmp_path / "a", [0.0, 0.5, 1.0], form.format(seed=0, place="a", lr=1)),
        write_metrics(tmp_path / "b", [0.5, 0.5], form.format(seed=1, place="b", lr=1), step_s=3.0),
        write_metrics(tmp_path / "c", [0.25], form.format(seed=0, place="c", lr=2) + "extra: x\n"),
    ]


def test_what_differs_comes_first_and_seeds_are_one_family(three: list[Path]) -> None:
    found = compare_runs([RunReader(source) for source in open_sources(three)])
    assert found.titles == ("a", "b", "c")
    assert found.families == (0, 0, 1)
    assert [(one.key, one.values) for one in found.differences] == [
        ("extra", (None, None, '"x"')),
        ("learner.lr", ("1", "1", "2")),
        ("trainer.run_dir", ('"a"', '"b"', '"c"')),
        ("trainer.seed", ("0", "1", "0")),
    ]


def test_a_family_has_the_mean_and_the_spread_of_its_runs(three: list[Path]) -> None:
    found = compare_runs([RunReader(source) for source in open_sources(three)])
    pair, alone = found.curves["rollout/reward_mean"]
    assert (pair.steps, pair.mean, pair.low, pair.high) == (
        [1, 2, 3],
        [0.25, 0.5, 1.0],
        [0.0, 0.5, 1.0],
        [0.5, 0.5, 1.0],
    )
    assert (pair.num_runs, alone.num_runs) == (1, 1), "one of the two had ended by step 3"
    assert (alone.mean, alone.low, alone.high) == ([0.25], [0.25], [0.25])
    assert dict(found.throughput)["seconds per step"] == (1.0, 3.0, 1.0)


def test_the_last_validation_is_that_of_the_end(three: list[Path]) -> None:
    (three[0] / "validations.json").write_text(
        json.dumps({"initial": {"val/accuracy": 0.1}, "final": {"val/accuracy": 0.9}})
    )
    with (three[1] / "metrics.jsonl").open("ab") as file:
        for value in (0.2, 0.4):
            file.write(StepRecord("validation", 1, 1, 1.0, {"val/accuracy": value}).to_line())
    found = compare_runs([RunReader(source) for source in open_sources(three)])
    assert dict(found.final)["val/accuracy"] == (0.9, 0.4, None)


def test_one_run_is_not_compared(three: list[Path]) -> None:
    with pytest.raises(DataError, match="give two or more runs"):
        compare_runs([RunReader(open_sources(three)[0])])


def test_evaluations_are_compared_as_the_command_counts(tmp_path: Path) -> None:
    from agentrl.extras.research.compare import compare
    from agentrl.figures.attempts import read_attempts

    for name, right in (("a", (0, 1)), ("b", (1, 2, 3, 4, 5, 6, 7))):
        made = [
            make_trajectory(
                [-1, 0], group_id=p, task_id=f"t:{p}", rewards=(RewardEvent("r", float(p in right), 1),)
            )
            for p in range(9)
        ]
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "attempts.parquet", encode(made))
    folders = [tmp_path / "a", tmp_path / "b"]
    pages = Pages(open_sources(folders))
    assert [shelf.source.kind for shelf in pages.shelves] == ["evaluation", "evaluation"]
    found = pages.answer("problems", {"sources": "0,1"})
    wanted = compare(*(read_attempts(folder) for folder in folders))
    assert found["overall"]["p_value"] == wanted.overall.p_value
    assert [pair["problem"] for pair in found["won"]] == [pair.problem for pair in wanted.won]
    assert (found["num_won"], found["num_lost"]) == (6, 1)
    for bad in ("0", "0,2", "x", "0,1,1"):
        with pytest.raises(UserError):
            pages.answer("problems", {"sources": bad})
