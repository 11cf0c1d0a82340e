"""Two FSDP ranks learn from images as one does, also where only one of them has any.

The file is also the program that forks the ranks.
"""

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from agentrl.chat.codec import find_image_tokens, load_tokenizer
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from parts.learner import learner_spec, reserved_ports
from parts.ranks import run_program, run_ranks
from parts.vision import sample_with_images, stored, write_seeing_model

TIMEOUT_S = 200.0
SIZES = [(84, 56), (28, 84)]


def play(rank, world_size, port, folder):
    """Make two updates on one rank, and export the policy."""
    model = ModelConfig(path=str(folder / "model"))
    options = LearnerConfig(
        world_size=world_size,
        collective_timeout_s=TIMEOUT_S,
        optimizer=OptimizerConfig(lr=1e-2),
        gradient_checkpointing=world_size > 1,
    )
    tokens = find_image_tokens(folder / "model", load_tokenizer(folder / "model"))
    refs = stored(folder / "images", *SIZES)
    shown = [[], refs, [], refs[:1], [], []]
    batches = [
        [sample_with_images(i, images, tokens, seed=seed + i) for i, images in enumerate(shown)]
        for seed in (10, 20)
    ]
    # One sample, so the other rank has a filler.
    batches.append([sample_with_images(0, refs, tokens, seed=30)])
    spec = learner_spec(model, learner=options, master_dtype=torch.float64)
    with closing(Learner(spec, rank=rank, address="127.0.0.1", port=port)) as learner:
        for batch in batches:
            shard = pack(batch, max_tokens=40, world_size=world_size)[rank]
            learner.update(learner.score(shard))
        learner.export(str(folder / f"policy_{world_size}"))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    write_seeing_model(folder / "model")
    run_program(__file__, folder, *reserved_ports(2), timeout_s=TIMEOUT_S)
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_two_ranks_learn_as_one(worlds):
    one, two = weights(worlds / "policy_1"), weights(worlds / "policy_2")
    assert one.keys() == two.keys()
    for name, weight in one.items():
        np.testing.assert_allclose(two[name], weight, atol=1e-6, err_msg=name)


def test_the_tower_stays_and_all_else_is_trained(worlds):
    start = weights(worlds / "model")
    for world_size in (1, 2):
        trained = weights(worlds / f"policy_{world_size}")
        assert trained.keys() == start.keys()
        for name, weight in trained.items():
            assert np.array_equal(weight, start[name]) == name.startswith("visual."), name


def test_an_export_has_the_settings_for_images(worlds):
    name = "preprocessor_config.json"
    assert (worlds / "policy_2" / name).read_text() == (worlds / "model" / name).read_text()


if __name__ == "__main__":
    given = Path(sys.argv[1])
    for size, port in enumerate(sys.argv[2:], start=1):
        failed = run_ranks((play, (rank, size, int(port), given)) for rank in range(size))
        assert failed == 0
