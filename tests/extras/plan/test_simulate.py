"""Simulated runs: what follows by hand, what a seed repeats, and bad input."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.schema import Config
from agentrl.config.simulation import (
    DistributionConfig,
    SimulatedLearnerConfig,
    SimulatedServerConfig,
    SimulationConfig,
)
from agentrl.errors import ConfigError
from agentrl.extras.plan.estimate import StepEstimate
from agentrl.extras.plan.measure import Simulated
from agentrl.extras.plan.model_presets import PRESETS, preset
from agentrl.extras.plan.report import binding, lines_of
from agentrl.extras.plan.simulate import simulate
from agentrl.extras.plan.sweep import full_key, parse_sweep


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


def test_the_seed_is_that_of_the_config_unless_one_is_given(tmp_path: Path) -> None:
    own = config(staleness=1, turn_tokens={"kind": "lognormal", "mean": 100, "sigma": 1.0})
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(own.model_dump(mode="json", exclude_unset=True) | {"trainer": {"seed": 7}}))

    def step_s(*arguments: str) -> float:
        result = CliRunner().invoke(
            app, ["simulate", str(file), "--json", *arguments], catch_exceptions=False
        )
        return float(json.loads(result.stdout)[""]["step_s"])

    seeded = own.model_copy(update={"trainer": own.trainer.model_copy(update={"seed": 7})})
    assert step_s() == simulate(seeded).step_s
    assert step_s("--seed", "0") == simulate(own).step_s


WITHOUT_STEPS = (
    ({"agent": {"trajectory_timeout_s": 5.0}}, "attempts timeout.*use a larger agent.trajectory_timeout_s"),
    (
        {"simulation": {"turns": {"mean": 2}, "tool_failure": 1.0}},
        "attempts tool_error.*use a smaller simulation.tool_failure",
    ),
    (
        {"buffer": {"drop_constant_groups": True}, "simulation": {"pass_rate": 1.0}},
        "groups dropped for no_variance.*use a simulation.pass_rate between 0 and 1",
    ),
    ({"simulation": {"publish_s": 1e300}}, "after 2,000.0 simulated seconds and 0 attempts .none has ended."),
    ({"simulation": {"learner": {"tokens_per_s": 1e-300}}}, "step 1 is not over after 2,000"),
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation gives up sooner, to save time."""
    monkeypatch.setattr("agentrl.extras.plan.patience.STALL_S", 2000.0)


@pytest.mark.parametrize(("changes", "why"), WITHOUT_STEPS)
@pytest.mark.usefixtures("impatient")
def test_a_run_that_makes_no_step_is_told_why(changes: dict[str, dict[str, Any]], why: str) -> None:
    own = config(staleness=0).model_dump(mode="json", exclude_unset=True)
    for section, values in changes.items():
        own[section] = {**own[section], **values}
    with pytest.raises(ConfigError, match=why) as caught:
        simulate(Config.model_validate(own))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (
            {"steps": 10**9},
            r"simulation.steps=1,000,000,000 after 2 of warm-up would play 8,000,000,016 attempts",
        ),
        (
            {"prompt_tokens": {"mean": 1e12}},
            r"simulation.grain_tokens=1 makes 1,000,000,000,100 simulated tokens",
        ),
    ],
)
def test_what_would_take_days_is_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        simulate(config(staleness=0, **section))


def test_more_processes_than_memory_has_room_for_are_refused() -> None:
    own = config(staleness=0)
    rollout = own.rollout.model_copy(update={"num_servers": 10**9})
    with pytest.raises(ConfigError, match=r"rollout.num_servers=1,000,000,000: simulate at most 20,000"):
        simulate(own.model_copy(update={"rollout": rollout}))


FLOATS = [
    (where, name)
    for where, section in (
        ("", SimulationConfig),
        ("server", SimulatedServerConfig),
        ("learner", SimulatedLearnerConfig),
        ("turn_tokens", DistributionConfig),
    )
    for name, field in section.model_fields.items()
    if "float" in str(field.annotation) and name != "values"
]


