"""Two FSDP ranks against one: rows of one sequence, batches that are not finite, weights sent to a peer;
beside test_world_sizes.py.

The file is also the program that forks both ranks: they play every scene once, and the tests look at what
they wrote.
"""

import dataclasses
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.algorithms.aggregation import Aggregation
from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.buckets import plan_buckets
from agentrl.learner.critic import Critic, CriticSpec
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.sharding import shard as shard_model
from agentrl.servers.process_group import (
    broadcast,
    join_weights_group,
    leave_weights_group,
    tensor_checksum,
    unflatten,
)
from agentrl.types import TensorSpec
from parts.learner import learner_spec, random_samples, reserved_ports, tiny_sizes
from parts.ranks import begun_program, run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47)
NUM_UPDATES = 3
BUCKET_BYTES = 20000
GROUPS = ["first", "second"]
"""One for each source."""
"""Of several buckets, some of them with several weights."""
TIMEOUT_S = 200.0


PLAIN = AlgorithmConfig(
    aggregation="sequence_mean_token_mean", entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1)
)
WHOLE = AlgorithmConfig(
    policy_loss="gspo",
    aggregation="sequence_mean_token_mean",
    clip_low=0.2,
    clip_high=0.2,
    correction=CorrectionConfig(
        weight="geometric", reject={"far": RejectionConfig(level="sequence_mean", lower=0.3, upper=3.0)}
    ),
)


def spec(world_size, **changes):
    learner = LearnerConfig(
        world_size=world_size, collective_timeout_s=TIMEOUT_S, optimizer=OptimizerConfig(lr=1e-2)
    )
    return learner_spec(sizes=SIZES, learner=learner, **{"algorithm": PLAIN, **changes})


def critic_spec(world_size):
    of = spec(world_size)
    return CriticSpec(
        of.model,
        of.learner,
        Aggregation("token_mean"),
        0.5,
        3,
        10,
        from_scratch=of.from_scratch,
        master_dtype=torch.float64,
    )


def samples(count, *, advantage=None, is_rejected=lambda index: False):
    found = [
        s if advantage is None else dataclasses.replace(s, advantages=np.full(s.num_tokens, advantage, "f4"))
        for s in random_samples(count, VOCABULARY)
    ]
    return [dataclasses.replace(s, loss_mask=s.action_mask & (not is_rejected(s.index))) for s in found]


def starts_of(one):
    """A row begins at every context token that follows an action."""
    mask = one.action_mask
    return (0, *(np.flatnonzero(mask[1:-1] & ~mask[2:]) + 2).tolist())


BATCH = samples(7)
LONELY = samples(1)  # the other rank has a filler
HALF_REJECTED = samples(
    2, is_rejected=lambda index: index == 0
)  # one sample for each rank, one of them rejected
WIDE = [
    dataclasses.replace(s, segment_starts=starts_of(s)) for s in samples(5)
]  # rows of one sequence on both ranks
VALUED = [dataclasses.replace(s, values=s.advantages / 2, returns=s.advantages) for s in BATCH]
POISONED = samples(7)
POISONED[3] = dataclasses.replace(POISONED[3], advantages=POISONED[3].advantages * np.nan)  # on one rank only


