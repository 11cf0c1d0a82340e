"""The metrics file, the summary of trajectories, the timer: laws, and golden numbers worked out by hand."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import CheckpointError, InfrastructureError
from agentrl.figures.trajectory_metrics import summarise_trajectories
from agentrl.tracking.metrics import MetricsFile, PhaseTimer, StepRecord, read_metrics
from agentrl.types import SCORED_OUTCOMES, Message, Outcome, RewardEvent, ToolCall, Trajectory
from parts.trajectories import make_trajectory

NAMES = st.text("abcdefghij_", min_size=1, max_size=8).map(lambda name: f"rollout/{name}")
RECORDS = st.builds(
    StepRecord,
    kind=st.sampled_from(["train", "validation"]),
    step=st.integers(0, 10_000),
    version=st.integers(0, 10_000),
    wall_s=st.integers(0, 10**9).map(lambda ms: ms / 1000),
    values=st.dictionaries(NAMES, st.floats(), max_size=5),
)


def equal(one: StepRecord, other: StepRecord) -> bool:
    """Equality in which every value that is not finite is the same undefined value."""

    def finite(record: StepRecord) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in record.values.items()}

    own = (one.kind, one.step, one.version, one.wall_s)
    return own == (other.kind, other.step, other.version, other.wall_s) and finite(one) == finite(other)


# ------------------------------------------------------------------------------------------------------- file


@given(RECORDS)
def test_a_record_survives_its_line_and_the_line_is_strict_json(record):
    line = record.to_line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert equal(StepRecord.from_line(line), record)


@settings(max_examples=40, deadline=None)
@given(st.lists(RECORDS, max_size=8), st.integers(0, 10_000), st.integers(0, 40))
def test_resume_keeps_exactly_the_records_up_to_the_restored_step(records, restored_step, torn_bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, records)
        torn = StepRecord("train", 0, 0, 0.0, {"rollout/a": 1.0}).to_line()[:-1][
            :torn_bytes
        ]  # a crash in the middle of a write
        path.write_bytes(path.read_bytes() + torn)
        resumed = MetricsFile(path, restored_step=restored_step)
        kept = [r for r in records if r.step <= restored_step]
        after = StepRecord("train", restored_step + 1, 7, 1.5, {"rollout/a": 2.0})
        resumed.log(after)
        resumed.close()
        found = read_metrics(path)
        assert len(found) == len(kept) + 1
        assert all(equal(a, b) for a, b in zip(found, [*kept, after], strict=True))
        assert resumed.last_wall_s == (kept[-1].wall_s if kept else 0.0)
        assert [p.name for p in Path(folder).iterdir()] == ["metrics.jsonl"]


def write(path: Path, records: list[StepRecord]) -> None:
    file = MetricsFile(path)
    for record in records:
        file.log(record)
    file.close()


def test_a_record_is_in_the_file_before_the_file_is_closed(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(StepRecord("train", 1, 1, 0.5, {"rollout/a": 1.0}))
    assert [r.step for r in read_metrics(file.path)] == [1]
    file.close()
    file.close()


def test_a_fresh_start_keeps_the_old_file_under_a_free_name(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        write(path, [StepRecord("train", step, 0, 0.0)])
    steps = {p.name: [r.step for r in read_metrics(p)] for p in tmp_path.iterdir()}
    assert steps == {"metrics.1.jsonl": [1], "metrics.2.jsonl": [2], "metrics.jsonl": [3]}


@pytest.mark.parametrize(
    "line",
    [b"no json", b"[1]", b'{"kind":"train"}', b'{"kind":"train","step":1,"version":1,"wall_s":0,"a/b":"x"}'],
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    good = StepRecord("train", 1, 1, 0.0).to_line()
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_a_full_disk_is_an_error_that_names_file_and_cure(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(InfrastructureError, match=r"cannot write .*metrics\.jsonl: .*free some space"):
            file.log(StepRecord("train", 1, 1, 0.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.close()


# ---------------------------------------------------------------------------------------------------- summary


def trajectory(
    *,
    reward: float = 0.0,
    versions: tuple[int, ...] = (5,),
    agent: str = "tool_agent",
    needs_tool: bool = False,
    **fields: Any,
) -> Trajectory:
    """Two tokens of prompt, one action token per version, two tokens of context after the first."""
    turns = [-1, -1, *([0, -1, -1] if versions else []), *[1] * (len(versions) - 1)]
    all_versions = np.array(turns)
    all_versions[all_versions >= 0] = versions
    rewards = (RewardEvent("outcome", reward, max(np.flatnonzero(np.array(turns) >= 0), default=0)),)
    return make_trajectory(
        turns,
        data_source="arithmetic",
        agent_name=agent,
        versions=all_versions,
        rewards=rewards if reward and versions else (),
        extra_info={"needs_tool": True} if needs_tool else {},
        **fields,
    )


def test_summary_of_three_by_hand():
    call = Message("assistant", "", (ToolCall("1", "calculator", {}),))
    values = summarise_trajectories(
        [
            trajectory(reward=1.0, versions=(5, 4), needs_tool=True, messages=(call,)),
            trajectory(
                reward=0.0,
                versions=(3,),
                needs_tool=True,
                outcome=Outcome.TRUNCATED,
                metrics={"accuracy": 0.0, "num_tool_errors": 2},
            ),
            trajectory(
                reward=0.5,
                versions=(5, 5, 5),
                agent="single_turn_agent",
                metrics={"accuracy": 1.0, "num_tool_calls": 3},
            ),
            trajectory(outcome=Outcome.TIMEOUT, versions=()),
        ],
        lags=lambda versions: 5 - versions,
    )
    assert values == pytest.approx(
        {
            "rollout/trajectories": 4,
            "rollout/failed": 1,
            "rollout/outcome/completed": 0.5,
            "rollout/outcome/timeout": 0.25,
            "rollout/outcome/truncated": 0.25,
            "rollout/truncated": 0.25,
            "rollout/reward_mean": 0.5,
            "rollout/reward_std": math.sqrt((0.25 + 0.25 + 0) / 3),
            "rollout/accuracy": 2 / 3,
            "rollout/accuracy/tool_agent": 0.5,
            "rollout/accuracy/single_turn_agent": 1.0,
            "rollout/source/arithmetic/trajectories": 3,
            "rollout/source/arithmetic/reward_mean": 0.5,
            "rollout/source/arithmetic/accuracy": 2 / 3,
            "rollout/tool_use": 2 / 3,
            "rollout/tool_use/needs_tool": 0.5,
            "rollout/tool_calls/mean": 4 / 3,
            "rollout/tool_errors/mean": 2.0,
            "rollout/turns/mean": 5 / 3,
            "rollout/segments/mean": 1.0,
            "rollout/response_tokens/mean": (4 + 3 + 5) / 3,
            "rollout/response_tokens/max": 5,
            "rollout/action_tokens/mean": 2.0,
            "rollout/lag/mean": (0 + 1 + 2 + 0 + 0 + 0) / 6,
            "rollout/lag/max": 2,
            "rollout/lag/0": 4 / 6,
            "rollout/lag/1": 1 / 6,
            "rollout/lag/2": 1 / 6,
        }
    )


TRAJECTORIES = st.builds(
    trajectory,
    reward=st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
    outcome=st.sampled_from(list(Outcome)),
    versions=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    agent=st.sampled_from(["tool_agent", "single_turn_agent"]),
    needs_tool=st.booleans(),
)


@given(st.lists(TRAJECTORIES, max_size=6), st.lists(TRAJECTORIES, max_size=6))
def test_failed_attempts_change_counts_and_outcomes_only(some, others):
    scored = [t for t in some if t.outcome in SCORED_OUTCOMES]
    failed = [t for t in others if t.outcome not in SCORED_OUTCOMES]
    counting = ("trajectories", "failed", "outcome/", "truncated")

    def facts(values: dict[str, float]) -> dict[str, float]:
        return {
            name: value
            for name, value in values.items()
            if not name.removeprefix("val/").startswith(counting)
        }

    both = summarise_trajectories([*scored, *failed], lags=lambda versions: 5 - versions, prefix="val/")
    assert facts(both) == facts(
        summarise_trajectories(scored, lags=lambda versions: 5 - versions, prefix="val/")
    )
    assert both.get("val/failed", 0) == len(failed)


@given(st.lists(TRAJECTORIES, min_size=1, max_size=8))
def test_shares_add_up_and_agents_average_to_the_whole(trajectories):
    values = summarise_trajectories(trajectories, lags=lambda versions: 5 - versions)
    assert sum(v for name, v in values.items() if name.startswith("rollout/outcome/")) == pytest.approx(1)
    scored = [t for t in trajectories if t.outcome in SCORED_OUTCOMES]
    if scored:
        lags = {name: v for name, v in values.items() if name.removeprefix("rollout/lag/").isdigit()}
        assert sum(lags.values()) == pytest.approx(1)
        assert sum(int(name.rsplit("/", 1)[1]) * v for name, v in lags.items()) == pytest.approx(
            values["rollout/lag/mean"]
        )
        by_agent = sum(values[f"rollout/accuracy/{t.agent_name}"] for t in scored) / len(scored)
        assert by_agent == pytest.approx(values["rollout/accuracy"])


def test_reward_metrics_are_told_of_all_and_of_each_data_source():
    """By hand: `polite` was asked about three attempts and applied to two; `correct` to all."""
    values = summarise_trajectories(
        [
            trajectory(metrics={"reward/correct": 1.0, "reward/polite": 0.5, "reward/correct/steps": 3}),
            trajectory(metrics={"reward/correct": 0.0, "reward/polite/applied": 0.0}).replace(
                data_source="my/set"
            ),
            trajectory(metrics={"reward/correct": 1.0, "reward/polite": 1.0}).replace(data_source="my/set"),
        ],
        lags=None,
        prefix="val/",
    )
    assert {name: value for name, value in values.items() if "/reward/" in name} == {
        "val/reward/correct": pytest.approx(2 / 3),
        "val/reward/correct/steps": 3.0,
        "val/reward/polite": 0.75,
        "val/reward/polite/applied": pytest.approx(2 / 3),
        "val/source/arithmetic/reward/correct": 1.0,
        "val/source/arithmetic/reward/correct/steps": 3.0,
        "val/source/arithmetic/reward/polite": 0.5,
        "val/source/my/set/reward/correct": 0.5,
        "val/source/my/set/reward/polite": 1.0,
        "val/source/my/set/reward/polite/applied": 0.5,
    }


def test_what_is_not_defined_is_absent_rather_than_zero():
    assert summarise_trajectories([], lags=lambda versions: 1 - versions) == {}
    only_failed = summarise_trajectories(
        [trajectory(outcome=Outcome.MODEL_ERROR)], lags=lambda versions: 1 - versions
    )
    assert not [name for name in only_failed if "accuracy" in name or "reward" in name]
    assert "val/lag/mean" not in summarise_trajectories([trajectory()], lags=None, prefix="val/")
    assert "rollout/tool_use/needs_tool" not in summarise_trajectories(
        [trajectory()], lags=lambda versions: 5 - versions
    )


# ------------------------------------------------------------------------------------------------------ timer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_timer_adds_phases_and_starts_anew_each_step():
    clock, heard = Clock(), []
    timer = PhaseTimer(clock=clock, on_phase=heard.append)
    for seconds in (1.0, 2.0):
        with timer("update"):
            clock.now += seconds
    clock.now += 1.0
    with contextlib.suppress(ValueError), timer("publish"):
        clock.now += 4.0
        raise ValueError("a phase that fails is timed too")
    expected = {
        "time/update_s": 3.0,
        "time/publish_s": 4.0,
        "time/share/update": 0.375,
        "time/share/publish": 0.5,
        "time/step_s": 8.0,
    }
    assert timer.finish_step() == pytest.approx(expected)
    assert timer.finish_step() == {"time/step_s": 0.0}
    assert heard == ["update", None, "update", None, "publish", None]


# ---------------------------------------------------------------------------------------------------- imports


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (
            "tracking.metrics tracking.console tracking.tracker figures.trajectory_metrics",
            "torch ray wandb matplotlib tensorboard",
        ),
        ("rollout.tracing", "torch ray opentelemetry mlflow"),
    ],
)
def test_tracking_loads_only_what_it_needs(modules, forbidden):
    check_what_is_loaded(modules, forbidden)


def check_what_is_loaded(modules, forbidden):
    imports = "; ".join(f"import agentrl.{name}" for name in modules.split())
    program = f"import sys; {imports}; print(*sorted(set(sys.modules) & set({forbidden.split()!r})))"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == ""
