"""The controller's handle of the learner, with real Ray actors: one of them is lost."""

import os
import signal

import numpy as np
import pytest

from agentrl.cluster.pools import Seat
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.controller.learner import pack_for, start_learner
from agentrl.errors import ConfigError, LearnerError
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner, LearnerSpec
from parts.local_ray import local_ray

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


def start(**changes):
    options = {
        "model": ModelConfig(),
        "learner": LearnerConfig(world_size=2, microbatch_tokens=4),
        "algorithm": AlgorithmConfig(),
    }
    options |= {"seed": 0, "temperature": 1.0, "total_updates": 10, "mode": "decoupled"}
    options |= {"from_scratch": ModelFromScratchConfig(architecture="qwen2", sizes=SIZES)}
    spec = LearnerSpec(**(options | changes))
    return start_learner(spec, [Seat()] * spec.learner.world_size)


def samples():
    mask = np.array([False, True, True, True])
    floats = np.full(4, -3.0, np.float32)
    return [
        Sample(i, np.array([1, 2, 3, 4 + i], np.int32), mask, mask, floats, (i - 1) * np.ones(4, np.float32))
        for i in range(3)
    ]


def test_the_group_learns_exports_and_names_a_lost_rank(tmp_path):
    group = start()
    try:
        assert group.run(Learner.collective_backend) == "gloo"
        batch = pack_for(group, samples(), LearnerConfig(world_size=2, microbatch_tokens=4))
        assert len(batch) == 4  # three samples of four tokens and a filler, two for each rank
        scored = group.run(Learner.score, batch)
        first, second = (
            group.run(Learner.update, scored) for _ in range(2)
        )  # a second epoch over the same scores
        assert first["ratio_max"] == pytest.approx(1.0, abs=1e-6)
        assert (first["num_tokens"], first["num_sequences"], first["is_skipped"]) == (9.0, 3.0, 0.0)
        assert second["mismatch_max"] != first["mismatch_max"]
        assert group.run(Learner.supervised_update, batch)["loss"] > 0
        group.run(Learner.export, str(tmp_path / "policy"))
        assert (tmp_path / "policy" / "model.safetensors").is_file()
        assert {s.name for s in group.run(Learner.tensor_specs)} == set(group.run(Learner.checksums))
        group.run(Learner.save, str(tmp_path / "state"))
        group.run(Learner.load, str(tmp_path / "state"))
        address, port = group.find_address()
        assert address
        assert 0 < port < 65536

        os.kill(group.pids()[1], signal.SIGKILL)
        with pytest.raises(LearnerError, match="learner rank 1 was lost during 'update'"):
            group.run(Learner.update, scored)
    finally:
        group.stop()


def test_a_mistake_of_the_user_arrives_as_it_was_raised():
    with pytest.raises(ConfigError, match=r"model\.path='/no/such/model' cannot be loaded"):
        start(
            model=ModelConfig(path="/no/such/model"), from_scratch=None, learner=LearnerConfig(world_size=1)
        )
