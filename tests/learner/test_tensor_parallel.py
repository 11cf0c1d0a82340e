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
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file
from torch.distributed.tensor import DTensor
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
from agentrl.learner.packing import pack
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
WORLDS = {"pair": 2, "two_pairs": 4}
TIMEOUT_S = 200.0


BATCH = random_samples(7, VOCABULARY)


def play(rank, world_size, tensor_parallel, ports, models, folder):
    """Learn with each model on one rank; rank 0 writes what it saw."""
    config = LearnerConfig(
        world_size=world_size,
        tensor_parallel=tensor_parallel,
        collective_timeout_s=TIMEOUT_S,
        gradient_checkpointing=True,
        optimizer=OptimizerConfig(lr=1e-2, grad_clip=0.5),
    )
    algorithm = AlgorithmConfig(entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1))
    shard = pack(BATCH, max_tokens=40, world_size=config.dp_size)[rank // tensor_parallel]
    facts, weights = {}, {}
    for name in CONFIGS:
        spec = learner_spec(
            ModelConfig(path=str(models / name)),
            learner=config,
            algorithm=algorithm,
            master_dtype=torch.float64,
        )
        learner = Learner(spec, rank=rank, address="127.0.0.1", port=ports.pop(0))
        try:
            steps = [learner.update(learner.score(shard)) for _ in range(2)]
            variants = {
                "as_is": algorithm,
                "masked": algorithm.model_copy(update={"correction": CorrectionConfig(outside="mask")}),
            }
            compared = learner.compare(shard, shard, variants)
            weights |= {
                f"{name}/{key}": learner._policy.full_tensor(key).double().numpy()
                for key in learner._policy.tensors
            }
            learner.save(str(folder / name / "state"))
            learner.export(str(folder / name / "policy"))
            facts[name] = {
                "steps": steps,
                "next": learner.update(learner.score(shard)),
                "cosines": [compared[v].cosine for v in variants],
                "is_cut": sum(local_size(p) for p in learner._policy.module.model.layers.parameters()),
            }
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
    play(0, 1, 1, reserved_ports(len(CONFIGS)), models, folder)
    return folder


@pytest.fixture(scope="module")
def worlds(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    run_program(__file__, models, folder, timeout_s=TIMEOUT_S)
    return folder


@pytest.fixture(params=WORLDS)
def together(worlds, request):
    return worlds / request.param


def facts_of(folder):
    return json.loads((folder / "facts.json").read_text())


# ------------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_that_compute_together_learn_as_one(alone, together, name):
    one, many = facts_of(alone)[name], facts_of(together)[name]
    for step, other in zip(one["steps"], many["steps"], strict=True):
        assert other == pytest.approx(step, rel=1e-9, abs=1e-11)
    assert many["cosines"] == pytest.approx(one["cosines"], rel=1e-9)
    ours, theirs = load_file(alone / "weights.safetensors"), load_file(together / "weights.safetensors")
    for key in (key for key in ours if key.startswith(f"{name}/")):
        np.testing.assert_allclose(
            theirs[key], ours[key], rtol=0, atol=1e-6, err_msg=key
        )  # published in float32


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_has_its_part_of_the_layers(alone, together, name):
    whole, part = facts_of(alone)[name]["is_cut"], facts_of(together)[name]["is_cut"]
    assert 0.5 <= part / whole * (2 if together.name == "two_pairs" else 1) < 0.54  # norms are not cut


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_goes_on_from_a_checkpoint_of_many(alone, together, models, name):
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, grad_clip=0.5))
    algorithm = AlgorithmConfig(entropy_coefficient=0.01, kl=KLConfig(coefficient=0.1))
    spec = learner_spec(
        ModelConfig(path=str(models / name)),
        learner=config,
        algorithm=algorithm,
        master_dtype=torch.float64,
    )
    with lone_learner(spec) as learner:
        learner.load(str(together / name / "state"))
        metrics = learner.update(learner.score(pack(BATCH, max_tokens=40, world_size=1)[0]))
    assert metrics == pytest.approx(facts_of(alone)[name]["next"], rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_what_is_exported(together, name):
    ours, exported = (
        load_file(together / "weights.safetensors"),
        AutoModelForCausalLM.from_pretrained(together / name / "policy"),
    )
    for key, tensor in exported.named_parameters():
        np.testing.assert_array_equal(tensor.detach().double().numpy(), ours[f"{name}/{key}"], err_msg=key)


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


def test_adapters_are_refused():
    learner = LearnerConfig(world_size=2, tensor_parallel=2)
    check_layout(GemmaConfig(), ModelConfig(), learner.model_copy(update={"tensor_parallel": 1}))
    with pytest.raises(ConfigError, match="leave one of the two out"):
        check_layout(CONFIGS["qwen3"], ModelConfig(lora=LoRAConfig(rank=4)), learner)


@pytest.mark.parametrize(
    "other", [{"sequence_parallel": 2}, {"fsdp": FSDPConfig(shard_size=2)}, {"compile": True}]
)
def test_options_that_do_not_go_together_are_refused_by_the_config(other):
    with pytest.raises(ValidationError, match="tensor_parallel=2 cannot be combined with"):
        LearnerConfig(world_size=4, tensor_parallel=2, **other)
    with pytest.raises(ValidationError, match="tensor_parallel=2 does not divide world_size=3"):
        LearnerConfig(world_size=3, tensor_parallel=2)


def play_worlds(models, worlds):
    """Play every world; return how many processes failed."""
    for name in WORLDS:
        (worlds / name).mkdir()
    ports = {name: reserved_ports(len(CONFIGS)) for name in WORLDS}
    return run_ranks(
        (play, (rank, world_size, 2, list(ports[name]), models, worlds / name))
        for name, world_size in WORLDS.items()
        for rank in range(world_size)
    )


if __name__ == "__main__":
    sys.exit(play_worlds(*map(Path, sys.argv[1:])))
