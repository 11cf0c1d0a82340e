"""Learning on 1, 2 and 4 gloo ranks is the same learning, for every policy loss; a checkpoint of one world
goes on in another.

The file is also a program: it imports torch once and forks every rank of every world, so that eighteen
processes cost one start.
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from agentrl.config.algorithm import AlgorithmConfig, ClipCovConfig, KLConfig, KLCovConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.correction import Corrector
from agentrl.learner.learner import Learner
from agentrl.learner.loss import PolicyObjective
from agentrl.learner.packing import pack
from parts.built_in import POLICY_LOSSES
from parts.learner import learner_spec, random_samples, reserved_ports, tiny_sizes
from parts.ranks import run_program, run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47)
WORLDS = (1, 2, 4)
LOADED = ((1, 2), (1, 4), (4, 1), (2, 4))
"""A checkpoint of the first world is read by the second."""
NUM_UPDATES = 3
TEMPERATURE = 0.8
TIMEOUT_S = 300.0
CHAIN = CorrectionConfig(
    self_normalize=True,
    reject={"far": RejectionConfig(level="token", lower=0.05, upper=8.0)},
    m2po_threshold=0.7,
)


def algorithm(policy_loss):
    aggregation = "sequence_mean_token_mean" if policy_loss in ("gspo", "gmpo") else "token_mean"
    selective = {
        "clip_cov": ClipCovConfig(share=0.2, lower=-9.0, upper=9.0),
        "kl_cov": KLCovConfig(share=0.2),
    }
    terms = {"entropy_coefficient": 0.01, "kl": KLConfig(coefficient=0.1)}
    return AlgorithmConfig(
        policy_loss=policy_loss, aggregation=aggregation, correction=CHAIN, **selective, **terms
    )


def rejected(sample):
    return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


BATCH = random_samples(9, VOCABULARY)
# Equally long, so that packing gives each of four ranks one of them: three have nothing to learn, and with
# two ranks one.
LONELY = [
    sample if sample.index == 2 else rejected(sample) for sample in random_samples(4, VOCABULARY, length=12)
]
NOTHING = [rejected(sample) for sample in BATCH]


# -------------------------------------------------------------------------------------- the program of a rank


@contextmanager
def learner(rank, world_size, port, *, dtype=torch.float64, lr=1e-2):
    config = LearnerConfig(
        world_size=world_size, collective_timeout_s=TIMEOUT_S, optimizer=OptimizerConfig(lr=lr)
    )
    spec = learner_spec(
        sizes=SIZES,
        learner=config,
        algorithm=algorithm("ppo_clip"),
        temperature=TEMPERATURE,
        master_dtype=dtype,
    )
    one = Learner(spec, rank=rank, address="127.0.0.1", port=port)
    try:
        yield one
    finally:
        one.close()


def learn_by(one, policy_loss):
    """Let the learner go on by another loss: a new one for each would only build the same model again."""
    one._corrector = Corrector(algorithm(policy_loss))
    one._objective = PolicyObjective(algorithm(policy_loss), "decoupled", temperature=TEMPERATURE)


def full_weights(one):
    return {name: one._policy.full_tensor(name).numpy().copy() for name in one._policy.tensors}


def play(rank, world_size, ports, folder):
    """Play all scenes of a world on one rank; rank 0 writes what it saw."""

    def learn(one, batch, max_tokens=30):
        return one.update(one.score(pack(batch, max_tokens=max_tokens, world_size=world_size)[rank]))

    facts, weights = {}, {}
    with learner(
        rank, world_size, ports.pop(), dtype=torch.float32, lr=1e-30
    ) as one:  # too small to move a weight
        for name in POLICY_LOSSES:
            learn_by(one, name)
            facts[f"loss-{name}"] = learn(one, BATCH)
    with learner(rank, world_size, ports.pop(), dtype=torch.float32) as one:
        one._stepper.optimizer = torch.optim.SGD(one._policy.module.parameters(), lr=0.05)
        weights["before"] = full_weights(one)
        facts["sgd"] = [learn(one, BATCH) for _ in range(NUM_UPDATES)]
        weights["sgd"] = full_weights(one)
    with learner(rank, world_size, ports.pop()) as one:
        facts["adamw"] = [learn(one, BATCH) for _ in range(NUM_UPDATES)]
        weights["adamw"] = full_weights(one)
        one.save(str(folder / f"state{world_size}"))
        facts["after"] = [learn(one, BATCH[::-1], max_tokens=17), learn(one, LONELY)]
        for name in POLICY_LOSSES:
            learn_by(one, name)
            before = one.checksums()
            facts[f"nothing-{name}"] = [learn(one, NOTHING), one.checksums() == before]
    if rank == 0:
        for name, tensors in weights.items():
            save_file(tensors, str(folder / f"{name}{world_size}.safetensors"))
        (folder / f"facts{world_size}.json").write_text(json.dumps(facts))


def go_on(rank, world_size, port, folder, saved_by):
    """Load what another world saved and learn on."""
    with learner(rank, world_size, port) as one:
        one.load(str(folder / f"state{saved_by}"))
        shards = [pack(batch, max_tokens=30, world_size=world_size)[rank] for batch in (BATCH, LONELY)]
        facts = [one.update(one.score(shard)) for shard in shards]
    if rank == 0:
        (folder / f"loaded{saved_by}by{world_size}.json").write_text(json.dumps(facts))


def play_worlds(folder):
    """Play every world, then every loaded one; return how many processes failed."""
    worlds = [(world_size, reserved_ports(3)) for world_size in WORLDS]
    failed = run_ranks(
        (play, (rank, world_size, list(ports), folder))
        for world_size, ports in worlds
        for rank in range(world_size)
    )
    loaded = zip(LOADED, reserved_ports(len(LOADED)), strict=True)
    return failed or run_ranks(
        (go_on, (rank, world_size, port, folder, saved_by))
        for (saved_by, world_size), port in loaded
        for rank in range(world_size)
    )


# ------------------------------------------------------------------------------------------------------- laws


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    run_program(__file__, folder, timeout_s=TIMEOUT_S)
    return folder


def facts_of(worlds, world_size):
    return json.loads((worlds / f"facts{world_size}.json").read_text())


def tensors_of(worlds, name, world_size):
    return load_file(worlds / f"{name}{world_size}.safetensors")


@pytest.mark.parametrize("world_size", WORLDS[1:])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_and_gradient_norms_in_float32(worlds, name, world_size):
    one, many = (facts_of(worlds, size)[f"loss-{name}"] for size in (1, world_size))
    assert 0 < one["correction/rejected/far"] < 1
    assert 0 < one["correction/rejected/m2po"] < 1
    for fact in (
        "loss",
        "grad_norm",
        "kl",
        "entropy",
        "num_tokens",
        "num_sequences",
        "correction/rejected/all",
    ):
        assert many[fact] == pytest.approx(one[fact], rel=1e-6, abs=1e-9), fact


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_batch_of_which_nothing_may_be_learned_moves_no_weight_on_any_rank(worlds, name, world_size):
    metrics, is_unchanged = facts_of(worlds, world_size)[f"nothing-{name}"]
    assert is_unchanged
    assert (metrics["is_skipped"], metrics["num_tokens"], metrics["non_finite_updates"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("world_size", WORLDS[1:])
@pytest.mark.parametrize(("name", "tolerance"), [("sgd", 1e-6), ("adamw", 1e-10)])
def test_weights_after_three_updates(worlds, name, tolerance, world_size):
    expected, got = tensors_of(worlds, name, 1), tensors_of(worlds, name, world_size)
    before = tensors_of(worlds, "before", 1)
    assert max(np.abs(expected[tensor] - before[tensor]).max() for tensor in expected) > 1e-3
    for tensor, value in expected.items():
        np.testing.assert_allclose(got[tensor], value, rtol=0, atol=tolerance, err_msg=tensor)


@pytest.mark.parametrize("world_size", WORLDS[1:])
def test_every_metric_in_float64_also_where_ranks_have_nothing_to_learn(worlds, world_size):
    one, many = facts_of(worlds, 1), facts_of(worlds, world_size)
    for expected, got in zip([*one["adamw"], *one["after"]], [*many["adamw"], *many["after"]], strict=True):
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert 0 < many["after"][1]["num_tokens"] <= LONELY[2].loss_mask.sum()
    assert many["after"][1]["is_skipped"] == 0.0


@pytest.mark.parametrize(("saved_by", "world_size"), LOADED)
def test_a_checkpoint_goes_on_in_another_world(worlds, saved_by, world_size):
    """In another order and other microbatches than the world went on that saved it, which changes nothing
    either.
    """
    got = json.loads((worlds / f"loaded{saved_by}by{world_size}.json").read_text())
    for metrics, expected in zip(got, facts_of(worlds, saved_by)["after"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-11)


if __name__ == "__main__":
    sys.exit(play_worlds(Path(sys.argv[1])))
