"""LoRA: adapters alone are trained, servers see merged weights, the reference is the base; and by any number
of ranks.
"""

import json
import shutil
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.data.adapter_source import read_adapter
from agentrl.data.checkpoint_files import read_model_config
from agentrl.data.model_source import resolve_model
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.learner import Learner
from agentrl.learner.lora import write_adapter
from agentrl.learner.packing import pack
from agentrl.learner.sharding import gather
from agentrl.learner.step import count_update
from agentrl.learner.supervised_loss import SupervisedObjective
from agentrl.servers.process_group import tensor_checksum
from parts.learner import (
    learner_spec,
    lone_learner,
    random_samples,
    reserved_port,
    tiny_sizes,
    write_tiny_model,
)
from parts.ranks import run_program, run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47)
LORA = LoRAConfig(rank=3, alpha=6.0)
NUM_UPDATES = 3
TIMEOUT_S = 120.0
LOGPROB_ATOL = 1e-10


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


def frozen(one):
    return {
        name: gather(tensor).clone()
        for name, tensor in one._policy.module.state_dict().items()
        if ".lora_" not in name
    }


# -------------------------------------------------------------------------------------------------------- law


def test_merged_weights_compute_what_weights_and_adapters_compute():
    """The sums that servers get, put in the place of the weights: float64 log-probabilities of the learner's
    own forward.
    """
    with learner() as one:
        train(one)
        policy = one._policy
        unmerged, base = logprobs_of(policy), logprobs_of(policy.without_adapters())
        assert (base - unmerged).abs().max() > 0.05
        sums = {
            name: gather(policy.tensors[name]) + adapter.product()
            for name, adapter in policy.adapters.items()
        }
        with torch.no_grad():
            for name, total in sums.items():
                policy.tensors[name].copy_(total)
        torch.testing.assert_close(
            logprobs_of(policy.without_adapters()), unmerged, rtol=0, atol=LOGPROB_ATOL
        )


@torch.no_grad()
def logprobs_of(policy):
    [microbatch] = shard_of(0, 1, max_tokens=1000)
    policy.module.eval()
    positions, targets = torch.tensor(microbatch.predictor_positions), torch.tensor(microbatch.targets)
    logprobs, _ = policy.score(microbatch, positions, targets, temperature=1.0)
    policy.reshard()
    return logprobs


def test_the_layer_computes_with_the_merged_weight_to_rounding():
    with learner() as one:
        train(one)
        policy = one._policy
        name = "model.layers.0.self_attn.q_proj.weight"
        layer = policy.module.get_submodule(name.removesuffix(".weight"))
        merged = gather(policy.tensors[name]) + policy.adapters[name].product()
        x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        low = policy.adapters[name]
        down, up = gather(low.down), gather(low.up)
        expected = x @ gather(policy.tensors[name]).T + (6.0 / 3) * (x @ down.T) @ up.T
        torch.testing.assert_close(x @ merged.T, expected, rtol=0, atol=1e-12)
        assert layer.scaling["default"] == 2.0


def test_only_the_adapter_is_trained_and_the_optimizer_knows_nothing_else():
    with learner() as one:
        before, started = frozen(one), adapter(one)
        metrics = train(one)
        assert all(m["grad_norm"] > 0 for m in metrics)
        for name, tensor in frozen(one).items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
        assert all(not torch.equal(tensor, started[name]) for name, tensor in adapter(one).items())
        trained = [p for group in one._stepper.optimizer.param_groups for p in group["params"]]
        assert len(trained) == len(started) == 2 * 2 * 7  # A and B, two layers, seven linear layers each