def play(rank, world_size, ports, folder):
    """Play all scenes on one rank; rank 0 writes what it saw."""

    def shard_of(batch):
        return pack(batch, max_tokens=30, world_size=world_size)[rank]

    def start(stack, **options):
        learner = Learner(spec(world_size, **options), rank=rank, address="127.0.0.1", port=ports.pop(0))
        stack.callback(learner.close)
        return learner

    facts = {}
    with ExitStack() as stack:
        learner = start(stack, algorithm=WHOLE)
        facts["reduced"] = reduced(learner.place.mesh, rank)
        shard = learner.score(
            pack(WIDE, max_tokens=1000 if world_size == 1 else 8, world_size=world_size)[rank]
        )
        facts["split"] = [learner.update(shard) for _ in range(2)]
        critic = Critic(critic_spec(world_size), learner.place)
        facts["critic"] = [critic.update(shard_of(VALUED)) for _ in range(NUM_UPDATES)]
        facts["num_rest"] = sum(len(scored.correction.rest.sequence_ids) for scored in shard)
    with ExitStack() as stack:
        learner = start(stack, dump_folder=str(folder / "bad"))
        facts["updates"] = [learner.update(learner.score(shard_of(BATCH))) for _ in range(NUM_UPDATES)]
        weights = {name: learner._policy.full_tensor(name).numpy() for name in learner._policy.tensors}
        learner.export(str(folder / "policy"))
        learner.save(str(folder / "state"))
        facts["lonely"] = learner.update(learner.score(shard_of(LONELY)))
        facts["half_rejected"] = learner.update(learner.score(shard_of(HALF_REJECTED)))
        before = learner.checksums()
        facts["poisoned"] = learner.update(learner.score(shard_of(POISONED)))
        facts["is_unchanged_by_poison"] = learner.checksums() == before
        facts["sent"] = send(learner, ports.pop(0)) if world_size == 2 else None
        facts["checksums"] = learner.checksums()
    if rank == 0:
        save_file(weights, str(folder / "weights.safetensors"))
        (folder / "facts.json").write_text(json.dumps(facts))
    return facts


def reduced(mesh, rank):
    """Return dtype and value of a gradient that was computed in bfloat16, 256 on rank 0 and 1 on the other,
    after FSDP averaged it.
    """
    module = torch.nn.Linear(1, 1, bias=False)
    shard_model(module, mesh, LearnerConfig(), compute_dtype=torch.bfloat16, has_backward=True)
    product = module(torch.tensor([[256.0 if rank == 0 else 1.0]]))
    product.sum().backward()
    gradient = module.weight.grad.full_tensor()
    return [str(product.dtype), str(module.weight.dtype), str(gradient.dtype), gradient.item()]


def send(learner, port):
    """Send all weights in buckets to the one peer, from all ranks in turn; tell what it must read."""
    specs = learner.tensor_specs()
    learner.join_weights_groups("127.0.0.1", port, 2, GROUPS[: learner.place.world_size], "gloo", TIMEOUT_S)
    learner.send_buckets(BUCKET_BYTES)
    learner.leave_weights_group()
    return [(s.name, s.dtype, s.shape, s.num_bytes) for s in specs]


# ----------------------------------------------------------------------------------------------------- worlds


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    play(0, 1, reserved_ports(2), folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    ports = reserved_ports(3)
    with begun_program(__file__, folder, *ports, timeout_s=TIMEOUT_S):
        received = receive(ports[-1])
    save_file(received, str(folder / "received.safetensors"))
    return folder


def receive(port):
    """Be the server: join each source's group as rank 1, take all buckets."""
    groups = [
        join_weights_group(
            address="127.0.0.1",
            port=port,
            rank=1,
            world_size=2,
            name=name,
            backend="gloo",
            timeout_s=TIMEOUT_S,
        )
        for name in GROUPS
    ]
    received = {}
    specs = [TensorSpec(name, "float32", shape, 4 * math.prod(shape)) for name, shape in expected_shapes()]
    for index, bucket in enumerate(plan_buckets(specs, max_bytes=BUCKET_BYTES)):
        flat = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8)
        broadcast(flat, groups[index % len(groups)])
        tensors = unflatten(flat, [(torch.float32, spec.shape) for spec in bucket])
        received |= {spec.name: tensor.numpy() for spec, tensor in zip(bucket, tensors, strict=True)}
    for group in groups:
        leave_weights_group(group)
    return received


def expected_shapes():
    """Names and shapes of the weights as transformers knows them, the tied head left out."""
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    return [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]


def facts_of(folder):
    return json.loads((folder / "facts.json").read_text())


# ------------------------------------------------------------------------------------------------------ tests


