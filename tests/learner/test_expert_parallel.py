"""Experts that are divided over ranks learn as on one rank, for every layout of the ranks; what one layout
saves, another loads, and all of them publish the same.

The file is also the program that forks the ranks of each world.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import silu
from transformers import Qwen2Config
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.learner import FSDPConfig, LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner import loading, sharding
from agentrl.learner.experts import can_group, divide_experts, multiply_each, multiply_grouped
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from parts.experts import CONFIGS, VOCABULARY, compute_in_float64, sized, with_experts, write_experts
from parts.learner import learner_spec, random_samples, reserved_port, reserved_ports
from parts.ranks import run_program, run_ranks

TIMEOUT_S = 300.0
NUM_EXPERTS = 4
NUM_UPDATES = 3
SAMPLES = with_experts(random_samples(9, VOCABULARY), num_experts=NUM_EXPERTS)
QWEN3, ROUNDED = ["qwen3_moe"], "qwen3_moe bfloat16"
WORLDS = {
    "one": ({"world_size": 1}, [*CONFIGS, ROUNDED]),
    "two": ({"world_size": 2, "expert_parallel": 2}, [*CONFIGS, ROUNDED]),
    "matrices": ({"world_size": 2, "expert_parallel": 2, "tensor_parallel": 2}, QWEN3),
}
SLOW_WORLDS = {
    "four by two": ({"world_size": 4, "expert_parallel": 2}, QWEN3),
    "tokens": ({"world_size": 4, "expert_parallel": 4, "sequence_parallel": 2}, QWEN3),
    "recomputed": (
        {
            "world_size": 2,
            "expert_parallel": 2,
            "gradient_checkpointing": True,
            "offload": "parameters",
            "fsdp": FSDPConfig(forward_prefetch=1),
        },
        QWEN3,
    ),
    "four by four": ({"world_size": 4, "expert_parallel": 4}, QWEN3),
    "copies": ({"world_size": 4, "expert_parallel": 2, "fsdp": FSDPConfig(shard_size=2)}, QWEN3),
    "pairs with matrices": (
        {"world_size": 4, "expert_parallel": 2, "tensor_parallel": 2},
        ["qwen3_moe", "qwen2_moe", "mixtral"],
    ),
    "matrices in fours": (
        {"world_size": 4, "expert_parallel": 4, "tensor_parallel": 2, "gradient_checkpointing": True},
        QWEN3,
    ),
    "eight": (
        {
            "world_size": 8,
            "expert_parallel": 4,
            "tensor_parallel": 2,
            "sequence_parallel": 2,
            "fsdp": FSDPConfig(shard_size=4),
        },
        QWEN3,
    ),
}
LOADING = {name: options for name, (options, _) in (WORLDS | SLOW_WORLDS).items()} | {
    "undivided": {"world_size": 4}
}
PLAYED = [(world, name) for world, (_, names) in WORLDS.items() for name in names]
COMPARED = [(world, name) for world, name in PLAYED if world != "one" and name != ROUNDED] + [
    pytest.param(world, name, marks=pytest.mark.slow)
    for world, (_, names) in SLOW_WORLDS.items()
    for name in names
]
LOADED = [("two", "one"), ("one", "two")]
SLOWLY_LOADED = [
    ("two", "four by two"),
    ("four by two", "undivided"),
    ("pairs with matrices", "one"),
    ("two", "pairs with matrices"),
    ("eight", "four by two"),
]
"""What the first world saved is loaded by the second."""


# -------------------------------------------------------------------------------------- the program of a rank


def spec(path, **options):
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, grad_clip=0.5)  # eps: sizes of gradients count
    dtype = "bfloat16" if path.name == ROUNDED else "float32"
    return learner_spec(
        ModelConfig(path=str(path), dtype=dtype),
        learner=LearnerConfig(
            collective_timeout_s=TIMEOUT_S, optimizer=optimizer, balance_coefficient=0.1, **options
        ),
        algorithm=AlgorithmConfig(entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1)),
        master_dtype=torch.float64 if dtype == "float32" else torch.float32,
    )


def play(rank, world, ports, models, folder):
    """Learn with each model on one rank; rank 0 writes what it saw."""
    compute_in_float64()
    options, names = (WORLDS | SLOW_WORLDS)[world]
    for name, port in zip(names, ports, strict=True):
        out = folder / world / name
        out.mkdir(parents=True, exist_ok=True)
        read = names_read()
        one = Learner(spec(models / name, **options), rank=rank, address="127.0.0.1", port=port)
        tensors, facts = {}, {"specs": [(s.name, list(s.shape)) for s in one.tensor_specs()]}
        keep_gradients(one, tensors)
        one.export(str(out / "loaded"))
        shard = shard_of(rank, options)
        facts["updates"] = [one.update(one.score(shard)) for _ in range(NUM_UPDATES)]
        one.save(str(out / "state"))
        tensors |= weights_of(one)
        facts["sums"] = one.checksums()
        one.export(str(out / "trained"))
        facts["next"] = one.update(one.score(shard))
        one.close()
        (out / f"read{rank}.json").write_text(json.dumps(sorted(read)))
        if rank == 0:
            (out / "facts.json").write_text(json.dumps(facts))
            save_file(tensors, out / "tensors.safetensors")


def shard_of(rank, options):
    size = options.get("sequence_parallel", 1) * options.get("tensor_parallel", 1)
    shards = pack(SAMPLES, max_tokens=30, world_size=options["world_size"] // size)
    return shards[rank // size]


def names_read():
    """Return a set that is filled with the names of what this process reads from files."""
    names, name_of = set(), {}
    read, find = loading.SliceReader.read, loading.find_stored

    def find_and_note(*given, **options):
        found = find(*given, **options)
        name_of.update((tensor, name) for name, tensor in found.items())
        return found

    def read_and_note(reader, stored, *rest):
        names.add(name_of[stored])
        return read(reader, stored, *rest)

    loading.find_stored, loading.SliceReader.read = find_and_note, read_and_note
    return names


def keep_gradients(one, kept):
    """Keep the clipped gradients of each update, in full."""
    names = {id(tensor): name for name, tensor in one._policy.tensors.items()}

    def keep(optimizer, *_):
        update = one._stepper.num_updates
        for group in optimizer.param_groups:
            for weight in group["params"]:
                kept[f"gradient {update} {names[id(weight)]}"] = sharding.gather(weight.grad).clone()

    one._stepper.optimizer.register_step_pre_hook(keep)


def weights_of(one):
    return {f"weight {name}": sharding.gather(tensor).clone() for name, tensor in one._policy.tensors.items()}


def load_and_go_on(rank, saved, world, port, models, folder):
    """Load what another world saved, look at it, and make the next update."""
    compute_in_float64()
    options, [name] = LOADING[world], QWEN3
    one = Learner(spec(models / name, **options), rank=rank, address="127.0.0.1", port=port)
    one.load(str(folder / saved / name / "state"))
    tensors, sums = weights_of(one), one.checksums()
    following = one.update(one.score(shard_of(rank, options)))
    one.close()
    if rank == 0:
        out = folder / f"{saved} in {world}"
        out.mkdir()
        save_file(tensors, out / "tensors.safetensors")
        (out / "facts.json").write_text(json.dumps({"sums": sums, "next": following}))


def compute_alone(rank, world_size, port, folder):
    """Compute one layer's experts on this rank's tokens, divided; rank 0 writes results and gradients."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    found = {}
    for scene, batches in routings(world_size).items():
        experts, (hidden, ids, weights) = new_experts(), batches[rank]
        divide_experts(experts, init_device_mesh("cpu", (world_size,)))
        hidden.requires_grad_()
        weights.requires_grad_()
        out = experts(hidden, ids, weights)
        (out**2).sum().backward()
        own = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
        found |= {f"{scene} {key} {rank}": value for key, value in own.items()}
        for key, weight in experts.named_parameters():
            found[f"{scene} {key}"] = weight.grad.full_tensor()
    save_file(found, folder / f"alone_{world_size}_{rank}.safetensors")
    dist.destroy_process_group()


