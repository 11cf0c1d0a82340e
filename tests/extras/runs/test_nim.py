"""Nim: one policy in both seats, an adapter for each seat, and a policy against its past learn to beat the
policy that they started from, which stays frozen on a server of its own.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.research.audit import audit_run

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 1500


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_self_play_beats_the_frozen_warm_start(tmp_path):
    command = [sys.executable, "benchmarks/nim.py", "--steps=40", "--rise=0.08"]
    out, runs = tmp_path / "nim.json", tmp_path / "runs"
    # 192 games alone would be off by 0.05, as a difference of two win rates.
    command += [f"--out={out}", f"--runs={runs}"]
    command += ["--overrides", "eval.n=4", "trainer.test_freq=20"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S)
    (figures,) = json.loads(out.read_text())["runs"]
    assert sorted(map(int, figures["win_rate"])) == [0, 20, 40]
    folder = runs / "self_play"
    assert audit_run(folder).audit.is_balanced
    for file in sorted((folder / "trajectories").glob("step_*.parquet")):
        for trajectory in decode(read_parquet(file)):
            spoken = {trajectory.conversations[index].name for index in trajectory.segment_conversations}
            assert spoken <= {"first", "second"}
            assert np.isfinite(trajectory.behavior_logprobs).all()
            if spoken == {"first", "second"}:
                assert trajectory.reward == 0.0, "zero-sum"
    for file in (folder / "validation").glob("*.parquet"):
        for game in decode(read_parquet(file)):
            seats = {one.name: one.opponent for one in game.conversations[1:]}
            assert all(
                seats[name] == (None if name == game.extra_info["side"] else "frozen") for name in seats
            )


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S + 60)
def test_two_adapters_and_a_policy_against_its_past_beat_the_frozen_warm_start(tmp_path):
    command = [sys.executable, "benchmarks/nim.py", "--setups", "roles", "past", "--steps=30", "--rise=0.05"]
    out, runs = tmp_path / "nim.json", tmp_path / "runs"
    subprocess.run([*command, f"--out={out}", f"--runs={runs}"], cwd=ROOT, check=True, timeout=2 * TIMEOUT_S)
    figures = {run["name"]: run for run in json.loads(out.read_text())["runs"]}
    assert figures.keys() == {"roles", "past"}
    for name, measured in figures.items():
        assert audit_run(runs / name).audit.is_balanced
        assert set(measured["win_rate_by_side"]) == {"first", "second"}

    first, second = (
        load_file(runs / "roles" / "adapters" / name / "adapter_model.safetensors")
        for name in (".", "second")
    )
    ups = [name for name in first if "lora_B" in name]
    assert all(np.abs(adapter[name]).max() > 0 for adapter in (first, second) for name in ups)
    assert all(np.abs(first[name] - second[name]).max() > 0 for name in ups)

    steps = figures["past"]["in_training"]
    assert [steps[step]["opponents/past/step"] for step in ("9", "10", "29", "30")] == [0, 10, 20, 30]
    played = sum(own for one in steps.values() for name, own in one.items() if name.endswith("/trajectories"))
    [line] = [line for line in (runs / "past/summary.md").read_text().splitlines() if "opponent past" in line]
    said = re.fullmatch(r"- opponent past: ([\d,]+) attempts trained on, .*step of its policy (.*)", line)
    by_step = re.findall(r"(\d+): ([\d,]+), 0\.\d{3}", said[2])
    assert [int(step) for step, _ in by_step][:3] == [0, 10, 20]
    assert sum(int(number.replace(",", "")) for _, number in by_step) == played
    assert played <= int(said[1].replace(",", "")) <= 30 * 12 * 16
    for file in (runs / "past/trajectories").glob("step_*.parquet"):
        for game in decode(read_parquet(file)):
            seats = {one.name: one.opponent for one in game.conversations[1:]}
            assert all(seats[name] == (None if name == game.extra_info["side"] else "past") for name in seats)
