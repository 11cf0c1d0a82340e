"""A model whose ranks read only their slices is the model that transformers loads whole, bit for bit.

The file is also the program that forks the ranks of each world: every rank compares what it gathered with the
model that transformers loads, and writes down what differs.
"""

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.learner import FSDPConfig, LearnerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.controller.learner import call_deadlines
from agentrl.errors import ConfigError
from agentrl.learner import sharding
from agentrl.learner.loading import outline
from agentrl.learner.model import build_policy
from agentrl.learner.packing import pack
from agentrl.learner.ranks import join_ranks, leave_ranks
from agentrl.learner.reward_model import RewardModel
from agentrl.learner.score_head import ScoreHead
from agentrl.learner.scoring import find_head_form
from agentrl.learner.stored_weights import SliceReader, StoredTensor
from parts.learner import learner_spec, lone_learner, random_samples, reserved_ports, tiny_sizes
from parts.ranks import run_program, run_ranks

TIMEOUT_S = 200.0
SEED = 11
SIZES = tiny_sizes(61, intermediate_size=46, pad_token_id=0, bos_token_id=1, eos_token_id=2)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
CONFIGS = {
    "tied": Qwen2Config(**SIZES),
    "untied": LlamaConfig(**{**SIZES, "tie_word_embeddings": False, "attention_bias": True}),
    "norms": Qwen3Config(**SIZES, head_dim=8),
    "computed": Gemma2Config(**SIZES, head_dim=8),  # a buffer besides those of the rotary embedding
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=5, head_dim=8),
    "buffers": DeepseekV3Config(  # one that is stored
        **SIZES,
        **EXPERTS,
        n_routed_experts=4,
        num_local_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "renamed": MixtralConfig(**SIZES, num_experts_per_tok=2, num_local_experts=4),
}
DENSE = ("tied", "untied", "norms")
WORLDS = {
    "two": {"world_size": 2},
    "matrices": {"world_size": 2, "tensor_parallel": 2},
}
SLOW_WORLDS = {
    "copies": {"world_size": 4, "fsdp": FSDPConfig(shard_size=2)},
    "tokens": {"world_size": 2, "sequence_parallel": 2},
    "both": {"world_size": 4, "tensor_parallel": 2},
}
LORA = LoRAConfig(rank=3, alpha=6.0)


def scenes(tensor_parallel):
    """Return {name: what to load and how} for each world."""
    found = {
        f"{kind} {stored} as {dtype}": {"path": f"{kind}_{stored}", "dtype": dtype}
        for kind in DENSE
        for stored, dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))
    }
    found |= {
        f"reference {dtype}": {"path": "tied_float32", "dtype": dtype, "has_backward": False}
        for dtype in ("float32", "bfloat16")
    }
    found |= {
        "critic": {"path": "untied_float32", "head": True},
        "critic of a classifier": {"path": "classifier", "head": True},
    }
    if tensor_parallel == 1:
        found |= {
            f"adapter {dtype}": {"path": "tied_float32", "dtype": dtype, "lora": LORA}
            for dtype in ("float32", "bfloat16")
        }
        found["adapter below a new head"] = {"path": "tied_bfloat16", "lora": LORA, "head": True}
    return found


def compare(models, learner, place, *, path, dtype="float32", lora=None, head=False, has_backward=True):
    """Load as the learner does; return the names of what differs from the whole model of transformers."""
    model = ModelConfig(path=str(models / path), dtype=dtype, lora=lora or LoRAConfig())
    torch.manual_seed(SEED)
    policy = build_policy(
        model,
        learner,
        place,
        from_scratch=None,
        has_backward=has_backward,
        master_dtype=torch.float32,
        score_head=ScoreHead(None) if head else None,
    )
    is_frozen = lora is not None or not has_backward
    return differences(
        policy.module, whole(model, getattr(torch, dtype) if is_frozen else torch.float32, head)
    )


