"""Every way to spread, compile or offload a model learns the same: one rank quickly, HSDP of 2 x 2 gloo ranks
against one.

The file is also the program of a rank of the world of four.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.learner import FSDPConfig, LearnerConfig, OptimizerConfig
from agentrl.learner.learner import Learner
from agentrl.learner.optimizer import move_state, state_at_hand
from agentrl.learner.packing import filler, pack
from parts.learner import learner_spec, random_samples, reserved_port, reserved_ports, tiny_sizes
from parts.programs import PROGRAM

SIZES = tiny_sizes(61, num_hidden_layers=3, intermediate_size=47)
WORLD_SIZE = 4
TIMEOUT_S = 200.0
NUM_GRAPHS = 12
"""Of a compiled model with a reference."""


def start(rank=0, port=None, *, world_size=1, from_sizes=None, **options):
    options = {
        "world_size": world_size,
        "collective_timeout_s": TIMEOUT_S,
        "optimizer": OptimizerConfig(lr=1e-2),
    } | options
    algorithm = AlgorithmConfig(entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1))
    spec = learner_spec(
        sizes=SIZES | (from_sizes or {}), learner=LearnerConfig(**options), algorithm=algorithm
    )
    return Learner(spec, rank=rank, address="127.0.0.1", port=port or reserved_port())


def learn(learner, rank=0, world_size=1):
    """Three updates, each scored anew: a weight that stays gathered from before an update would show in the
    next scores.
    """
    shard = pack(random_samples(9, 61), max_tokens=30, world_size=world_size)[rank]
    metrics = [learner.update(learner.score(shard)) for _ in range(3)]
    names = ("loss", "grad_norm", "entropy", "kl", "ratio_max")
    return [[update[name] for name in names] for update in metrics]


def run_alone(**options):
    learner = start(**options)
    try:
        return learn(learner), learner.checksums(), learner
    finally:
        learner.close()


@pytest.fixture(scope="module")
def plain():
    metrics, checksums, _ = run_alone()
    return metrics, checksums


# --------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp": FSDPConfig(reshard_after_forward=False)},
        {"fsdp": FSDPConfig(forward_prefetch=2)},
        {"offload": "optimizer"},
        {"offload": "parameters"},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "activation_offload": True},
        {"gradient_checkpointing": True, "activation_offload": True, "offload": "parameters"},
    ],
    ids=lambda options: "-".join(options),
)
def test_no_option_of_memory_changes_a_bit(plain, options):
    metrics, checksums, _ = run_alone(**options)
    assert (metrics, checksums) == plain


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_offloaded_inputs_of_layers_are_gone_between_forward_and_backward(is_offloaded):
    """But for the last layer's; what comes back for the backward goes again with it."""
    learner = start(gradient_checkpointing=True, activation_offload=is_offloaded)
    try:
        inputs, module = [], learner._policy.module
        for layer in module.model.layers:
            layer.register_forward_pre_hook(
                lambda _, given: inputs.append(StorageWeakRef(given[0].untyped_storage()))
            )
        [shard] = pack(random_samples(2, 61), max_tokens=99, world_size=1)
        loss = learner._policy.score_actions(shard[0], temperature=1.0).sum()
        assert [kept.expired() for kept in inputs] == [is_offloaded, is_offloaded, False]
        loss.backward()
        expected = {name: weight.grad.clone() for name, weight in module.named_parameters()}
        module.zero_grad()
        learner._policy.score_actions(shard[0], temperature=1.0).sum().backward()
        del loss
        assert all(kept.expired() for kept in inputs)
        assert all(torch.equal(w.grad, expected[name]) for name, w in module.named_parameters())
    finally:
        learner.close()


def test_a_graph_with_offloaded_inputs_can_be_read_twice():
    learner = start(gradient_checkpointing=True, activation_offload=True)
    try:
        [shard] = pack(random_samples(2, 61), max_tokens=99, world_size=1)
        weights = list(learner._policy.module.parameters())
        loss = learner._policy.score_actions(shard[0], temperature=1.0).sum()
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        for one, other in zip(first, torch.autograd.grad(loss, weights), strict=True):
            assert torch.equal(one, other)
    finally:
        learner.close()


def test_offloaded_inputs_need_gradient_checkpointing():
    with pytest.raises(ValidationError, match=r"use gradient_checkpointing=true as well"):
        LearnerConfig(activation_offload=True)


@pytest.mark.parametrize("tokens", [1, 5])
def test_chunks_of_logits_change_nothing_but_rounding(plain, tokens):
    metrics, _, _ = run_alone(logprob_chunk_tokens=tokens)
    np.testing.assert_allclose(metrics, plain[0], rtol=1e-9)


@pytest.fixture
def graphs(monkeypatch):
    """Compile without the code generator, which takes minutes for them on a CPU; return a function that
    counts the graphs made.
    """
    compiled = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda function, **options: compiled(function, backend="aot_eager", **options)
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(plain, graphs):
    metrics, _, _ = run_alone(compile=True)
    np.testing.assert_allclose(metrics, plain[0], rtol=1e-8)
    # Four pieces around the attention, each for the policy's scores, the reference's and the update: none per
    # length, nor per layer.
    assert 0 < graphs() <= NUM_GRAPHS


