"""The user's files reach Ray's workers though the driver's folder is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from agentrl.config.cluster import ClusterConfig
from agentrl.controller.cluster import ray_session
from agentrl.plugins import load_plugins


def test_a_worker_loads_a_plugin_whose_file_only_the_driver_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = folder / "my_reward.py"
    file.write_text(
        "from agentrl.plugins import Reward, RewardResult\n"
        "class Seven(Reward):\n"
        "    name = 'seven'\n"
        "    def score(self, attempt):\n"
        "        return RewardResult(7.0)\n"
    )

    def name_in_worker() -> str:
        return load_plugins(["my_reward.py"]).rewards.get("seven").__name__

    with ray_session(ClusterConfig(num_cpus=1), ["my_reward.py"]):
        file.unlink()
        remote = ray.remote(num_cpus=0)(name_in_worker)
        assert ray.get(remote.remote(), timeout=120) == "Seven"