def whole(model, dtype, head):
    """Return what every rank used to load: the whole model with its adapter and head."""
    torch.manual_seed(SEED)
    kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    options = {"num_labels": 1} if head else {}
    expected = kind.from_pretrained(model.path, dtype=dtype, attn_implementation="eager", **options)
    if model.lora.rank:
        config = LoraConfig(
            r=model.lora.rank,
            lora_alpha=model.lora.alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            exclude_modules=["score"] if head else None,
        )
        inject_adapter_in_model(config, expected, "default")
        for name, weight in expected.named_parameters():
            if ".lora_" in name:
                weight.data = weight.data.float()
    if head:
        expected.score.to(torch.float32)
    return expected


def differences(module, expected):
    found = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    wanted = dict(expected.named_parameters(remove_duplicate=False)) | dict(
        expected.named_buffers(remove_duplicate=False)
    )
    differ = sorted(set(dict(found)) ^ set(wanted))
    for name, tensor in found:
        whole, right = sharding.gather(tensor), wanted.get(name)
        if right is None or whole.dtype != right.dtype or not torch.equal(whole, right.detach()):
            differ.append(name)
    ties = len({id(t) for _, t in found}), len({id(t) for t in wanted.values()})
    return differ + ([f"{ties[0]} tensors instead of {ties[1]}"] if ties[0] != ties[1] else [])


def play(rank, world, ports, models, folder):
    """Load every scene on one rank; each rank writes what differs."""
    options = {"collective_timeout_s": TIMEOUT_S} | (WORLDS | SLOW_WORLDS)[world]
    learner = LearnerConfig(**options)
    place = join_ranks(learner, rank=rank, address="127.0.0.1", port=ports[0], on="cpu")
    found = {
        name: compare(models, learner, place, **scene)
        for name, scene in scenes(learner.tensor_parallel).items()
    }
    if learner.num_replicas == 1:
        for name in ("experts", "renamed", "computed", "buffers"):
            found[name] = compare_outline(models / f"{name}_bfloat16", learner, place)
        found["reads"] = reads_too_much(models / "untied_float32", learner, place)
    leave_ranks()
    if world == "two":
        found["reward model"] = compare_reward_model(models / "classifier", rank, ports[1])
    (folder / f"{world}_{rank}.json").write_text(json.dumps(found))


def compare_outline(path, learner, place):
    """Architectures that the learner refuses for other reasons, or in other dtypes."""
    found = outlined(path, torch.bfloat16)
    sharding.shard(found.module, place.mesh, learner, compute_dtype=None, has_backward=False)
    assert found.sources, "it was loaded whole"
    found.fill(place.device)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    return differences(found.module, expected)


def reads_too_much(path, learner, place):
    """Return the bytes that a rank reads beyond those of its own slices, as the kernel counts them."""
    found = outlined(path, torch.bfloat16)
    sharding.shard(found.module, place.mesh, learner, compute_dtype=None, has_backward=False)
    own = sum(sharding.own_part(p)[0].numel() for p in found.module.parameters())
    before = bytes_read()
    found.fill(place.device)
    too_much = bytes_read() - before - 4 * own
    return [] if too_much < 2000 else [f"{too_much} bytes beyond the {4 * own} of its slices"]


def bytes_read():
    # Reading the counter also counts: about a hundred bytes.
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def compare_reward_model(path, rank, port):
    config = RewardModelConfig(
        model=ModelConfig(path=str(path), dtype="bfloat16"), world_size=2, collective_timeout_s=TIMEOUT_S
    )
    model = RewardModel(config, "cpu", rank=rank, address="127.0.0.1", port=port)
    try:
        expected = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16)
        return differences(model._model.module, expected)
    finally:
        model.close()


def outlined(path, dtype=torch.float32, kind=AutoModelForCausalLM, **options):
    return outline(kind, ModelConfig(path=str(path)), attention="eager", dtype=dtype, **options)


# ----------------------------------------------------------------------------------------------------- worlds


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models with all of their weights at random, norms and biases, too, in files of 20 kB."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        for dtype in ("float32", "bfloat16"):
            write(AutoModelForCausalLM.from_config(config), folder / f"{name}_{dtype}", dtype)
    classifier = Qwen2Config(**SIZES, num_labels=1)
    write(AutoModelForSequenceClassification.from_config(classifier), folder / "classifier", "float32")
    return folder


