"""Ranks that compute a microbatch together learn as one rank does, and what one layout saves the other loads.

The file is also the program that forks the ranks of each world; each rank plays all scenes and the tests look
at what rank 0 wrote.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.correction import CorrectionConfig
from agentrl.config.learner import FSDPConfig, LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.layout import check_layout
from agentrl.learner.learner import Learner
from agentrl.learner.loading import Outline
from agentrl.learner.lora import add_adapter
from agentrl.learner.packing import pack
from agentrl.learner.tensor_parallel import cut_layers
from parts.learner import learner_spec, lone_learner, random_samples, reserved_ports, tiny_sizes
from parts.ranks import run_program, run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=46, pad_token_id=None, bos_token_id=None, eos_token_id=None)
CONFIGS = {
    # Qwen2 is Llama with fewer biases: one behind a matrix that is cut by rows counts once.
    "llama": LlamaConfig(**{**SIZES, "tie_word_embeddings": False, "attention_bias": True}),
    "qwen3": Qwen3Config(
        **SIZES, head_dim=8
    ),  # norms of each head: whole on each rank, but of its heads alone
}
SCENES = {
    "llama": {"path": "llama"},
    "qwen3": {"path": "qwen3"},
    "llama adapter": {"path": "llama", "lora": LoRAConfig(rank=4, alpha=8.0)},
    "qwen3 adapter": {
        "path": "qwen3",
        "lora": LoRAConfig(rank=3, alpha=8.0, target_modules=("q_proj", "down_proj")),
    },
}
"""Fields of the model's config by scene."""
WORLDS = {
    "pair": ({"world_size": 2}, ["llama", "qwen3", "llama adapter"]),
}
COPIES = FSDPConfig(shard_size=2)
SLOW_WORLDS = {
    "two_pairs": ({"world_size": 4}, ["qwen3", "llama adapter"]),
    "copies": ({"world_size": 4, "fsdp": COPIES}, [*SCENES]),
    "tokens": ({"world_size": 4, "sequence_parallel": 2, "activation_offload": True}, [*SCENES]),
    "eight": (
        {"world_size": 8, "sequence_parallel": 2, "fsdp": FSDPConfig(shard_size=4)},
        ["llama", "qwen3 adapter"],
    ),
}
"""Options of the learner beside a tensor parallel degree of 2, and the scenes that are played; two key-value
heads on two ranks, of which each is needed by two more if tokens are split, too."""
PLAYED = [(world, scene) for world, (_, scenes) in WORLDS.items() for scene in scenes] + [
    pytest.param(world, scene, marks=pytest.mark.slow)
    for world, (_, scenes) in SLOW_WORLDS.items()
    for scene in scenes
]
TIMEOUT_S = 200.0


BATCH = random_samples(7, VOCABULARY)
ALGORITHM = AlgorithmConfig(entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1))


def spec_of(scene, models, **options):
    options = {"gradient_checkpointing": True, "collective_timeout_s": TIMEOUT_S} | options
    return learner_spec(
        ModelConfig(**(SCENES[scene] | {"path": str(models / SCENES[scene]["path"])})),
        learner=LearnerConfig(**options, optimizer=OptimizerConfig(lr=1e-2, grad_clip=0.5)),
        algorithm=ALGORITHM,
        master_dtype=torch.float64,
    )