def new_experts():
    torch.manual_seed(1)
    experts = Qwen3MoeExperts(sized("qwen3_moe", NUM_EXPERTS)).double()
    experts.config._experts_implementation = "eager"
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return experts


def routings(world_size):
    """Return {scene: (hidden, experts, weights) of each rank}; a few ranks have no tokens, or send none."""
    torch.manual_seed(2)
    found = {}
    for scene, (lengths, chosen) in {
        "any": ((5, 8, 3, 6), range(NUM_EXPERTS)),
        "one pair of experts": ((5, 8, 3, 6), (1, 2)),
        "a rank without tokens": ((0, 4, 0, 7), range(NUM_EXPERTS)),
        "no tokens": ((0, 0, 0, 0), range(NUM_EXPERTS)),
    }.items():
        found[scene] = []
        for length in lengths[:world_size]:
            ids = [torch.tensor(chosen)[torch.randperm(len(chosen))[:2]] for _ in range(length)]
            hidden, weights = torch.randn(length, 32).double(), torch.rand(length, 2).double()
            found[scene].append((hidden, torch.stack(ids) if ids else torch.zeros(0, 2).long(), weights))
    return found


def main(models, folder, speed):
    models, folder = Path(models), Path(folder)
    failed = 0
    is_slow = speed == "slow"
    for world, (options, names) in (SLOW_WORLDS if is_slow else WORLDS).items():
        ports = reserved_ports(len(names))
        failed += run_ranks(
            (play, (rank, world, ports, models, folder)) for rank in range(options["world_size"])
        )
    for saved, world in SLOWLY_LOADED if is_slow else LOADED:
        port = reserved_port()
        failed += run_ranks(
            (load_and_go_on, (rank, saved, world, port, models, folder))
            for rank in range(LOADING[world]["world_size"])
        )
    if is_slow:
        return failed
    for size in (2, 4):
        port = reserved_port()
        failed += run_ranks((compute_alone, (rank, size, port, folder)) for rank in range(size))
    return failed


