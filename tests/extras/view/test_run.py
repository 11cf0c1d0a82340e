"""The state of a run, while it goes on, after it, and of folders that lack files."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from agentrl.cluster.control import ActorLine, ControlDesk
from agentrl.cluster.servers import ServerLine
from agentrl.errors import DataError
from agentrl.extras.view.changes import state_of
from agentrl.extras.view.fleet import ActorState, ServerState
from agentrl.extras.view.run import DAMAGED, MAX_POINTS, MetricsTail, RunReader
from agentrl.extras.view.sources import open_sources
from agentrl.tracking.metrics import StepRecord
from parts.viewed import write_run


def record(step: int, reward: float = 0.5, **values: float) -> StepRecord:
    own = {
        "rollout/reward_mean": reward,
        "time/step_s": 4.0,
        **{n.replace("__", "/"): v for n, v in values.items()},
    }
    return StepRecord("train", step, step, 4.0 * step, own)


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(record(1).to_line() + b"no record\n" + record(2).to_line())
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not a metrics record"):
        MetricsTail(path).records()


def test_a_growing_file_is_read_line_by_line_and_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.records() == []
    lines = [record(step).to_line() for step in range(1, 6)]
    path.write_bytes(lines[0] + lines[1][:10])
    assert [r.step for r in tail.records()] == [1]
    path.write_bytes(b"".join(lines[:3]))
    assert [r.step for r in tail.records()] == [1, 2, 3]
    with path.open("r+b") as file:  # what was read is not read again
        file.write(b"x" * len(lines[0]))
    with path.open("ab") as file:
        file.write(lines[3])
    assert [r.step for r in tail.records()] == [1, 2, 3, 4]


def test_a_run_that_goes_back_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_bytes(b"".join(record(step).to_line() for step in range(1, 9)))
    assert len(tail.records()) == 8
    other = tmp_path / "other"  # as `MetricsFile.go_back` replaces it
    other.write_bytes(b"".join(record(step, 0.9).to_line() for step in range(1, 9)))
    other.replace(path)
    assert [r.values["rollout/reward_mean"] for r in tail.records()] == [0.9] * 8
    path.write_bytes(record(1).to_line())
    assert [r.step for r in tail.records()] == [1]


def test_the_state_is_that_of_the_lock_and_of_the_result(tmp_path: Path) -> None:
    write_run(tmp_path)
    reader = RunReader(open_sources([tmp_path])[0])
    assert reader.overview().state == "stopped"
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = reader.overview()
        assert (shown.state, shown.step, shown.steps) == ("running", 3, 9)
        assert shown.eta_s == pytest.approx(2.0 * 6), "two seconds for each of the six steps that are left"
    (tmp_path / "result.json").write_text("{}")
    assert reader.overview().state == "ended"
    assert reader.overview().eta_s is None


def test_what_went_wrong_is_counted_by_kind(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "alarms.jsonl").write_text(
        json.dumps(
            {
                "step": 2,
                "event": "raised",
                "rule": "ess",
                "metric": "m",
                "value": 0.1,
                "side": "at_least",
                "bound": 0.5,
                "advice": "a",
            }
        )
        + "\nhalf a li"
    )
    shown = RunReader(open_sources([tmp_path])[0]).overview()
    assert [(a.step, a.rule) for a in shown.alarms] == [(2, "ess")]
    assert shown.num_failures == 3
    (kind,) = shown.failures
    assert (kind.count, kind.text, kind.became) == (
        3,
        "ran out of luck",
        {"retried": 1, "masked": 1, "dropped": 1},
    )
    assert shown.ledger == {"drawn": 6, "ready": 1}


def test_a_folder_with_nothing_but_a_config_is_a_run_that_starts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {steps: 5}\n")
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = RunReader(open_sources([tmp_path])[0]).overview()
    assert (shown.state, shown.step, shown.steps, shown.names) == ("starting", 0, 5, ())


@pytest.mark.parametrize(
    "name", ["config.yaml", "alarms.jsonl", "validations.json", "failures.parquet", "control/servers.json"]
)
def test_a_damaged_file_hides_only_itself(tmp_path: Path, name: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_bytes(b"\xff{[\n")
    shown = RunReader(open_sources([tmp_path])[0]).overview()
    assert shown.step == 3
    [told] = [alarm for alarm in shown.alarms if alarm.rule == DAMAGED]
    assert name in told.advice
    assert "\n" not in told.advice


def test_servers_and_actors_are_those_that_the_run_last_saw(tmp_path: Path) -> None:
    write_run(tmp_path)
    url = "http://127.0.0.1:1"
    desk = ControlDesk(tmp_path)
    desk.show(
        [
            ServerLine("server_0", url, "started", "embedded", "ready", 2, ""),
            ServerLine("server_1", "", "attached", "sglang", "failed", 0, "no answer"),
        ],
        version=3,
        outstanding_tokens=lambda: {url: 99},
        actors=[ActorLine("rollout-0", "playing", 1, 7, 30)],
    )
    reader = RunReader(open_sources([tmp_path])[0])
    shown = reader.overview()
    assert shown.servers == (
        ServerState(url, "embedded (started)", "ready", 2, 99, ""),
        ServerState("server_1", "sglang (attached)", "failed", 0, 0, "no answer"),
    )
    assert shown.actors == (ActorState("rollout-0", "playing", 1, 7, 30),)
    file = tmp_path / "control" / "servers.json"
    table = json.loads(file.read_text())
    assert shown.servers_time == table.pop("time")
    del table["actors"], table["checksum"]  # as an earlier version wrote it
    file.write_text(json.dumps({**table, "time": 1.0}))
    assert (reader.overview().servers, reader.overview().actors) == (shown.servers, ())


def test_a_long_curve_keeps_its_mean_and_a_short_one_its_values(tmp_path: Path) -> None:
    count = 2 * MAX_POINTS
    (tmp_path / "metrics.jsonl").write_bytes(
        b"".join(record(s, s % 2).to_line() for s in range(1, count + 1))
    )
    curves = RunReader(open_sources([tmp_path])[0]).series("train", ["rollout/reward_mean", "missing"])
    assert curves.values["rollout/reward_mean"] == [0.5] * MAX_POINTS
    assert len(curves.steps) == MAX_POINTS
    assert set(curves.values["missing"]) == {None}
    with pytest.raises(DataError, match="curves are of train or validation"):
        RunReader(open_sources([tmp_path])[0]).series("test", [])


def test_what_changed_is_what_was_written(tmp_path: Path) -> None:
    write_run(tmp_path)
    source = open_sources([tmp_path])[0]
    before = state_of(source)
    assert state_of(source) == before
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(record(4).to_line())
    after = state_of(source)
    assert {name for name in after if after[name] != before[name]} == {"metrics"}
    (tmp_path / "trajectories" / "step_000009.parquet").write_bytes(b"")
    assert state_of(source)["attempts"] != after["attempts"]