def test_the_adapter_begins_as_nothing_and_the_reference_is_the_base():
    with learner() as one:
        [first] = one.score(shard_of(0, 1, max_tokens=1000))
        np.testing.assert_array_equal(first.proximal_logprobs, first.ref_logprobs)
        assert train(one)[0]["kl"] == 0.0
        [later] = one.score(shard_of(0, 1, max_tokens=1000))
        np.testing.assert_array_equal(later.ref_logprobs, first.ref_logprobs)
        assert np.abs(later.proximal_logprobs - first.proximal_logprobs).max() > 0.01
        assert train(one, updates=1)[0]["kl"] > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_a_plain_model_whose_weights_are_sums(checkpointing):
    """Also through recomputed layers, whose inputs need no gradient of their own."""
    with learner(kl=0.0, checkpointing=checkpointing) as one:
        train(one)
        policy = one._policy
        policy.module.train()
        [microbatch] = pack(random_samples(1, VOCABULARY), max_tokens=1000, world_size=1)[0]
        SupervisedObjective().part(policy, microbatch, count_update([microbatch])).loss.backward()

        plain = AutoModelForCausalLM.from_config(
            Qwen2Config(**SIZES), dtype=torch.float64, attn_implementation="eager"
        )
        pairs = {
            name: (gather(low.down).detach(), gather(low.up).detach())
            for name, low in policy.adapters.items()
        }
        leaves = {name: (down.requires_grad_(), up.requires_grad_()) for name, (down, up) in pairs.items()}
        weights = {name: gather(tensor).detach() for name, tensor in policy.tensors.items()}
        weights |= {name: weights[name] + 2.0 * up @ down for name, (down, up) in leaves.items()}
        logits = functional_call(plain, weights, (torch.tensor(microbatch.token_ids[None]),)).logits[0]
        cross_entropy(
            logits[torch.tensor(microbatch.predictor_positions)], torch.tensor(microbatch.targets)
        ).backward()

        for name, (down, up) in leaves.items():
            low = policy.adapters[name]
            torch.testing.assert_close(gather(low.down.grad), down.grad, rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(gather(low.up.grad), up.grad, rtol=1e-4, atol=1e-7)
            assert policy.tensors[name].grad is None


# ---------------------------------------------------------------------------------------------------- publish


def test_what_is_published_has_the_names_of_the_base(tmp_path):
    with learner(master_dtype=torch.float32) as one:
        train(one)
        specs = one.tensor_specs()
        plain = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
        assert [(s.name, s.shape) for s in specs] == [
            (n, tuple(t.shape)) for n, t in plain.named_parameters()
        ]
        one.export(str(tmp_path / "policy"))
        written = load_file(tmp_path / "policy" / "model.safetensors")
        assert {
            name: tensor_checksum(torch.tensor(tensor)) for name, tensor in written.items()
        } == one.checksums()
        [microbatch] = shard_of(0, 1, max_tokens=1000)
        [scored] = one.score([microbatch])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation="eager")
        first = int(microbatch.segment_lengths[0])
        with torch.no_grad():
            logprobs = torch.log_softmax(
                loaded(torch.tensor(microbatch.token_ids[None, :first])).logits[0] / 0.8, -1
            )
        own = microbatch.predictor_positions < first
        expected = logprobs[
            torch.tensor(microbatch.predictor_positions[own]), torch.tensor(microbatch.targets[own])
        ]
        np.testing.assert_allclose(scored.proximal_logprobs[own], expected.numpy(), atol=2e-5)


def test_frozen_weights_are_kept_in_the_dtype_of_the_model_and_the_adapter_in_float32():
    with learner(dtype="bfloat16", master_dtype=torch.float32, kl=0.0) as one:
        train(one, updates=1)
        assert {t.dtype for t in frozen(one).values()} == {torch.bfloat16}
        assert {t.dtype for t in adapter(one).values()} == {torch.float32}
        assert {s.dtype for s in one.tensor_specs()} == {"bfloat16"}


# ------------------------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_where_it_was(tmp_path):
    with learner() as one:
        train(one, updates=2)
        one.save(str(tmp_path / "state"))
        uninterrupted = train(one, updates=2)
        final = adapter(one)
        metadata = torch.distributed.checkpoint.FileSystemReader(str(tmp_path / "state")).read_metadata()
        assert all(".lora_" in name for name in metadata.state_dict_metadata if name.startswith("model."))
    with learner() as one:
        one.load(str(tmp_path / "state"))
        assert train(one, updates=2) == uninterrupted
        for name, tensor in adapter(one).items():
            torch.testing.assert_close(tensor, final[name], rtol=0, atol=0)


def test_a_checkpoint_of_another_rank_of_the_adapter_is_refused(tmp_path):
    with learner() as one:
        one.save(str(tmp_path / "state"))
    with learner(lora=LoRAConfig(rank=5)) as one:
        with pytest.raises(CheckpointError, match="could not be read"):
            one.load(str(tmp_path / "state"))