# ----------------------------------------------------------------------------------------------------- worlds


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in CONFIGS:
        write_experts(folder / name, name, num_experts=NUM_EXPERTS)
    write_experts(folder / ROUNDED, num_experts=NUM_EXPERTS, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def worlds(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    run_program(__file__, models, folder, "fast", timeout_s=4 * TIMEOUT_S)
    return folder


@pytest.fixture(scope="module")
def slow_worlds(models, worlds):
    run_program(__file__, models, worlds, "slow", timeout_s=4 * TIMEOUT_S)


@pytest.fixture
def played(request, worlds):
    """The folder of all worlds, in which those that a test is about have been played."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("slow_worlds")
    return worlds


def facts(folder):
    return json.loads((folder / "facts.json").read_text())


def tensors(folder):
    return load_file(folder / "tensors.safetensors")


@pytest.mark.parametrize(("world", "name"), COMPARED)
def test_divided_experts_have_the_same_losses(played, world, name):
    one, divided = (facts(played / w / name)["updates"] for w in ("one", world))
    for expected, found in zip(one, divided, strict=True):
        assert expected["grad_norm"] > 0.5, "clipping counts"
        assert expected["router/replayed"] > 0
        for key in ("loss", "grad_norm", "entropy", "kl", "num_tokens", "router/balance"):
            assert found[key] == pytest.approx(expected[key], rel=1e-10, abs=1e-11), key


@pytest.mark.parametrize(("world", "name"), COMPARED)
def test_divided_experts_have_the_same_gradients_and_weights(played, world, name):
    expected, found = (tensors(played / w / name) for w in ("one", world))
    assert set(found) == set(expected)
    moved = 0
    for key, tensor in expected.items():
        torch.testing.assert_close(
            found[key], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}"
        )
        moved += key.startswith("gradient") and ".experts." in key and bool(tensor.any())
    # Two layers, with two weights of all experts in each; the update after the save counts, too.
    assert moved == (NUM_UPDATES + 1) * 2 * 2


def test_in_bfloat16_experts_differ_by_rounding(worlds):
    one, divided = (worlds / world / ROUNDED for world in ("one", "two"))
    for expected, found in zip(facts(one)["updates"], facts(divided)["updates"], strict=True):
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
        assert found["entropy"] == pytest.approx(expected["entropy"], rel=0.01)
    expected, found = exported(one / "loaded"), exported(divided / "loaded")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == torch.bfloat16
        assert torch.equal(found[key], tensor)
    assert tensors(divided)["weight model.layers.0.mlp.experts.down_proj"].dtype == torch.float32


@pytest.mark.parametrize(("world", "name"), COMPARED)
def test_divided_experts_are_published_under_the_same_names(played, world, name):
    one, divided = (played / w / name for w in ("one", world))
    assert facts(divided)["specs"] == facts(one)["specs"]
    assert any(".experts.3." in key for key, _ in facts(one)["specs"])
    for folder in ("loaded", "trained"):
        expected, found = exported(one / folder), exported(divided / folder)
        assert set(found) == set(expected)
        for key, tensor in expected.items():
            atol = 0.0 if folder == "loaded" else 1e-6
            torch.testing.assert_close(found[key], tensor, rtol=0.0, atol=atol)


def exported(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("saved", "world"), [*LOADED, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOWLY_LOADED)]
)
def test_what_one_layout_saves_another_loads(played, saved, world):
    folder = played / f"{saved} in {world}"
    expected = tensors(played / saved / "qwen3_moe")
    found = tensors(folder)
    assert found.keys() == {key for key in expected if key.startswith("weight")}
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    before, after = facts(played / saved / "qwen3_moe"), facts(folder)
    assert after["sums"] == before["sums"]
    # The next update needs the optimizer's state.
    for key in ("loss", "grad_norm", "lr"):
        assert after["next"][key] == pytest.approx(before["next"][key], rel=1e-10)


def test_a_rank_reads_only_its_own_experts(worlds):
    for rank in range(2):
        read = json.loads((worlds / "two" / "qwen3_moe" / f"read{rank}.json").read_text())
        own = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
        assert own == {2 * rank, 2 * rank + 1}
        assert any("q_proj" in name for name in read)


@pytest.mark.parametrize("world_size", [2, 4])
def test_divided_experts_compute_what_whole_ones_do(worlds, world_size):
    """All tokens of all ranks through one module of transformers."""
    found = {}
    for rank in range(world_size):
        found |= load_file(worlds / f"alone_{world_size}_{rank}.safetensors")
    for scene, batches in routings(world_size).items():
        experts = new_experts()
        hidden, ids, weights = (torch.cat(column) for column in zip(*batches, strict=True))
        hidden.requires_grad_()
        weights.requires_grad_()
        out = experts(hidden, ids, weights)
        if len(hidden):
            (out**2).sum().backward()
        lengths = [len(batch[0]) for batch in batches]
        for key, whole in {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}.items():
            for rank, part in enumerate((torch.zeros(0) if whole is None else whole).split(lengths)):
                own = found[f"{scene} {key} {rank}"]
                torch.testing.assert_close(own.flatten(), part.double().flatten(), rtol=1e-12, atol=1e-12)
        for key, weight in experts.named_parameters():
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            # A mean over the ranks, as FSDP makes it of the other weights.
            expected /= world_size
            torch.testing.assert_close(found[f"{scene} {key}"], expected, rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 9, 0), (1, 1, 1, 1)])
def test_grouped_products_are_the_loop(dtype, tolerance, counts):
    torch.manual_seed(3)
    gate_up, down = torch.randn(4, 48, 32) * 0.2, torch.randn(4, 32, 24) * 0.2
    rows = torch.randn(sum(counts), 32)
    given = [tensor.to(dtype) for tensor in (rows, gate_up, down)]
    found = []
    for multiply in (multiply_each, multiply_grouped, multiply_plainly):
        own = [tensor.clone().requires_grad_() for tensor in given]
        out = multiply(own[0], counts, *own[1:], gate)
        out.backward(torch.ones_like(out))
        found.append([out, *(tensor.grad for tensor in own)])
    for loop, grouped, plain in zip(*found, strict=True):
        torch.testing.assert_close(grouped, loop, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(loop, plain, rtol=tolerance, atol=tolerance)


def gate(both):
    first, second = both.chunk(2, -1)
    return silu(first) * second


def multiply_plainly(rows, counts, gate_up, down, _):
    """One row at a time."""
    experts = np.repeat(np.arange(len(counts)), counts)
    return torch.stack(
        [
            down[e] @ (silu(gate_up[e][:24] @ row) * (gate_up[e][24:] @ row))
            for e, row in zip(experts, rows, strict=True)
        ]
    )


def test_the_grouped_product_is_used_only_where_torch_has_it():
    sizes = ((5, 32), (4, 48, 32), (4, 32, 24))
    rows, gate_up, down = (torch.zeros(size, dtype=torch.bfloat16) for size in sizes)
    assert can_group(rows, gate_up, down)
    assert not can_group(rows[:0], gate_up, down), "no rows"
    assert not can_group(rows.double(), gate_up.double(), down.double())
    assert not can_group(rows, gate_up[:, :46], down[..., :23]), "rows of 46 bytes"


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 4, "expert_parallel": 3}, "expert_parallel=3 does not divide world_size=4"),
        (
            {"world_size": 8, "expert_parallel": 4, "fsdp": FSDPConfig(shard_size=2)},
            "expert_parallel=4 does not divide fsdp.shard_size=2",
        ),
    ],
)
def test_ranks_that_cannot_divide_experts_are_refused(options, message):
    with pytest.raises(ValidationError) as caught:
        LearnerConfig(**options)
    assert message in str(caught.value)


def test_a_model_whose_experts_cannot_be_divided_is_refused(models, tmp_path):
    for name in CONFIGS:
        with pytest.raises(ConfigError, match=r"^learner\.expert_parallel=3 does not divide the 4 experts"):
            check_folder(ModelConfig(path=str(models / name)), LearnerConfig(world_size=3, expert_parallel=3))
    Qwen2Config(num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_folder(ModelConfig(path=str(tmp_path)), LearnerConfig(world_size=2, expert_parallel=2))
    assert str(caught.value) == (
        f"learner.expert_parallel=2 divides experts, and model.path={str(tmp_path)!r} (qwen2) has none; use "
        "learner.expert_parallel=1"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