def rows(*lengths, prompt=0):
    """Return one packed row of these lengths; `prompt`: so many first tokens are one prompt, computed
    once.
    """
    samples = [sample for n in lengths for sample in random_samples(1, 61, length=n, seed=n)]
    for sample in samples:
        sample.token_ids[:prompt] = 1
        sample.action_mask[:prompt] = False
        sample.action_mask[prompt:] = True
    [[row]] = pack(samples, max_tokens=999, world_size=1, shared_prefix=prompt > 0)
    assert (row.prefix_segments >= 0).any() == (prompt > 0)
    return row


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [(9, 6, 7), (SIZES["hidden_size"],)], ids=["any", "one-segment-as-long-as-the-model-is-wide"]
)
def test_the_number_of_graphs_does_not_depend_on_the_data(graphs, first):
    """Whatever is computed first: one segment or several, prompts shared or not, fillers, as many tokens as
    the model has of something.
    """
    learner = start(compile=True, shared_prefix=True, from_sizes={"num_hidden_layers": 1})
    try:
        for row in [
            rows(*first),
            rows(7),
            rows(4, 4),
            rows(5, 6, 7),
            rows(8, 9, prompt=3),
            rows(32),
            rows(16, 16),
            filler(),
        ]:
            learner.update(learner.score([row]) + learner.score([rows(5, 8)]))
        assert 0 < graphs() <= NUM_GRAPHS
    finally:
        learner.close()


def test_uneven_copies_are_refused():
    with pytest.raises(ValueError, match="shard_size=3 does not divide world_size=4"):
        LearnerConfig(world_size=4, fsdp=FSDPConfig(shard_size=3))


def test_state_is_moved_as_a_whole_and_back():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    [state] = optimizer.state.values()
    before = state["exp_avg"].clone()
    with state_at_hand(optimizer, torch.device("cpu"), is_offloaded=True):
        torch.testing.assert_close(state["exp_avg"], before)
    move_state(optimizer, torch.device("meta"))  # stands for any other device
    assert {name for name, value in state.items() if value.device.type == "meta"} == {"exp_avg", "exp_avg_sq"}


# --------------------------------------------------------------------------------------------------- measures


def test_usage_tells_time_tokens_and_memory_of_each_phase_once(tmp_path):
    learner = start()
    try:
        [shard] = pack(random_samples(9, 61), max_tokens=30, world_size=1)
        num_tokens = sum(m.num_tokens for m in shard)
        learner.start_trace()
        learner.update(learner.score(shard))
        learner.write_trace(str(tmp_path / "traces"))
        usage = learner.usage()
        assert usage["score_tokens_per_s"] * usage["score_s"] == pytest.approx(
            2 * num_tokens
        )  # policy and reference
        assert usage["update_tokens_per_s"] * usage["update_s"] == pytest.approx(num_tokens)
        assert 1e8 < usage["memory/rss_bytes_max"] < 1e11
        assert set(learner.usage()) == {"memory/rss_bytes_max"}
    finally:
        learner.close()
    with gzip.open(tmp_path / "traces" / "rank0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"score", "update"} <= names


# ------------------------------------------------------------------------------------------------- four ranks


def play(rank, ports, folder):
    """One rank of the world of four."""
    scenes = {"two_copies": {"fsdp": FSDPConfig(shard_size=2)}}
    scenes["four_copies"] = {
        "fsdp": FSDPConfig(shard_size=1, reshard_after_forward=False),
        "logprob_chunk_tokens": 5,
    }
    scenes["one_copy"] = {"fsdp": FSDPConfig(forward_prefetch=1), "offload": "parameters"}
    facts = {}
    for (name, options), port in zip(scenes.items(), ports, strict=True):
        learner = start(rank, port, world_size=WORLD_SIZE, **options)
        weight = next(learner._policy.module.parameters())
        assert isinstance(weight, DTensor)
        expected = (Shard(0),) if name == "one_copy" else (Replicate(), Shard(0))
        assert weight.placements == expected, weight.placements
        facts[name] = learn(learner, rank, WORLD_SIZE)
        facts[f"{name}_weights"] = {
            n: learner._policy.full_tensor(n).tolist() for n in learner._policy.tensors
        }
        learner.close()
    if rank == 0:
        (folder / "facts.json").write_text(json.dumps(facts))


@pytest.mark.slow
def test_copies_of_the_weights_learn_as_one(plain, tmp_path):
    arguments = [*PROGRAM, __file__, str(tmp_path), *map(str, reserved_ports(3))]
    ranks = [
        subprocess.Popen([*arguments, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, errors
    facts = json.loads((tmp_path / "facts.json").read_text())
    learner = start()
    try:
        learn(learner)
        weights = {name: learner._policy.full_tensor(name) for name in learner._policy.tensors}
    finally:
        learner.close()
    for scene in ("two_copies", "four_copies", "one_copy"):
        np.testing.assert_allclose(facts[scene], plain[0], rtol=1e-9, err_msg=scene)
        for name, weight in weights.items():
            np.testing.assert_allclose(facts[f"{scene}_weights"][name], weight, atol=1e-6, err_msg=name)


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    *ports, rank = map(int, numbers)
    play(rank, ports, Path(folder))
