"""What is said of an adapter before a run."""

import json
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.schema import Config
from agentrl.extras.plan.explain import explain
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.sharding import gather
from agentrl.servers.process_group import tensor_checksum
from parts.learner import (
    learner_spec,
    lone_learner,
    random_samples,
    tiny_sizes,
)
from parts.ranks import run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47)
LORA = LoRAConfig(rank=3, alpha=6.0)
NUM_UPDATES = 3
TIMEOUT_S = 120.0


def spec(world_size=1, *, lora=LORA, dtype="float32", path="", kl=0.1, checkpointing=False, **changes):
    learner = LearnerConfig(
        world_size=world_size, collective_timeout_s=TIMEOUT_S, optimizer=OptimizerConfig(lr=1e-2)
    )
    options = {
        "learner": learner.model_copy(update={"gradient_checkpointing": checkpointing}),
        "algorithm": AlgorithmConfig(kl=KLConfig(coefficient=kl)),
        "master_dtype": torch.float64,
    }
    model = ModelConfig(path=path, lora=lora, dtype=dtype)
    return learner_spec(model, sizes=None if path else SIZES, **{**options, **changes})


@contextmanager
def learner(**options):
    with lone_learner(spec(**options)) as one:
        yield one


def shard_of(rank, world_size, max_tokens=30):
    return pack(random_samples(7, VOCABULARY), max_tokens=max_tokens, world_size=world_size)[rank]


def train(one, rank=0, world_size=1, updates=NUM_UPDATES):
    return [one.update(one.score(shard_of(rank, world_size))) for _ in range(updates)]


def adapter(one):
    return {
        name: gather(tensor).clone()
        for name, tensor in one._policy.module.state_dict().items()
        if ".lora_" in name
    }


def continued(folder, **changes):
    lora = {
        "rank": 3,
        "alpha": 6.0,
        "target_modules": ("q_proj", "down_proj"),
        "path": str(folder / "adapter"),
    }
    return ModelConfig(path=str(folder / "base"), lora=LoRAConfig(**(lora | changes)))


def test_a_path_needs_the_rank_and_explain_names_it():
    with pytest.raises(ValidationError, match="set rank, alpha"):
        LoRAConfig(path="a")
    config = Config.model_validate(
        {"model": {"lora": {"path": "my/adapter", "rank": 3, "target_modules": ["q"]}}}
    )
    assert "continued from my/adapter; rank 3, alpha 32, on q" in explain(config)
    assert "new, adds nothing at first" in explain(Config.model_validate({"model": {"lora": {"rank": 3}}}))


# ------------------------------------------------------------------------------------------------------ ranks


def play(rank, world_size, port, folder):
    with ExitStack() as stack:
        one = Learner(spec(world_size), rank=rank, address="127.0.0.1", port=port)
        stack.callback(one.close)
        facts = train(one, rank, world_size)
        weights = {name: one._policy.full_tensor(name).numpy() for name in one._policy.tensors}
        one.save(str(folder / "state"))
        one.export_adapter(str(folder / "published"))
        checksums = one.adapter_checksums()
        tensors = {name: tensor.numpy() for name, tensor in adapter(one).items()}
    if rank == 0:
        save_file(weights, str(folder / "weights.safetensors"))
        save_file(tensors, str(folder / "adapter.safetensors"))
        (folder / "facts.json").write_text(json.dumps(facts))
        published = load_file(folder / "published/adapter_model.safetensors")
        assert {
            f"policy/{name}": tensor_checksum(torch.tensor(tensor)) for name, tensor in published.items()
        } == checksums


if __name__ == "__main__":
    folder, port = sys.argv[1:]
    sys.exit(run_ranks((play, (rank, 2, int(port), Path(folder))) for rank in range(2)))
