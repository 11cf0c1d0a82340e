"""Ray of this machine: it joins nobody unasked, and the user's files reach its workers though the driver's
folder is gone, and they have the niceness of the config.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import ray

from agentrl.chat.template import load_template
from agentrl.cluster.cluster import ray_session
from agentrl.config.cluster import MIN_OBJECT_STORE_BYTES, ClusterConfig
from agentrl.extras.supervised.config import SFTConfig
from agentrl.extras.supervised.train import supervise
from agentrl.plugins import load_plugins
from agentrl.plugins.sources import SHIPPED_PACKAGE


def test_a_started_ray_has_what_is_granted_and_workers_the_files_that_only_the_driver_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    template = folder / "own.jinja"
    template.write_text("of the driver")

    def read_in_worker() -> tuple[str, str, int]:
        rendered = load_template(Path("anywhere"), template_file="own.jinja").render(
            [], add_generation_prompt=False
        )
        return load_plugins(["my_reward.py"]).rewards.get("seven").__name__, rendered, os.nice(0)

    monkeypatch.setenv(
        "RAY_ADDRESS", "127.0.0.1:1"
    )  # as a shell beside a cluster has it; nothing answers there
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    config = ClusterConfig(object_store_bytes=MIN_OBJECT_STORE_BYTES, niceness=3)
    with ray_session(config, ["my_reward.py", "own.jinja"]) as line:
        held = ray.cluster_resources()
        assert (held["CPU"], held["object_store_memory"]) == (1, MIN_OBJECT_STORE_BYTES)
        assert line.startswith("Ray: 1 CPUs")
        file.unlink()
        template.unlink()
        remote = ray.remote(num_cpus=0)(read_in_worker)
        assert ray.get(remote.remote(), timeout=120) == ("Seven", "of the driver", os.nice(0) + 3)


CONVERSATION = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
def test_a_rank_of_supervised_training_imports_the_shipped_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_model.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).write_text(__file__)\n"
    )
    Path("sft.jsonl").write_text(json.dumps(CONVERSATION))
    config = SFTConfig.model_validate(
        {
            "data": {"train_files": ["sft.jsonl"]},
            "model": {"external_lib": "own_model.py"},
            "from_scratch": {"architecture": "qwen2", "sizes": SIZES},
            "trainer": {"steps": 1, "batch_size": 1, "logger": []},
        }
    )
    supervise(config)
    assert Path((tmp_path / "imported").read_text()).parent.name == SHIPPED_PACKAGE