def play(rank, options, scenes, ports, models, folder, alone=None):
    """Learn in each scene on one rank; rank 0 writes what it saw.

    alone: what one rank alone has saved, which is loaded in the end; None: nothing is.
    """
    facts, weights = {}, {}
    [whole] = pack(BATCH, max_tokens=40, world_size=1)
    for scene in scenes:
        spec = spec_of(scene, models, **options)
        config = spec.learner
        shard = pack(BATCH, max_tokens=40, world_size=config.dp_size)[rank // config.num_replicas]
        learner = Learner(spec, rank=rank, address="127.0.0.1", port=ports.pop(0))
        try:
            steps = [learner.update(learner.score(shard)) for _ in range(2)]
            variants = {
                "as_is": ALGORITHM,
                "masked": ALGORITHM.model_copy(update={"correction": CorrectionConfig(outside="mask")}),
            }
            compared = learner.compare(shard, shard, variants)
            weights |= {
                f"{scene}/{key}": learner._policy.full_tensor(key).double().numpy()
                for key in learner._policy.tensors
            }
            learner.save(str(folder / scene / "state"))
            learner.export(str(folder / scene / "policy"))
            logprobs = np.concatenate([row.tolist() for row in learner.own_logprobs(whole)])
            facts[scene] = {
                "steps": steps,
                "logprobs": logprobs.tolist(),
                "next": learner.update(learner.score(shard)),
                "cosines": [compared[v].cosine for v in variants],
                "is_cut": sum(local_size(p) for p in learner._policy.module.model.layers.parameters()),
            }
            if alone is not None:
                learner.load(str(alone / scene / "state"))
                facts[scene]["next of one"] = learner.update(learner.score(shard))
        finally:
            learner.close()
    if rank == 0:
        save_file(weights, str(folder / "weights.safetensors"))
        (folder / "facts.json").write_text(json.dumps(facts))


def local_size(parameter):
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


# ----------------------------------------------------------------------------------------------------- worlds


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of each family with all of their weights at random, norms and biases, too."""
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    play(0, {}, [*SCENES], reserved_ports(len(SCENES)), models, folder)
    return folder


@pytest.fixture(scope="module")
def worlds(models, alone, tmp_path_factory):
    """Return a function from a world's name to its folder; slow worlds are played if one of them is asked
    for.
    """
    folder = tmp_path_factory.mktemp("worlds")
    played = set()

    def folder_of(world):
        group = WORLDS if world in WORLDS else SLOW_WORLDS
        if world not in played:
            run_program(__file__, models, alone, folder, *group, timeout_s=len(group) * TIMEOUT_S)
            played.update(group)
        return folder / world

    return folder_of


def facts_of(folder):
    return json.loads((folder / "facts.json").read_text())


# ------------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize(("world", "scene"), PLAYED)
def test_ranks_that_compute_together_learn_as_one(alone, worlds, world, scene):
    together = worlds(world)
    one, many = facts_of(alone)[scene], facts_of(together)[scene]
    for step, other in zip(one["steps"], many["steps"], strict=True):
        assert step["grad_norm"] > 0.5, "clipping counts"
        assert other == pytest.approx(step, rel=1e-9, abs=1e-11)
    assert many["cosines"] == pytest.approx(one["cosines"], rel=1e-9)
    np.testing.assert_allclose(many["logprobs"], one["logprobs"], rtol=1e-6)  # handed out in float32
    ours, theirs = load_file(alone / "weights.safetensors"), load_file(together / "weights.safetensors")
    for key in (key for key in ours if key.startswith(f"{scene}/")):
        np.testing.assert_allclose(
            theirs[key], ours[key], rtol=0, atol=1e-6, err_msg=key
        )  # published in float32


@pytest.mark.parametrize(
    ("world", "scene"),
    [
        ("pair", "llama"),
        ("pair", "qwen3"),
        pytest.param("two_pairs", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_a_rank_has_its_part_of_the_layers(alone, worlds, world, scene):
    whole, part = facts_of(alone)[scene]["is_cut"], facts_of(worlds(world))[scene]["is_cut"]
    assert 0.5 <= part / whole * (2 if world == "two_pairs" else 1) < 0.54  # norms are not cut


@pytest.mark.parametrize(("world", "scene"), PLAYED)
def test_one_rank_goes_on_from_a_checkpoint_of_many(alone, worlds, models, world, scene):
    with lone_learner(spec_of(scene, models)) as learner:
        learner.load(str(worlds(world) / scene / "state"))
        metrics = learner.update(learner.score(pack(BATCH, max_tokens=40, world_size=1)[0]))
    assert metrics == pytest.approx(facts_of(alone)[scene]["next"], rel=1e-8, abs=1e-10)


@pytest.mark.parametrize(("world", "scene"), PLAYED)
def test_many_go_on_from_a_checkpoint_of_one_rank(alone, worlds, world, scene):
    found = facts_of(worlds(world))[scene]
    for key in ("next", "next of one"):
        assert found[key] == pytest.approx(facts_of(alone)[scene]["next"], rel=1e-8, abs=1e-10)


@pytest.mark.parametrize(("world", "scene"), PLAYED)
def test_transformers_loads_what_is_exported(worlds, world, scene):
    together = worlds(world)
    ours, exported = (
        load_file(together / "weights.safetensors"),
        AutoModelForCausalLM.from_pretrained(together / scene / "policy"),
    )
    for key, tensor in exported.named_parameters():
        np.testing.assert_array_equal(tensor.detach().double().numpy(), ours[f"{scene}/{key}"], err_msg=key)


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (
            Qwen2Config(num_attention_heads=14, num_key_value_heads=2),
            4,
            "does not divide the 14 attention heads",
        ),
        (Qwen2Config(num_attention_heads=16, num_key_value_heads=2), 4, "2 key-value heads"),
        (LlamaConfig(intermediate_size=11009), 2, "11009 columns of the MLP"),
        (GPT2Config(), 2, "not 'gpt2': transformers has no plan"),
        (MixtralConfig(), 2, "not 'mixtral'"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_in_one_line(config, size, reason):
    check_layout(config, ModelConfig(), LearnerConfig())
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_layout(config, ModelConfig(), LearnerConfig(world_size=size, tensor_parallel=size))
    assert "\n" not in str(refusal.value)
    assert f"learner.tensor_parallel={size}" in str(refusal.value)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)], ids=["plain", "adapters"])
def test_a_layer_needs_two_sums_in_each_direction(lora):
    """Of hidden states; with adapters, also of the small factors' products and gradients."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = AutoModelForCausalLM.from_config(CONFIGS["llama"])
        if lora is not None:
            add_adapter(module, lora, dtype=torch.float32)
            Outline(module).fill(torch.device("cpu"))
        cut_layers(module, init_device_mesh("cpu", (1,)))
        counted = _Sums()
        with counted:
            logits = module(torch.arange(5)[None], use_cache=False).logits
        forward = counted.take()
        with counted:
            logits.sum().backward()
        backward = counted.take()
    finally:
        dist.destroy_process_group()
    width, layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]
    assert forward.count((1, 5, width)) == 2 * layers
    # A first layer whose input is not trained sends no gradient on.
    assert backward.count((1, 5, width)) == 2 * layers - (lora is not None)
    small = [shape for shape in forward + backward if shape != (1, 5, width)]
    # A rank-2 product for each of two matrices cut by rows, and a gradient of A for each of five by columns.
    wanted = [] if lora is None else [(1, 5, 2)] * 2 * layers + [(2, width)] * 5 * layers
    assert sorted(small) == sorted(wanted)


