"""Mixtures of experts: what is published is what `save_pretrained` writes, for any number of ranks, and more
ranks or other packing change no update.

The file is also the program that forks the ranks of each world.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from agentrl.config.learner import FSDPConfig, LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.data.checkpoint_files import read_model_config
from agentrl.errors import ConfigError
from agentrl.learner import model as policy_model
from agentrl.learner import weights as outgoing
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.restore import read_policy
from agentrl.learner.score_head import ScoreHead
from agentrl.servers.process_group import tensor_checksum
from agentrl.servers.weight_names import find_pieces
from parts.experts import CONFIGS, VOCABULARY, with_experts, write_experts
from parts.learner import learner_spec, lone_learner, random_samples, reserved_ports
from parts.ranks import run_program, run_ranks

TIMEOUT_S = 200.0
SAMPLES = random_samples(9, VOCABULARY)
ROUTED = with_experts(SAMPLES)
MODELS = {
    **{f"{name} tied": {"name": name} for name in CONFIGS},
    "qwen3_moe untied": {"name": "qwen3_moe", "is_tied": False},
    "qwen3_moe bfloat16": {"name": "qwen3_moe", "dtype": torch.bfloat16},
}
WORLDS = {
    "one": {"world_size": 1},
    "two": {"world_size": 2},
    "tokens": {"world_size": 2, "sequence_parallel": 2},
    "offloaded": {"world_size": 2, "offload": "parameters"},
    "recomputed": {"world_size": 2, "gradient_checkpointing": True},
}
SLOW_WORLDS = {"four": {"world_size": 4}, "copies": {"world_size": 4, "fsdp": FSDPConfig(shard_size=2)}}
QWEN3 = "qwen3_moe tied"
PLAYED = [(world, name) for world in WORLDS for name in MODELS if world in ("one", "two") or name == QWEN3]
SLOWLY_PLAYED = [pytest.param(world, QWEN3, marks=pytest.mark.slow) for world in SLOW_WORLDS]
ROUTER_METRICS = {f"router/{name}" for name in ("busiest", "unused", "balance", "replayed", "agreement")}
COMPARED = [(world, name) for world, name in PLAYED if world != "one" and "bfloat16" not in name]
COMPARED += SLOWLY_PLAYED


def spec(path, **learner):
    options = {
        "collective_timeout_s": TIMEOUT_S,
        "optimizer": OptimizerConfig(lr=1e-2),
        "balance_coefficient": 0.5,
        **learner,
    }
    dtype = "bfloat16" if path.name.endswith("bfloat16") else "float32"
    return learner_spec(
        ModelConfig(path=str(path), dtype=dtype),
        learner=LearnerConfig(**options),
        master_dtype=torch.float64 if dtype == "float32" else torch.float32,
    )


def play(rank, world, ports, models, folder):
    """Export each model as it was loaded and after two updates, and write its losses; rank 0 writes."""
    policy_model.GATHERED_BYTES = 2 * 40 * 32 * 4  # two experts at a time
    for name, port in zip(names_of(world), ports, strict=True):
        out = folder / world / name
        options = (WORLDS | SLOW_WORLDS)[world]
        one = Learner(spec(models / name, **options), rank=rank, address="127.0.0.1", port=port)
        one.export(str(out / "loaded"))
        size = options["world_size"] // options.get("sequence_parallel", 1)
        shards = pack(ROUTED, max_tokens=30, world_size=size)
        shard = shards[rank // options.get("sequence_parallel", 1)]
        facts = {"updates": [one.update(one.score(shard)) for _ in range(2)]}
        facts["specs"] = [(s.name, list(s.shape), s.num_bytes) for s in one.tensor_specs()]
        facts["sums"] = one.checksums()
        one.export(str(out / "trained"))
        one.save(str(out / "state"))
        one.close()
        if rank == 0:
            (out / "facts.json").write_text(json.dumps(facts))


def names_of(world):
    return [name for played, name in PLAYED if played == world] or [QWEN3]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        write_experts(folder / name, **options)
    return folder


@pytest.fixture(scope="module")
def worlds(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    run_program(__file__, models, folder, *WORLDS, timeout_s=4 * TIMEOUT_S)
    return folder


@pytest.fixture(scope="module")
def slow_worlds(models, worlds):
    run_program(__file__, models, worlds, *SLOW_WORLDS, timeout_s=4 * TIMEOUT_S)


@pytest.fixture
def played(request, worlds):
    """The folder of all worlds, in which those that a test is about have been played."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("slow_worlds")
    return worlds


