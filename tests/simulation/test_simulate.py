"""Simulated runs: what follows by hand, what a seed repeats, and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config.model_presets import PRESETS, preset
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.simulation.estimate import StepEstimate
from agentrl.simulation.measure import Simulated
from agentrl.simulation.report import binding, lines_of
from agentrl.simulation.simulate import simulate
from agentrl.simulation.sweep import full_key, parse_sweep


def config(*, staleness: int, tokens_per_s: float = 1000.0, **simulation: Any) -> Config:
    """Return a paced run: 4 groups of 2 attempts of 100 tokens, at 0.1 s per token, 4 at once."""
    return Config.model_validate(
        {
            "agent": {"trajectory_timeout_s": 1e5, "tool_timeout_s": 50.0},
            "rollout": {"backend": "sglang", "group_size": 2, "num_servers": 1},
            "buffer": {"groups_per_step": 4, "max_staleness": staleness},
            "simulation": {
                "steps": 5,
                "grain_tokens": 1,
                "publish_s": 1.0,
                "turn_tokens": {"kind": "fixed", "mean": 100},
                "server": {"seconds_per_token": 0.1, "max_running": 4},
                "learner": {"tokens_per_s": tokens_per_s},
                **simulation,
            },
        }
    )


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """8 attempts, 4 at once, of 10 s; then 800 tokens at 100 per second; then a publish of 1 s."""
    found = simulate(config(staleness=0, tokens_per_s=100.0))
    assert found.step_s == pytest.approx(20 + 8 + 1, rel=0.01)
    assert found.phases["learn"] == pytest.approx(8.0)
    assert found.phases["publish"] == pytest.approx(1.0, rel=0.05)
    assert found.servers["idle"] == pytest.approx(8 / 29, abs=0.02)
    assert found.lags == {0: 1.0}
    assert found.tokens_per_s == pytest.approx(800 / found.step_s)


@pytest.mark.parametrize(("seats", "most"), [(2, 2), (100, 24)])
def test_as_many_attempts_are_in_flight_as_actors_and_staleness_allow(seats: int, most: int) -> None:
    """Also while their tools run. 8 attempts per step and a lag of at most 2: 24 at the beginning."""
    own = config(staleness=2, turns={"mean": 2}, tool_s={"mean": 30.0}, tool_tokens={"mean": 1})
    rollout = own.rollout.model_copy(update={"max_concurrent_trajectories": seats})
    found = simulate(own.model_copy(update={"rollout": rollout}))
    assert found.most_in_flight == most
    assert any(f"play {most} attempts at a time at most" in line for line in lines_of(own, found))


@pytest.mark.parametrize(("tokens_per_s", "slower_s"), [(100.0, 20.0), (20.0, 40.0)])
def test_an_asynchronous_step_is_its_slower_part(tokens_per_s: float, slower_s: float) -> None:
    """Servers and learner work at the same time; a publish stops both."""
    found = simulate(config(staleness=2, tokens_per_s=tokens_per_s))
    assert found.step_s == pytest.approx(slower_s + 1.0, rel=0.06)
    assert max(found.lags) <= 2
    assert sum(found.lags.values()) == pytest.approx(1.0)


def test_tools_that_hang_cost_their_deadline() -> None:
    turns = {"turns": {"mean": 2}, "tool_s": {"mean": 1.0}, "tool_tokens": {"mean": 1}}
    quick = simulate(config(staleness=0, **turns))
    hangs = simulate(config(staleness=0, tool_hang=1.0, **turns))
    # Two waves of two turns: 10 + 10 + 10 + 10. With agent.tool_timeout_s=50: 10 + 50 + 10 + 10.
    assert hangs.step_s - quick.step_s == pytest.approx(40.0)


def test_a_seed_repeats_a_simulation() -> None:
    own = config(staleness=1, turn_tokens={"kind": "lognormal", "mean": 100, "sigma": 1.0})
    assert simulate(own) == simulate(own)
    other = own.model_copy(update={"trainer": own.trainer.model_copy(update={"seed": 7})})
    assert simulate(other) != simulate(own)


def test_a_real_model_is_faster_on_a_faster_gpu() -> None:
    def step_s(gpu: str) -> float:
        simulation = {"steps": 2, "gpu": gpu, "model": "qwen3-8b", "turn_tokens": {"mean": 2000}}
        own = {"simulation": simulation, "buffer": {"groups_per_step": 4, "max_staleness": 0}}
        return simulate(Config.model_validate(own)).step_s

    assert step_s("b200") < step_s("h200") < step_s("a100")


def test_presets_have_the_sizes_of_their_names() -> None:
    for name in PRESETS:
        size = preset(name)
        assert size is not None
        billions = {"glm-4.5-air": 106.0}.get(name) or float(re.findall(r"-([\d.]+)b", name)[0])
        assert size.num_parameters / 1e9 == pytest.approx(billions, rel=0.09), name
    assert preset("Qwen/Qwen3-8B") == preset("qwen3-8b")


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    own = config(staleness=1).model_dump(mode="json", exclude_unset=True)
    file.write_text(json.dumps(own))
    picture = tmp_path / "sweep.png"
    arguments = ["simulate", str(file), "--sweep", "max_staleness=0,1", "--out", str(picture)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["max_staleness", "0", "1"]
    assert picture.stat().st_size > 10_000
    result = CliRunner().invoke(app, ["simulate", str(file)], catch_exceptions=False)
    assert "binds first" in result.stdout


def test_a_run_that_waits_for_its_longest_attempt_is_not_advised_more_servers() -> None:
    """Servers that play the last attempts of a batch are busy, but more would not play these faster."""
    busy = Simulated(
        step_s=6.0,
        step_p95_s=6.0,
        phases={"take": 4.0, "learn": 1.0, "publish": 1.0},
        servers={"sampling": 0.95, "prefill": 0.0, "paused": 0.0, "down": 0.0, "idle": 0.05},
        running=1.0,
        waiting=0.0,
        most_in_flight=1,
        kv_share=0.1,
        leasing_share=0.0,
        lags={0: 1.0},
        tokens_per_step=800.0,
        sampled_per_step=800.0,
        mean_tokens=100.0,
        longest_tokens=100.0,
        redone_share=0.0,
        dropped={},
        num_failures=0,
    )
    estimate = StepEstimate(learner_s=1.0, servers_s=2.0, longest_s=9.0, max_staleness=1)
    binds, change = binding(config(staleness=1), busy, estimate)
    assert binds.startswith("the longest attempt")
    assert change.startswith("buffer.max_staleness=2, more GPUs per server")
    assert binding(config(staleness=1), busy, replace(estimate, servers_s=10.0))[1] == "more servers"
    assert lines_of(config(staleness=1), busy)[-1] == "change          more servers"


def test_bad_input_is_answered_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_stalness: no key of the config has this name"):
        full_key("max_stalness")
    with pytest.raises(ConfigError, match=r"path is ambiguous; use one of .*model\.path"):
        full_key("path")
    with pytest.raises(ConfigError, match=r"--sweep max_staleness: use KEY=V1,V2"):
        parse_sweep("max_staleness")
    with pytest.raises(ConfigError, match=r"simulation.model='gpt-9' is not known; set simulation.model to"):
        simulate(Config.model_validate({"simulation": {"model": "gpt-9"}}))
    with pytest.raises(ConfigError, match=r"145 GB of weights leave no room .* use more GPUs per server"):
        simulate(Config.model_validate({"simulation": {"model": "qwen2.5-72b", "server": {"gpus": 1}}}))
    for arguments, why in (
        (["simulate"], "give a config to simulate"),
        (["simulate", "run.yaml", "--hunt", "3"], "has its own configs; leave out run.yaml"),
        (["simulate", "--hunt", "3", "--faults", "1"], "use it with --hunt 1"),
        (["simulate", "--hunt", "1", "--faults", "x"], "use numbers of faults"),
    ):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
