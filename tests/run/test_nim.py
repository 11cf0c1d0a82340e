"""Self-play: one policy in both seats of Nim learns to beat the policy that it started from, which stays
frozen on a server of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl.data.trajectories import decode, read_parquet
from agentrl.offline.audit import audit_run

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1500


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_self_play_beats_the_frozen_warm_start(tmp_path):
    command = [sys.executable, "benchmarks/nim.py", "--steps=40", "--rise=0.08"]
    out, runs = tmp_path / "nim.json", tmp_path / "runs"
    # 192 games alone would be off by 0.05, as a difference of two win rates.
    command += [f"--out={out}", f"--runs={runs}", "eval.n=4", "trainer.test_freq=20"]
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