def main(models, folder, *worlds):
    failed = 0
    for world in worlds:
        ports = reserved_ports(len(names_of(world)))
        size = (WORLDS | SLOW_WORLDS)[world]["world_size"]
        failed += run_ranks((play, (rank, world, ports, Path(models), Path(folder))) for rank in range(size))
    return failed


def read(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def facts(worlds, world, name):
    return json.loads((worlds / world / name / "facts.json").read_text())


def saved_again(path, folder):
    """Return what transformers writes of the model that it loads from `path`."""
    AutoModelForCausalLM.from_pretrained(path, dtype="auto").save_pretrained(folder)
    return read(folder)


# ------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(("world", "name"), PLAYED + SLOWLY_PLAYED)
def test_a_loaded_model_is_exported_as_save_pretrained_writes_it(models, played, tmp_path, world, name):
    expected = saved_again(models / name, tmp_path)
    found = read(played / world / name / "loaded")
    assert any(".experts.3." in key for key in found)
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        # As bytes: -0.0 counts.
        assert tensor_checksum(found[key]) == tensor_checksum(tensor), key


@pytest.mark.parametrize(("world", "name"), PLAYED + SLOWLY_PLAYED)
def test_a_trained_model_is_exported_announced_and_hashed_under_the_same_names(played, tmp_path, world, name):
    exported = played / world / name / "trained"
    found, seen = read(exported), facts(played, world, name)
    expected = saved_again(exported, tmp_path)
    sums = {key: tensor_checksum(tensor) for key, tensor in expected.items()}
    assert {key: tensor_checksum(tensor) for key, tensor in found.items()} == sums == seen["sums"]
    assert {key: (shape, size) for key, shape, size in seen["specs"]} == {
        key: (list(tensor.shape), tensor.nbytes) for key, tensor in expected.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_any_world_is_exported_under_these_names(worlds, tmp_path, name):
    for world in ("one", "two"):
        state = worlds / world / name / "state"
        model = read_model_config(state)
        outgoing.export(read_policy(model, state), None, model, tmp_path / world)
        expected = read(worlds / world / name / "trained")
        found = read(tmp_path / world)
        assert {key: tensor_checksum(t) for key, t in found.items()} == {
            key: tensor_checksum(t) for key, t in expected.items()
        }


def test_pieces_cover_each_weight_once_and_in_order(models):
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(models / name)
        covered = {key: torch.zeros(tensor.shape) for key, tensor in model.state_dict().items()}
        pieces = find_pieces(model)
        for piece in pieces.values():
            piece.of(covered[piece.weight]).add_(1)
        assert all(bool((counts == 1).all()) for counts in covered.values())
        order = [(list(covered).index(piece.weight), piece.start) for piece in pieces.values()]
        assert order == sorted(order)


def test_names_do_not_depend_on_how_a_model_was_made(models):
    for name, config in CONFIGS.items():
        loaded = AutoModelForCausalLM.from_pretrained(models / f"{name} tied")
        before = dict(vars(loaded))
        assert find_pieces(loaded) == find_pieces(AutoModelForCausalLM.from_config(config))
        assert vars(loaded) == before


# -------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(("world", "name"), COMPARED)
def test_more_ranks_make_the_same_updates(played, world, name):
    one, more = facts(played, "one", name)["updates"], facts(played, world, name)["updates"]
    for expected, found in zip(one, more, strict=True):
        assert expected["grad_norm"] > 0
        assert {key for key in expected if key.startswith("router/")} == ROUTER_METRICS
        assert 0 < expected["router/agreement"] < 1
        alike = (
            "loss",
            "grad_norm",
            "entropy",
            *(ROUTER_METRICS if world != "tokens" else ("router/balance",)),
        )
        for key in alike:
            assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-9), key
    expected, found = (read(played / w / name / "trained") for w in ("one", world))
    loaded = read(played / "one" / name / "loaded")
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
    changed = {
        key.split(".experts.")[1].split(".")[0]
        for key in loaded
        if ".experts." in key and not torch.equal(loaded[key], expected[key])
    }
    assert len(changed) >= 3, "an update changes experts"


@pytest.mark.parametrize("name", [f"{name} tied" for name in CONFIGS])
def test_packed_is_separate(models, name):
    """Each sequence alone, through the model that transformers loads."""
    with lone_learner(spec(models / name)) as one:
        [shard] = pack(SAMPLES, max_tokens=1000, world_size=1)
        [found] = one.own_logprobs(shard)
    model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float64)
    model.set_experts_implementation("eager")
    expected = []
    [microbatch] = shard
    for index in microbatch.sample_indices:
        sample = next(s for s in SAMPLES if s.index == index)
        ids = torch.tensor(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / 0.8
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        expected += logprobs[torch.from_numpy(sample.action_mask[1:])].tolist()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("most", [1, 2, 4, 100])
def test_few_experts_are_gathered_at_a_time(models, monkeypatch, most):
    with lone_learner(spec(models / "qwen3_moe tied")) as one:
        policy = one._policy
        for weight in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
            names = [name for name, piece in policy.pieces.items() if piece.weight == weight]
            row_bytes = 4 * policy.tensors[weight][0].numel()
            monkeypatch.setattr(policy_model, "GATHERED_BYTES", most * row_bytes)
            runs = list(policy._runs(weight, names))
            assert [name for run, *_ in runs for name in run] == names
            assert len(runs) == -(-5 // most)
            for run, begin, end in runs:
                assert end - begin <= most
                for name in run:
                    piece = policy.pieces[name]
                    assert begin <= piece.start[0] < piece.start[0] + piece.extent[0] <= end


def test_a_reward_model_of_experts_is_exported_as_save_pretrained_writes_it(models, tmp_path):
    one_spec = dataclasses.replace(
        spec(models / "qwen3_moe untied", balance_coefficient=0.0), score_head=ScoreHead(0)
    )
    with lone_learner(one_spec) as one:
        one.export(str(tmp_path / "exported"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", num_labels=1)
    model.save_pretrained(tmp_path / "again")
    expected, found = read(tmp_path / "again"), read(tmp_path / "exported")
    assert "score.weight" in found
    assert any(".experts.3." in key for key in found)
    assert {key: tensor_checksum(t) for key, t in found.items()} == {
        key: tensor_checksum(t) for key, t in expected.items()
    }


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("lora", "options", "key", "instead"),
    [
        (LoRAConfig(rank=4), {}, "model.lora.rank=4", "use model.lora.rank=0 (full weights)"),
        (
            LoRAConfig(),
            {"world_size": 2, "tensor_parallel": 2},
            "learner.tensor_parallel=2 without learner.expert_parallel",
            "use learner.expert_parallel=2 as well, which divides experts",
        ),
        (LoRAConfig(), {"compile": True}, "learner.compile=true", "use learner.compile=false"),
    ],
)
def test_what_is_not_tested_with_experts_is_refused(models, lora, options, key, instead):
    path = models / "qwen3_moe tied"
    with pytest.raises(ConfigError) as caught:
        check_folder(ModelConfig(path=str(path), lora=lora), LearnerConfig(**options))
    assert str(caught.value) == (
        f"{key} is not tested with a mixture of experts (model.path={str(path)!r}); {instead}"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