def test_two_ranks_of_a_critic_learn_as_one(one_rank, two_ranks):
    one, two = facts_of(one_rank)["critic"], facts_of(two_ranks)["critic"]
    assert two[0]["critic/grad_norm"] > 0
    for step, other in zip(one, two, strict=True):
        assert other == pytest.approx(step, rel=1e-9, abs=1e-11)


def test_two_ranks_learn_as_one(one_rank, two_ranks):
    one, two = facts_of(one_rank), facts_of(two_ranks)
    for scene in ("updates", "lonely", "half_rejected"):
        for step, other in zip(
            *([facts[scene]] if isinstance(facts[scene], dict) else facts[scene] for facts in (one, two)),
            strict=True,
        ):
            assert other == pytest.approx(step, rel=1e-9, abs=1e-11), scene
    assert two["half_rejected"]["num_tokens"] == HALF_REJECTED[1].loss_mask.sum()
    assert two["lonely"]["num_sequences"] == 1
    ours, theirs = load_file(one_rank / "weights.safetensors"), load_file(two_ranks / "weights.safetensors")
    for name in ours:
        np.testing.assert_allclose(theirs[name], ours[name], atol=1e-10, err_msg=name)


def test_rows_of_a_sequence_on_two_ranks_learn_as_one_sequence(one_rank, two_ranks):
    one, two = facts_of(one_rank), facts_of(two_ranks)
    assert (one["num_rest"], two["num_rest"] > 0) == (0, True)
    assert one["split"][0]["num_sequences"] == len(WIDE)
    for step, other in zip(one["split"], two["split"], strict=True):
        assert other == pytest.approx(step, rel=1e-9, abs=1e-11)


def test_ranks_skip_together_when_one_of_them_is_not_finite(two_ranks):
    facts = facts_of(two_ranks)
    assert (facts["poisoned"]["is_skipped"], facts["poisoned"]["non_finite_updates"]) == (1.0, 1.0)
    assert facts["is_unchanged_by_poison"]
    dumps = [
        load_file(two_ranks / "bad" / f"update{NUM_UPDATES + 2:06d}_rank{rank}.safetensors")
        for rank in range(2)
    ]
    assert sorted(
        i for dump in dumps for name in dump if name.endswith("sample_indices") for i in dump[name]
    ) == list(range(7))


def test_bfloat16_gradients_are_reduced_in_float32(two_ranks):
    """256 and 1 are 257, which bfloat16 rounds to 256."""
    assert facts_of(two_ranks)["reduced"] == ["torch.bfloat16", "torch.float32", "torch.float32", 257 / 2]


def test_buckets_reach_a_peer_as_they_are(two_ranks):
    received, facts = load_file(two_ranks / "received.safetensors"), facts_of(two_ranks)
    assert [name for name, *_ in facts["sent"]] == list(dict.fromkeys(name for name, _ in expected_shapes()))
    assert {name: tensor_checksum(torch.tensor(tensor)) for name, tensor in received.items()} == facts[
        "checksums"
    ]


def test_one_rank_goes_on_from_a_checkpoint_of_two(one_rank, two_ranks, tmp_path):
    learner = Learner(spec(1), rank=0, address="127.0.0.1", port=reserved_ports(1)[0])
    try:
        learner.load(str(two_ranks / "state"))
        learner.export(str(tmp_path / "policy"))
        metrics = learner.update(learner.score(pack(LONELY, max_tokens=30, world_size=1)[0]))
    finally:
        learner.close()
    assert metrics == pytest.approx(facts_of(one_rank)["lonely"], rel=1e-9, abs=1e-11)
    ours, theirs = (load_file(folder / "policy" / "model.safetensors") for folder in (tmp_path, two_ranks))
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


if __name__ == "__main__":
    folder, *ports = sys.argv[1:]
    sys.exit(run_ranks((play, (rank, 2, [*map(int, ports)], Path(folder))) for rank in range(2)))