class _Sums(TorchDispatchMode):
    """Collects the shapes of what is summed over ranks."""

    def __init__(self):
        super().__init__()
        self._shapes = []

    def take(self):
        shapes, self._shapes = self._shapes, []
        return shapes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_reduce" in str(func):
            self._shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_dropped_inputs_of_adapters_are_refused():
    learner = LearnerConfig(world_size=2, tensor_parallel=2)
    check_layout(GemmaConfig(), ModelConfig(), learner.model_copy(update={"tensor_parallel": 1}))
    check_layout(CONFIGS["qwen3"], ModelConfig(lora=LoRAConfig(rank=4)), learner)
    with pytest.raises(ConfigError, match=r"learner\.tensor_parallel=2 .*; use model\.lora\.dropout=0"):
        check_layout(CONFIGS["qwen3"], ModelConfig(lora=LoRAConfig(rank=4, dropout=0.1)), learner)


@pytest.mark.parametrize(
    ("sequence", "tensor", "reason"),
    [
        (2, 3, None),
        (4, 3, None),
        (6, 2, None),
        (2, 2, "does not fit the 3 key-value heads"),
        (4, 2, "does not divide the 6 attention heads"),
    ],
)
def test_heads_of_a_rank_are_divided_again_by_sequence_parallelism(sequence, tensor, reason):
    config = Qwen2Config(num_attention_heads=12, num_key_value_heads=6, intermediate_size=48)
    learner = LearnerConfig(world_size=sequence * tensor, sequence_parallel=sequence, tensor_parallel=tensor)
    if reason is None:
        check_layout(config, ModelConfig(), learner)
        return
    with pytest.raises(ConfigError, match=rf"{reason} of a rank \(learner\.tensor_parallel=2\); use"):
        check_layout(config, ModelConfig(), learner)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"world_size": 4, "compile": True},
            "cannot be combined with compile=true; leave one of the two out",
        ),
        ({"world_size": 3}, "tensor_parallel=2 does not divide world_size=3"),
        (
            {"world_size": 6, "sequence_parallel": 2},
            "sequence_parallel=2 times tensor_parallel=2 does not divide world_size=6",
        ),
        (
            {"world_size": 6, "fsdp": FSDPConfig(shard_size=3)},
            "does not divide fsdp.shard_size=3; .* a multiple",
        ),
        (
            {"world_size": 6, "expert_parallel": 3},
            "does not divide expert_parallel=3; .* use a multiple of 2",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_the_config(options, reason):
    with pytest.raises(ValidationError, match=reason):
        LearnerConfig(tensor_parallel=2, **options)


def play_worlds(models, alone, folder, *names):
    """Play every world that is named; return how many processes failed."""
    failed = 0
    for name in names:
        options, scenes = (WORLDS | SLOW_WORLDS)[name]
        (folder / name).mkdir()
        ports = reserved_ports(len(scenes))
        given = {**options, "tensor_parallel": 2}
        failed += run_ranks(
            (play, (rank, given, scenes, [*ports], models, folder / name, alone))
            for rank in range(options["world_size"])
        )
    return failed


if __name__ == "__main__":
    paths, names = sys.argv[1:4], sys.argv[4:]
    sys.exit(play_worlds(*map(Path, paths), *names))