@pytest.mark.parametrize(("where", "name"), FLOATS)
def test_no_number_is_infinite(where: str, name: str) -> None:
    values = {name: math.inf}
    with pytest.raises(ValidationError, match=name):
        SimulationConfig.model_validate({where: values} if where else values)


EXTREMES = (0.0, 5e-324, 1e-6, 1.0, 1e12, 1e308)


@pytest.mark.parametrize(("where", "name"), FLOATS)
@pytest.mark.usefixtures("impatient")
def test_any_other_number_is_simulated_or_refused(where: str, name: str) -> None:
    """In a line, and in bounded time. The model is computed: nothing is paced but what the number paces."""
    for number in EXTREMES:
        own: dict[str, Any] = {"steps": 1, "warmup": 0, "model": "qwen2.5-0.5b", "turns": {"mean": 2.0}}
        own["turn_tokens"] = {"kind": "lognormal", "mean": 200.0}
        part = own.setdefault(where, {}) if where else own
        part[name] = number
        try:
            found = simulate(
                Config.model_validate(
                    {
                        "agent": {"max_response_tokens": 400},
                        "rollout": {"backend": "sglang", "group_size": 2},
                        "buffer": {"groups_per_step": 1, "max_staleness": 0},
                        "simulation": own,
                    }
                )
            )
        except (ConfigError, ValidationError):
            continue
        assert math.isfinite(found.step_s), number


CONTRADICTIONS = (
    ("", "give a config to simulate"),
    ("run.yaml --hunt 3", "--hunt 3 has its own configs; leave out run.yaml"),
    ("--hunt 0", "--hunt 0: run at least 1 schedule"),
    ("--hunt 3 --faults 1", "use it with --hunt 1"),
    ("--hunt 1 --faults x", "use numbers of faults"),
    ("--hunt 1 --faults 0,9", "--faults 9: the schedule of --seed 0 has faults 0 to 3"),
    ("--hunt 1 --json --out x.png", "--hunt 1 does not use --out, --json"),
    ("--hunt 1 --what-if", "--hunt 1 does not use --what-if"),
    ("--calibrate run --seed 1", "--calibrate run does not use --seed"),
    ("--calibrate run --hunt 1", "--calibrate run does not use --hunt"),
    ("run.yaml --faults 1", "use it with --hunt 1"),
    ("run.yaml --what-if --sweep max_staleness=0,1", "--sweep max_staleness=0,1 does not use --what-if"),
    ("run.yaml --sweep max_staleness=0,1,0", "0 is given twice"),
    ("run.yaml --sweep max_staleness=0,1 buffer.max_staleness=2", "set buffer.max_staleness twice"),
    ("run.yaml --seed 1 trainer.seed=2", "set trainer.seed twice"),
    ("run.yaml --tool-hang 0.1 simulation.tool_hang=0.2", "set simulation.tool_hang twice"),
    ("run.yaml --out picture.pdf", "--out picture.pdf: a picture must end in .png"),
    ("run.yaml --out missing/x.png", "the folder missing does not exist"),
)


@pytest.mark.parametrize(("arguments", "why"), CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(arguments: str, why: str) -> None:
    """Before anything is simulated: the config does not even exist."""
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        CliRunner().invoke(app, ["simulate", *arguments.split()], catch_exceptions=False)
    assert "\n" not in str(caught.value)


def test_all_values_of_a_sweep_are_checked_before_the_first_is_simulated(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config(staleness=1).model_dump(mode="json", exclude_unset=True)))
    arguments = ["simulate", str(file), "simulation.publish_s=1e300", "--sweep", "max_staleness=0,x"]
    with pytest.raises(ConfigError, match=r'buffer\.max_staleness: "x" is wrong'):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_bad_input_is_answered_in_a_line() -> None:
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
