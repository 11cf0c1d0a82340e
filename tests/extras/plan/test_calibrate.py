"""A recorded run, calibrated: its config gives back what was put into the record, and its step time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.config.simulation import SimulatedServerConfig
from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import ConfigError, DataError
from agentrl.extras.plan.calibrate import _pace, calibrate
from agentrl.extras.plan.draws import Draws
from agentrl.extras.plan.simulate import simulate, workload_of
from agentrl.extras.plan.workload import Script, Scripts
from agentrl.tracking.metrics import StepRecord
from agentrl.types import NO_VERSION, Outcome, RewardEvent, Trajectory

PACE_S = 0.05
TOKENS_PER_S = 400.0
RUN = Config.model_validate(
    {
        "agent": {"trajectory_timeout_s": 1e5, "tool_timeout_s": 1e4},
        "rollout": {"backend": "sglang", "group_size": 4, "max_concurrent_trajectories": 32},
        "buffer": {"groups_per_step": 4, "max_staleness": 1},
        "simulation": {
            "steps": 8,
            "grain_tokens": 1,
            "publish_s": 0.5,
            "prompt_tokens": {"mean": 20},
            "turns": {"kind": "uniform", "mean": 2.5},
            "turn_tokens": {"kind": "lognormal", "mean": 40, "sigma": 0.7},
            "tool_tokens": {"kind": "uniform", "mean": 10},
            "tool_s": {"kind": "exponential", "mean": 1.0},
            "server": {"seconds_per_token": PACE_S, "max_running": 32},
            "learner": {"tokens_per_s": TOKENS_PER_S},
        },
    }
)
"""The run that is recorded: of 16 attempts per step, paced."""

WAITS = {"tool_s": 0.5, "interaction_s": 0.2, "opponent_s": 0.3}


def trajectory(script: Script, group: int, member: int, *, paused: float = 0.0) -> Trajectory:
    """Return the attempt of a script. paused: share of the time in which servers do not sample."""
    turn_ids = [-1] * script.prompt_tokens
    for index, turn in enumerate(script.turns):
        turn_ids += [index] * turn.tokens + [-1] * turn.tool_tokens
    ids = np.array(turn_ids, np.int16)
    mask = ids >= 0
    sampled = int(mask.sum())
    last = int(np.flatnonzero(mask)[-1])
    waited_s = sum(turn.tool_s for turn in script.turns)
    return Trajectory(
        group,
        member,
        f"task-{group}",
        "synthetic",
        "tool_agent",
        token_ids=np.zeros(len(ids), np.int32),
        action_mask=mask,
        behavior_logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        turn_ids=ids,
        messages=(),
        rewards=(RewardEvent("reward", script.reward, last),),
        outcome=Outcome.COMPLETED,
        metrics={
            "generate_s": sampled * PACE_S / (1 - paused),
            # Whoever makes the policy wait between two turns.
            **{name: share * waited_s for name, share in WAITS.items()},
        },
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a record of `RUN`: what its simulation measured, and its attempts."""
    folder = tmp_path_factory.mktemp("recorded")
    simulated = simulate(RUN)
    (folder / "trajectories").mkdir()
    scripts = Scripts(workload_of(RUN, 1), Draws(RUN.trainer.seed))
    lines = []
    for step in range(1, 9):
        groups = range(4 * (step - 1), 4 * step)
        paused = 0.5 / simulated.step_s
        attempts = [trajectory(scripts.next(g, m), g, m, paused=paused) for g in groups for m in range(4)]
        write_parquet(folder / "trajectories" / f"step_{step:06d}.parquet", encode(attempts), step=step)
        sampled = sum(attempt.num_action_tokens for attempt in attempts)
        values = {
            "time/step_s": simulated.step_s,
            "time/update_s": sampled / TOKENS_PER_S,
            "time/publish_s": 0.5,
            "rollout/action_tokens/mean": sampled / 16,
            "rollout/trajectories": 16.0,
            "rollout/accuracy": float("nan"),
        }
        lines.append(StepRecord("train", step, step, 1.0 * step, values).to_line())
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    written = RUN.model_copy(update={"simulation": Config().simulation}).model_dump(mode="json")
    (folder / "config.yaml").write_text(json.dumps(written))
    return folder


def test_what_was_recorded_is_given_back(run: Path) -> None:
    found = calibrate(run)
    own = found.config.simulation
    assert own.server.seconds_per_token == pytest.approx(PACE_S)
    assert own.server.max_running == 32
    assert own.learner.tokens_per_s == pytest.approx(TOKENS_PER_S, rel=1e-3)
    assert own.publish_s == pytest.approx(0.5)
    assert own.prompt_tokens.values == (20.0,) * 64
    assert found.num_attempts == 128
    scripts = Scripts(workload_of(RUN, 1), Draws(RUN.trainer.seed))
    attempts = [scripts.next(group, m).turns for group in range(32) for m in range(4)]
    lengths = [np.mean([turn.tokens for turn in turns]) for turns in attempts]
    assert np.mean(own.turn_tokens.values) == pytest.approx(np.mean(lengths), rel=1e-4)
    assert np.mean(own.turns.values) == pytest.approx(np.mean([len(turns) for turns in attempts]), rel=1e-4)
    waits = [np.mean([turn.tool_s for turn in turns[:-1]]) for turns in attempts if len(turns) > 1]
    assert np.mean(own.tool_s.values) == pytest.approx(np.mean(waits), rel=1e-4)