# ----------------------------------------------------------------------------------------------------- config


def test_names_of_no_layer_are_refused():
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules=\['q_projection'\] does not fit"):
        with learner(lora=LoRAConfig(rank=2, target_modules=("q_projection",))):
            pass


@pytest.mark.parametrize(("name", "why"), [("embed_tokens", "not a linear layer"), ("lm_head", "tied")])
def test_layers_that_cannot_be_merged_are_refused(name, why):
    with pytest.raises(ConfigError, match=why):
        with learner(lora=LoRAConfig(rank=2, target_modules=(name,))):
            pass


def test_only_the_named_layers_get_an_adapter():
    with learner(lora=LoRAConfig(rank=2, target_modules=("q_proj", "v_proj"))) as one:
        assert sorted(one._policy.adapters) == [
            f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in (0, 1) for kind in "qv"
        ]


@pytest.mark.parametrize(
    ("named", "written"),
    [
        (("layers.0.self_attn.q_proj",), ["layers.0.self_attn.q_proj"]),
        (("q_proj",), ["q_proj"]),
        ((), ["q_proj"]),
    ],
)
def test_an_adapter_of_some_layers_is_written_as_one_of_these(tmp_path, named, written):
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_{part}.weight": torch.zeros(2, 2) for part in "AB"}
    write_adapter(tensors, LoRAConfig(rank=2, target_modules=named), "base", tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == written


# ------------------------------------------------------------------------------------------ a stored adapter


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A random model with an adapter that peft made and saved, and the log-probabilities of both."""
    folder = tmp_path_factory.mktemp("stored")
    write_tiny_model(folder / "base", VOCABULARY)
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "adapter")
    return (
        folder,
        plain_logprobs(model),
        plain_logprobs(AutoModelForCausalLM.from_pretrained(folder / "base")),
    )


@torch.no_grad()
def plain_logprobs(model):
    [microbatch] = shard_of(0, 1, max_tokens=1000)
    found = []
    for row in np.split(microbatch.token_ids, np.cumsum(microbatch.segment_lengths)[:-1]):
        found.append(model.eval()(torch.tensor(row)[None].long()).logits[0].log_softmax(-1))
    logprobs = torch.cat(found)[torch.tensor(microbatch.predictor_positions)]
    return logprobs.gather(1, torch.tensor(microbatch.targets)[:, None].long())[:, 0]


def continued(folder, **changes):
    lora = {
        "rank": 3,
        "alpha": 6.0,
        "target_modules": ("q_proj", "down_proj"),
        "path": str(folder / "adapter"),
    }
    return ModelConfig(path=str(folder / "base"), lora=LoRAConfig(**(lora | changes)))


def test_a_stored_adapter_is_continued_beside_its_base(stored):
    folder, expected, of_base = stored
    model = resolve_model(continued(folder))
    with lone_learner(learner_spec(model, algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.1)))) as one:
        np.testing.assert_allclose(logprobs_of(one._policy), expected, atol=1e-4)
        np.testing.assert_allclose(logprobs_of(one._reference), of_base, atol=1e-4)
        assert (expected - of_base).abs().max() > 0.1
        before = adapter(one)
        train(one, updates=1)
        assert all(not torch.equal(tensor, before[name]) for name, tensor in adapter(one).items())


def test_what_is_published_and_exported_is_the_continued_adapter(stored, tmp_path):
    folder, expected, _ = stored
    with lone_learner(learner_spec(resolve_model(continued(folder)))) as one:
        one.export_adapter(str(tmp_path / "alone"))
        one.export(str(tmp_path / "merged"))
        one.save(str(tmp_path / "state"))
    alone, given = (
        load_file(f / "adapter_model.safetensors") for f in (tmp_path / "alone", folder / "adapter")
    )
    assert alone.keys() == given.keys()
    assert all(np.array_equal(alone[name], given[name]) for name in given)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    np.testing.assert_allclose(plain_logprobs(merged), expected, atol=1e-4)
    again = resolve_model(continued(folder, path=str(tmp_path / "alone")))
    assert again.lora.rank == 3, "what is written can be continued"
    assert read_model_config(tmp_path / "state").lora.path == "", "a checkpoint needs no other adapter"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rank": 4},
            r"has rank 3, and model\.lora\.rank is 4; use model\.lora=\{path: .*, rank: 3, alpha: 6, tar",
        ),
        ({"alpha": 3.0}, r"has alpha 6, and model\.lora\.alpha is 3"),
        ({"target_modules": ("q_proj",)}, r"\['down_proj', 'q_proj'\], and .* is \['q_proj'\]"),
        ({"path": "no/such/folder"}, r"no such folder"),
    ],
)
def test_a_config_that_does_not_fit_the_adapter_is_refused_in_one_line(stored, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(continued(stored[0], **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_dora", True, "has use_dora=True"),
        ("use_rslora", True, "use_rslora"),
        ("modules_to_save", ["lm_head"], r"modules_to_save=\['lm_head'\]"),
        ("rank_pattern", {"q_proj": 8}, "rank_pattern"),
        ("bias", "all", "bias='all'"),
        ("init_lora_weights", "pissa", "init_lora_weights='pissa'"),
        ("peft_type", "IA3", "peft_type='IA3'"),
        ("target_modules", ".*proj", "a pattern"),
        ("r", "many", "does not describe a LoRA adapter: r:"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(stored, tmp_path, key, value, message):
    copy = spoiled(stored[0], tmp_path)
    file = copy / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ConfigError, match=message):
        read_adapter(copy)


def spoiled(folder, tmp_path):
    return Path(shutil.copytree(folder / "adapter", tmp_path / "copy"))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_is_refused(stored, tmp_path, missing):
    copy = spoiled(stored[0], tmp_path)
    (copy / missing).unlink()
    with pytest.raises(ConfigError, match=f"it has no {missing}"):
        read_adapter(copy)


@pytest.mark.parametrize("damage", ["lacks", "further", "shape", "cut"])
def test_weights_of_another_model_are_refused_by_name(stored, tmp_path, damage):
    folder, copy = stored[0], spoiled(stored[0], tmp_path)
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        if damage == "further":
            tensors[name.replace("layers.0", "layers.7")] = tensors[name]
        elif damage == "shape":
            tensors[name] = tensors[name][:, :-1].copy()
        else:
            del tensors[name]
        save_file(tensors, file)
    said = {
        "lacks": f"lacks '{name}'",
        "further": "has the further tensor",
        "shape": "of shape",
        "cut": "be read",
    }
    with pytest.raises(ConfigError, match=r"model\.lora\.path") as caught:
        with lone_learner(learner_spec(resolve_model(continued(folder, path=str(copy))))):
            pass
    assert said[damage] in str(caught.value)


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


def test_two_ranks_learn_as_one(tmp_path):
    one_rank, two_ranks = tmp_path / "one", tmp_path / "two"
    for folder in (one_rank, two_ranks):
        folder.mkdir()
    play(0, 1, reserved_port(), one_rank)
    run_program(__file__, two_ranks, reserved_port(), timeout_s=TIMEOUT_S)
    one, two = (json.loads((folder / "facts.json").read_text()) for folder in (one_rank, two_ranks))
    for mine, other in zip(one, two, strict=True):
        assert other == pytest.approx(mine, rel=1e-9, abs=1e-11)
    for name in ("weights", "adapter"):
        ours, theirs = (load_file(folder / f"{name}.safetensors") for folder in (one_rank, two_ranks))
        for key in ours:
            np.testing.assert_allclose(
                theirs[key], ours[key], atol=1e-6 if name == "weights" else 1e-10, err_msg=key
            )
    ours, theirs = (
        load_file(folder / "published/adapter_model.safetensors") for folder in (one_rank, two_ranks)
    )
    assert len(ours) == 2 * 2 * 7  # A and B, two layers, seven linear layers each
    for key in ours:
        np.testing.assert_allclose(theirs[key], ours[key], atol=1e-6, err_msg=key)
    with learner() as resumed:  # one rank goes on from the checkpoint of two
        resumed.load(str(two_ranks / "state"))
        ours = {name: tensor.numpy() for name, tensor in adapter(resumed).items()}
    for key, tensor in load_file(two_ranks / "adapter.safetensors").items():
        np.testing.assert_array_equal(ours[key], tensor)


if __name__ == "__main__":
    folder, port = sys.argv[1:]
    sys.exit(run_ranks((play, (rank, 2, int(port), Path(folder))) for rank in range(2)))
