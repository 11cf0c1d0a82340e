"""Adapters of roles on a server: each request is computed with the adapter that it names, and with what the
learner computes for that role.
"""

import dataclasses

import pytest

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import SGLangServerConfig
from agentrl.learner.learner import LearnerSpec
from agentrl.learner.packing import pack
from agentrl.servers.launch import SGLangServer
from parts.learner import lone_learner, random_samples, write_tiny_model

VOCABULARY = 300
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ROLES = {"worker": ("worker",), "critic": ("judge",)}
LORA = LoRAConfig(rank=8, alpha=16.0, target_modules=ATTENTION, roles=ROLES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    write_tiny_model(folder / "base", VOCABULARY, max_position_embeddings=512, eos_token_id=1, pad_token_id=0)
    return folder


@pytest.fixture(scope="module")
def learner(folder):
    model = ModelConfig(path=str(folder / "base"), lora=LORA)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2))
    spec = LearnerSpec(model, config, AlgorithmConfig(), "decoupled", 3, 1.0, 20)
    with lone_learner(spec) as one:
        train(one)
        yield one


def train(one):
    names = ("main", "worker", "judge")
    samples = [
        dataclasses.replace(sample, segment_names=(names[index % 3],))
        for index, sample in enumerate(random_samples(9, VOCABULARY))
    ]
    [shard] = pack(samples, max_tokens=1000, world_size=1)
    one.update(one.score(shard))


def test_sglang_is_started_with_room_for_all_adapters():
    server = SGLangServer(SGLangServerConfig(), "bfloat16", lora=LORA)
    words = server.command("/m", weight_version="0", host="127.0.0.1", port=1)
    assert words[words.index("--max-loras-per-batch") + 1] == "4"  # three, and the base