def test_the_calibrated_config_predicts_the_recorded_step(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibrated.yaml"
    result = CliRunner().invoke(
        app, ["simulate", "--calibrate", str(run), "--out", str(out)], catch_exceptions=False
    )
    assert "128 attempts read, 0 left out" in result.stdout
    simulated = simulate(load_config(str(out), ["simulation.grain_tokens=1"]))
    assert simulated.step_s == pytest.approx(calibrate(run).step_s, rel=0.1)


def test_attempts_that_failed_are_left_out(run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "trajectories").mkdir()
    script = Scripts(workload_of(RUN, 1), Draws(1)).next(0, 0)
    whole = trajectory(script, 0, 0)
    nothing = {"action_mask": np.zeros_like(whole.action_mask), "rewards": ()}
    empty = replace(whole, **nothing)
    write_parquet(tmp_path / "trajectories" / "step_000001.parquet", encode([whole, empty]), step=1)
    found = calibrate(tmp_path)
    assert (found.num_attempts, found.num_left_out) == (1, 1)


def test_bad_input_is_answered_in_a_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not the folder of a training run: it lacks metrics\.jsonl"):
        calibrate(tmp_path)
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    with pytest.raises(
        DataError, match=r"has no trajectories/step_\*.parquet.*trainer.keep_trajectories=true"
    ):
        calibrate(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="has no step of a training"):
        calibrate(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(StepRecord("train", 1, 1, 0.0, {"time/step_s": 1.0}).to_line())
    with pytest.raises(DataError, match=r"metrics\.jsonl has no time/update_s above 0 in any step"):
        calibrate(tmp_path)
    for arguments, why in (
        (["--calibrate", str(run), "run.yaml"], "has its own configs; leave out run.yaml"),
        (["--calibrate", str(run), "--out", "x.png"], "a config must end in .yaml"),
    ):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def sums_of(points: list[tuple[int, float]], alone_s: float, each_s: float) -> dict[str, float]:
    """Return the metrics of answers with (tokens, running requests) on the line of a server."""
    weights, running = np.array(points, np.float64).T
    seconds = weights * (alone_s + each_s * running)
    return {
        "pace/tokens": weights.sum(),
        "pace/running": (weights * running).sum(),
        "pace/running_squared": (weights * running**2).sum(),
        "pace/seconds": seconds.sum(),
        "pace/running_seconds": (seconds * running).sum(),
    }


POINTS = st.lists(st.tuples(st.integers(1, 1000), st.floats(1, 200)), min_size=1, max_size=20)


@given(POINTS, st.floats(0.001, 1), st.floats(0, 0.1), st.integers(1, 8), st.floats(0.1, 10))
def test_a_planted_line_is_given_back_scaled_to_the_mean(points, alone_s, each_s, num_actors, scale) -> None:
    """Over two records whose metrics add up, and for each of the actors' requests."""
    records = [StepRecord("train", step, step, 0.0, sums_of(points, alone_s, each_s)) for step in (1, 2)]
    sums = records[0].values
    mean_s = sums["pace/seconds"] / sums["pace/tokens"]
    found = _pace(records, mean_s=scale * mean_s, num_actors=num_actors)
    mean_running = sums["pace/running"] / sums["pace/tokens"]
    running = np.array([r for _, r in points])
    if np.ptp(running) < 1e-3 * mean_running:
        return
    whole = found["seconds_per_token"] + found["seconds_per_running"] * num_actors * mean_running
    assert whole == pytest.approx(scale * mean_s)
    assert found["seconds_per_token"] == pytest.approx(scale * alone_s, rel=1e-3, abs=0.011 * scale * mean_s)
    assert found["seconds_per_running"] >= 0


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="a run before these metrics"),
        pytest.param(sums_of([(10, 4.0), (30, 4.0)], 0.1, 0.01), id="requests always as many"),
        pytest.param(sums_of([(10, 1.0), (30, 9.0)], 0.5, -0.05), id="a line that falls"),
    ],
)
def test_what_tells_nothing_about_the_slope_leaves_the_mean(values) -> None:
    found = _pace([StepRecord("train", 1, 1, 0.0, values)], mean_s=0.2, num_actors=1)
    assert found == {"seconds_per_token": 0.2, "seconds_per_running": 0.0}


def test_a_step_takes_longer_the_more_each_running_request_costs() -> None:
    steps = []
    for each_s in (0.0, 0.002, 0.01):
        server = RUN.simulation.server.model_copy(update={"seconds_per_running": each_s})
        own = RUN.simulation.model_copy(update={"server": server})
        steps.append(simulate(RUN.model_copy(update={"simulation": own})).step_s)
    assert steps == sorted(set(steps))


def test_the_cost_of_running_requests_needs_that_of_a_token() -> None:
    with pytest.raises(ValueError, match=r"seconds_per_running=0\.1 adds to seconds_per_token"):
        SimulatedServerConfig(seconds_per_running=0.1)
