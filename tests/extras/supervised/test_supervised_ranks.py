"""Supervised training on 1, 2 and 4 ranks: the same losses, gradients and weights, also where ranks have
nothing to learn.

The file is also a program: it imports torch once and forks every rank of every world.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.score_head import ScoreHead
from parts.learner import learner_spec, reserved_ports, tiny_sizes
from parts.ranks import run_program, run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47, tie_word_embeddings=False)
WORLDS = (1, 2, 4)
KINDS = ("sft", "rm")
TIMEOUT_S = 300.0


def tokens(rng):
    return rng.integers(0, VOCABULARY - 1, int(rng.integers(3, 16))).astype(np.int32)


def conversations(count):
    """Of one row or two, as templates that edit the history make them; few or many learned tokens."""
    rng, found = np.random.default_rng(7), []
    for index in range(count):
        rows = [tokens(rng) for _ in range(1 + index % 2)]
        ids = np.concatenate(rows)
        mask = rng.random(len(ids)) < (0.1, 0.9)[index % 2]
        mask[-1] = True
        starts = tuple(np.cumsum([0, *(len(row) for row in rows[:-1])]).tolist())
        found.append(Sample.supervised(index, ids, mask, starts))
    return found


def preferences(count):
    rng = np.random.default_rng(7)
    return [Sample.pair(index, tokens(rng), tokens(rng)) for index in range(count)]


def play(kind, rank, world_size, port, folder):
    """Play all scenes on one rank; rank 0 writes what it saw."""
    samples = conversations if kind == "sft" else preferences
    learner_config = LearnerConfig(
        world_size=world_size, collective_timeout_s=TIMEOUT_S, optimizer=OptimizerConfig(lr=1e-2)
    )
    head = ScoreHead(VOCABULARY - 1) if kind == "rm" else None
    spec = learner_spec(
        sizes=SIZES, learner=learner_config, mode="on_policy", temperature=1.0, score_head=head
    )

    def shard_of(count):
        return pack(samples(count), max_tokens=40, world_size=world_size)[rank]

    learner = Learner(spec, rank=rank, address="127.0.0.1", port=port)
    try:
        facts = {"held_out": learner.measure(shard_of(5))}
        facts["updates"] = [learner.supervised_update(shard_of(7)) for _ in range(3)]
        weights = {name: learner._policy.full_tensor(name).numpy() for name in learner._policy.tensors}
        facts["lonely"] = learner.supervised_update(shard_of(1))  # the other ranks have fillers
    finally:
        learner.close()
    if rank == 0:
        save_file(weights, str(folder / f"{kind}{world_size}.safetensors"))
        (folder / f"{kind}{world_size}.json").write_text(json.dumps(facts))


def play_worlds(folder):
    """Play every world; return how many processes failed."""
    scenes = [(kind, world_size) for kind in KINDS for world_size in WORLDS]
    ports = reserved_ports(len(scenes))
    return run_ranks(
        (play, (kind, rank, world_size, port, folder))
        for (kind, world_size), port in zip(scenes, ports, strict=True)
        for rank in range(world_size)
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    run_program(__file__, folder, timeout_s=TIMEOUT_S)
    return folder


def facts_of(worlds, kind, world_size):
    return json.loads((worlds / f"{kind}{world_size}.json").read_text())


@pytest.mark.parametrize("world_size", WORLDS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_learn_as_one(worlds, kind, world_size):
    one, many = facts_of(worlds, kind, 1), facts_of(worlds, kind, world_size)
    for ours, theirs in zip(
        [*many["updates"], many["lonely"], many["held_out"]],
        [*one["updates"], one["lonely"], one["held_out"]],
        strict=True,
    ):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-11)
    weights, expected = (load_file(worlds / f"{kind}{size}.safetensors") for size in (world_size, 1))
    for name in expected:
        np.testing.assert_allclose(weights[name], expected[name], atol=1e-10, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_whole_update(worlds, kind):
    facts = facts_of(worlds, kind, 4)
    assert facts["updates"][0]["num_sequences"] == 7
    num_learned = sum(sample.loss_mask.sum() for sample in conversations(7)) if kind == "sft" else 7
    assert facts["updates"][0]["num_tokens"] == num_learned
    assert facts["held_out"]["num_sequences"] == 5
    assert facts["lonely"]["num_sequences"] == 1


if __name__ == "__main__":
    sys.exit(play_worlds(Path(sys.argv[1])))
