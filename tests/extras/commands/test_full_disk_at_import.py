"""A disk that is full is told in one line, by a command of an extra, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_command_says_so_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "verl.yaml"
    config.write_text("actor_rollout_ref: {rollout: {n: 8}}\nalgorithm: {adv_estimator: grpo}\n")
    command = [
        sys.executable,
        "-m",
        "agentrl.cli",
        "config",
        "import",
        str(config),
        "--force",
        "--out",
        "/dev/full",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
        done.stderr.splitlines()[-1]
    ]
    assert done.stderr.splitlines()[-1].startswith("error (infrastructure): disk full: ")