def write(model, folder, dtype):
    torch.manual_seed(len(folder.name))
    with torch.no_grad():
        for values in model.state_dict().values():
            values.add_(torch.randn_like(values) * 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")


@pytest.fixture(scope="module")
def worlds(models, tmp_path_factory):
    """Return a function from worlds to their folder; each of them is played when one is asked for."""
    folder, played = tmp_path_factory.mktemp("worlds"), set()

    def folder_of(group):
        if not group.keys() <= played:
            run_program(__file__, models, folder, *group, timeout_s=TIMEOUT_S)
            played.update(group)
        return folder

    return folder_of


@pytest.mark.parametrize(
    "world", [*WORLDS, *(pytest.param(world, marks=pytest.mark.slow) for world in SLOW_WORLDS)]
)
def test_what_ranks_read_is_what_transformers_loads(worlds, world):
    group = WORLDS if world in WORLDS else SLOW_WORLDS
    folder = worlds(group)
    for rank in range(group[world]["world_size"]):
        found = json.loads((folder / f"{world}_{rank}.json").read_text())
        assert len(found) >= 13
        assert {name: differ for name, differ in found.items() if differ} == {}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_process_loads_what_transformers_loads(models, name, dtype):
    for stored in ("float32", "bfloat16"):
        path = models / f"{name}_{stored}"
        found = outlined(path, dtype)
        assert found.sources, "it was loaded whole"
        assert all(weight.is_meta for weight in found.module.parameters())
        found.fill(torch.device("cpu"))
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        assert differences(found.module, expected) == []
        assert found.module.config.to_dict() == expected.config.to_dict()
        assert found.module.generation_config.to_dict() == expected.generation_config.to_dict()
        assert not found.module.training


class WithBuffer(Qwen2ForCausalLM):
    """Computes a buffer only where it is built, as models with their own code do."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.again = self.model.layers[0].mlp

    @classmethod
    def from_config(cls, config, *, trust_remote_code, **options):
        return cls._from_config(config, **options)


def test_buffers_and_shared_modules_of_own_code_are_kept(models):
    found = outlined(models / "tied_float32", kind=WithBuffer)
    found.fill(torch.device("cpu"))
    assert found.module.table.tolist() == [0, 1, 2, 3]
    assert found.module.again.up_proj.weight is found.module.model.layers[0].mlp.up_proj.weight
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3"),
    *("granite", "glm4", "cohere", "cohere2", "starcoder2", "gpt_neox", "gpt2", "qwen3_5_text"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"),
)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_of_transformers_are_read_in_slices(tmp_path, name, is_tied):
    """Those that docs/cluster.md names; also the form of the head is found without weights."""
    experts = {**EXPERTS, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
    config = CONFIG_MAPPING[name](**{**SIZES, "head_dim": 8, "tie_word_embeddings": is_tied}, **experts)
    write(AutoModelForCausalLM.from_config(config), tmp_path, "bfloat16")
    for dtype in (torch.float32, torch.bfloat16):
        found = outlined(tmp_path, dtype)
        assert found.sources, "it was loaded whole"
        form = find_head_form(found.module)
        found.fill(torch.device("cpu"))
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
        assert differences(found.module, expected) == []
        assert form == find_head_form(expected)


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 5), (3, 4, 3, 5)])
def test_any_slice_is_read(tmp_path, shape, monkeypatch):
    """With chunks smaller than a row, of a row, and of all rows."""
    values = torch.randn(shape, dtype=torch.float64)
    save_file({"x": values}, tmp_path / "x.safetensors")
    begin = 8 + struct.unpack("<Q", (tmp_path / "x.safetensors").read_bytes()[:8])[0]
    stored = StoredTensor(tmp_path / "x.safetensors", begin, shape, torch.float64)
    for chunk in (8, 24, 88, 10**4):
        monkeypatch.setattr("agentrl.learner.stored_weights.CHUNK_BYTES", chunk)
        with SliceReader() as reader:
            for seed in range(20):
                generator = torch.Generator().manual_seed(seed)
                start = [int(torch.randint(size, (), generator=generator)) for size in shape]
                size = [
                    int(torch.randint(1, full - first + 1, (), generator=generator))
                    for full, first in zip(shape, start, strict=True)
                ]
                out = torch.empty(size, dtype=torch.float32)
                reader.read(stored, shape, start, out)
                box = tuple(slice(first, first + own) for first, own in zip(start, size, strict=True))
                assert torch.equal(out, values[box].float())


def test_a_frozen_reference_in_bfloat16_computes_what_float32_weights_compute(models):
    """The forward rounds weights to `model.dtype` in either case, so half of the memory is enough."""
    spec = learner_spec(
        ModelConfig(path=str(models / "untied_float32"), dtype="bfloat16"),
        algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.1)),
    )
    with lone_learner(spec) as learner:
        assert {p.dtype for p in learner._policy.module.parameters()} == {torch.float32}
        assert {p.dtype for p in learner._reference.module.parameters()} == {torch.bfloat16}
        assert_equal_to_the_reference(learner)


def test_the_reference_of_a_new_model_is_drawn_like_the_policy():
    spec = learner_spec(
        ModelConfig(dtype="bfloat16"),
        sizes=SIZES,
        master_dtype=torch.float32,
        algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.1)),
    )
    with lone_learner(spec) as learner:
        assert_equal_to_the_reference(learner)


def assert_equal_to_the_reference(learner):
    [shard] = pack(random_samples(7, 61), max_tokens=30, world_size=1)
    for policy, reference in learner.logprobs(shard):
        assert len(policy) > 0
        assert np.array_equal(policy, reference)


def test_the_time_to_start_grows_with_the_bytes_to_read(tmp_path):
    model = ModelConfig(path=str(tmp_path))
    config = LearnerConfig(world_size=8, collective_timeout_s=300.0)
    assert call_deadlines(config, model).start_s == 600.0
    for part in range(2):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(10**10)  # takes no room on the disk
    found = call_deadlines(config, model)
    assert found.start_s == 600.0 + 200.0  # at 100 MB/s
    assert found.deadline_s(0) == 600.0
    assert found.start_limit == "learner.collective_timeout_s=300, and 200 s to read the model"
    copies = config.model_copy(update={"fsdp": FSDPConfig(shard_size=2)})
    assert call_deadlines(copies, model, has_reference=True).start_s == 600.0 + 200.0 * 4 * 2
    assert call_deadlines(config, ModelConfig()).start_s == 600.0


# ----------------------------------------------------------------------------------------------- tied weights


def change(models, name, folder, edit):
    """Write a copy of a model in one file, with the tensors that `edit` changes in place."""
    tensors = {}
    for file in sorted((models / name).glob("*.safetensors")):
        tensors |= load_file(file)
    edit(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for other in ("config.json", "generation_config.json"):
        if (models / name / other).is_file():
            (folder / other).write_bytes((models / name / other).read_bytes())
    return folder


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("edit", "is_tied"),
    [
        (lambda t: t.update({HEAD: t[EMBEDDING].clone()}), True),
        (lambda t: t.update({HEAD: t.pop(EMBEDDING)}), True),
        (lambda t: t.update({HEAD: t[EMBEDDING] + 1}), False),
        # Differs only by what the dtype of the model does not hold.
        (lambda t: t.update({HEAD: t[EMBEDDING].double() + 1e-13}), True),
    ],
    ids=["twice", "only the head", "different", "rounded"],
)
def test_a_tied_weight_may_be_stored_under_either_name_or_both(models, tmp_path, edit, is_tied):
    folder = change(models, "tied_float32", tmp_path, edit)
    found = outlined(folder)
    found.fill(torch.device("cpu"))
    assert (found.module.lm_head.weight is found.module.model.embed_tokens.weight) == is_tied
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert differences(found.module, expected) == []


# -------------------------------------------------------------------------------------------------- bad input


def refused(folder, **options):
    with pytest.raises(ConfigError) as caught:
        outlined(folder, **options).fill(torch.device("cpu"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_surplus_and_of_another_shape_is_listed_at_once(models, tmp_path):
    def edit(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["v_head.weight"] = torch.zeros(1)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 47)

    assert refused(change(models, "tied_float32", tmp_path, edit)) == (
        f"model.path={str(tmp_path)!r} does not fit its config.json (Qwen2ForCausalLM): it lacks 2 weights "
        "('model.layers.1.mlp.up_proj.weight', 'model.norm.weight'); it has 1 weight ('v_head.weight') that "
        "the model does not have; it has wrong shapes: model.layers.0.mlp.down_proj.weight [32, 47] instead "
        "of [32, 46]; use the folder of a complete model"
    )


def test_a_long_list_is_cut(models, tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if ".0." in name]:
            del tensors[name]

    assert "lacks 12 weights ('model.layers.0." in refused(change(models, "tied_float32", tmp_path, edit))
    assert "and 4 more)" in refused(tmp_path)


def test_a_lost_expert_is_a_wrong_shape(models, tmp_path):
    def edit(tensors):
        del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]

    message = refused(change(models, "experts_float32", tmp_path, edit))
    assert "model.layers.1.mlp.experts.down_proj [4, 32, 20] instead of [5, 32, 20]" in message


def test_what_no_model_needs_may_be_there(models, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    assert outlined(change(models, "untied_float32", tmp_path, edit)).sources
    # A head over the vocabulary below a score; but not the other way round, and nothing else.
    options = {"kind": AutoModelForSequenceClassification, "num_labels": 1}
    assert outlined(tmp_path, new_head="score", **options).sources
    assert "(LlamaForSequenceClassification): it lacks 1 weight ('score.weight'); use" in refused(
        tmp_path, **options
    )
    assert "has 1 weight ('score.weight') that" in refused(models / "classifier")


@pytest.mark.parametrize("left", [4, 60, -1])
def test_a_cut_file_is_named(models, tmp_path, left):
    for file in (models / "untied_float32").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = sorted(tmp_path.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:left])
    message = refused(tmp_path)
    assert message.startswith(f"{file} is cut")
    assert message.endswith("copy it again")


def test_a_file_that_is_cut_while_it_is_read_is_named(models, tmp_path):
    for file in (models / "untied_float32").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    found = outlined(tmp_path)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"^{file} was cut while it was read; copy it again$"):
        found.fill(torch.device("cpu"))


def header(text):
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"{"), "is damaged: its header cannot be read"),
        (header(b"[]"), "is damaged: its header cannot be read"),
        (header(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}') + bytes(4), "is damaged"),
        (
            header(b'{"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}') + bytes(1),
            "dtype F4; known: BOOL",
        ),
        (header(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}'), "is damaged"),
    ],
)
def test_a_damaged_header_is_refused(models, tmp_path, data, message):
    change(models, "tied_float32", tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert message in refused(tmp_path)


def test_an_index_is_complete_and_stays_in_its_folder(models, tmp_path):
    for file in (models / "tied_float32").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    files = sorted(tmp_path.glob("*.safetensors"))
    first = files[0]
    first.unlink()
    assert f"lacks 1 of the {len(files)} files that {index.name} names: {first.name}" in refused(tmp_path)
    index.write_text(text.replace(first.name, f"../{first.name}"))
    assert "which is not a file of its folder" in refused(tmp_path)
    index.write_text("{")
    assert f"{index} cannot be read" in refused(tmp_path)


# ---------------------------------------------------------------------------------------- without safetensors


def test_a_folder_of_pickles_is_loaded_whole_and_runs_nothing(models, tmp_path):
    name = "tied_float32"
    change(models, name, tmp_path, lambda tensors: None)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    found = outlined(tmp_path)
    assert not found.sources
    found.fill(torch.device("cpu"))
    expected = AutoModelForCausalLM.from_pretrained(models / name, attn_implementation="eager")
    assert differences(found.module, expected.float()) == []
    torch.save({"model.norm.weight": Bomb(str(tmp_path / "exploded"))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported"):
        outlined(tmp_path)
    assert not (tmp_path / "exploded").exists()


class Bomb:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


def main(models, folder, *worlds):
    failed = 0
    for world in worlds:
        ports = reserved_ports(2)
        size = (WORLDS | SLOW_WORLDS)[world]["world_size"]
        failed += run_ranks((play, (rank, world, ports, Path(models), Path(folder))) for rank in range(size))
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
