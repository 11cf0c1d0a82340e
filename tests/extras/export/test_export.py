"""`agentrl export`: what transformers loads from the folder computes what the learner computed when it
saved.
"""

import json
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import trio
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from typer.testing import CliRunner

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import build_tiny_tokenizer, write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import save_checkpoint
from agentrl.controller.saving import CheckpointWriter
from agentrl.errors import CheckpointError, ConfigError, InfrastructureError
from agentrl.extras.export.export import export_checkpoint
from agentrl.http.client import HttpClient
from agentrl.learner import weights
from agentrl.learner.batch import Sample
from agentrl.learner.learner import LearnerSpec
from agentrl.learner.packing import pack
from agentrl.learner.score_head import ScoreHead
from agentrl.servers.client import SGLangClient
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams, TensorSpec
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes
from sglang_cpu.server import sglang_on_cpu

VOCABULARY = build_tiny_tokenizer().get_vocab_size(with_added_tokens=True)
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model as one has it before a run: weights, tokenizer, chat template."""
    folder = tmp_path_factory.mktemp("base")
    write_tiny_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    model.generation_config.eos_token_id = [3, 5]
    model.save_pretrained(folder)
    return folder


@contextmanager
def learner(model):
    with lone_learner(learner_spec(model, temperature=1.0)) as one:
        yield one


def microbatches():
    return pack(random_samples(3, VOCABULARY), max_tokens=1000, world_size=1)[0]


def checkpoint_of(model, folder):
    """Train a little, save as a run does; return the checkpoint, the learner's log-probabilities and its own
    export.
    """
    with learner(model) as one:
        for _ in range(2):
            one.update(one.score(microbatches()))
        writer = CheckpointWriter(folder / "checkpoints", TrainerConfig())
        writer.save(one, step=2, version=2, buffer_state=b"", metric=None)
        [scored] = one.score(microbatches())
        one.export(str(folder / "policy"))
        one.update([scored])  # what comes after the copy is not in it
        writer.finish()
        writer.close()
    return folder / "checkpoints/step_000002", scored.proximal_logprobs


def logprobs_of(model):
    [microbatch] = microbatches()
    start, rows = 0, []
    for length in microbatch.segment_lengths:
        with torch.no_grad():
            rows.append(model(torch.tensor(microbatch.token_ids[None, start : start + length])).logits[0])
        start += length
    logprobs = torch.log_softmax(torch.cat(rows).float(), -1)
    return logprobs[torch.tensor(microbatch.predictor_positions), torch.tensor(microbatch.targets)].numpy()


def same_weights(left, right):
    ours, theirs = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert list(ours) == list(theirs)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


# ------------------------------------------------------------------------------------------------ all weights


def test_an_exported_checkpoint_computes_the_same(base, tmp_path):
    checkpoint, expected = checkpoint_of(ModelConfig(path=str(base)), tmp_path)
    done = CliRunner().invoke(app, ["export", str(checkpoint), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    np.testing.assert_allclose(logprobs_of(loaded), expected, atol=1e-5)
    assert same_weights(tmp_path / "out", tmp_path / "policy")
    assert loaded.generation_config.eos_token_id == [3, 5]
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]


def test_it_brings_its_tokenizer_and_needs_nothing_but_the_checkpoint(base, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in base.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "own.jinja"
    template.write_text((base / "chat_template.jinja").read_text() + "{# mine #}")
    checkpoint, _ = checkpoint_of(ModelConfig(path=str(source), chat_template=str(template)), tmp_path)
    for file in [*source.iterdir(), template]:
        file.unlink()
    export_checkpoint(checkpoint, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template.endswith("{# mine #}")
    assert tokenizer("Compute 12")["input_ids"] == Chat.load(str(tmp_path / "out")).encode("Compute 12")


def test_bfloat16_is_exported_as_published(base, tmp_path):
    checkpoint, _ = checkpoint_of(ModelConfig(path=str(base), dtype="bfloat16"), tmp_path)
    export_checkpoint(checkpoint, tmp_path / "out")
    assert same_weights(tmp_path / "out", tmp_path / "policy")
    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}


def test_large_models_are_cut_into_files_with_an_index(base, tmp_path):
    with learner(ModelConfig(path=str(base))) as one:
        weights.export(
            one._policy, one.place, ModelConfig(path=str(base)), tmp_path / "out", max_file_bytes=20_000
        )
        expected = one.checksums()
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(
        4 * t.numel() for f in files for t in load_file(tmp_path / "out" / f).values()
    )
    loaded, plain = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", base))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_no_file_is_larger_than_it_may_be_unless_one_tensor_is():
    specs = [TensorSpec(f"t{i}", "float32", (1,), size) for i, size in enumerate((4, 4, 9, 2, 3, 3))]
    plan = weights.plan_files(specs, max_bytes=8)
    assert list(plan.values()) == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"]]
    assert weights.plan_files(specs, max_bytes=100) == {"model.safetensors": [s.name for s in specs]}


def test_a_folder_that_cannot_be_written_is_told_after_the_collectives(base, tmp_path):
    (tmp_path / "file").write_text("")
    with learner(ModelConfig(path=str(base))) as one:
        with pytest.raises(InfrastructureError, match="could not be written"):
            one.export(str(tmp_path / "file" / "policy"))
        assert one.checksums()  # the rank goes on


# ------------------------------------------------------------------------------------------------------- LoRA


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    checkpoint, expected = checkpoint_of(
        ModelConfig(path=str(base), lora=LoRAConfig(rank=3, alpha=6.0)), folder
    )
    return checkpoint, expected, folder


def test_an_adapter_is_exported_merged(adapted, tmp_path):
    checkpoint, expected, folder = adapted
    export_checkpoint(checkpoint, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    np.testing.assert_allclose(logprobs_of(loaded), expected, atol=1e-5)
    assert same_weights(tmp_path / "out", folder / "policy")


def test_an_adapter_alone_is_loaded_by_peft(adapted, base, tmp_path):
    checkpoint, expected, _ = adapted
    export_checkpoint(checkpoint, tmp_path / "out", adapter_only=True)
    assert not (tmp_path / "out/model.safetensors").exists()
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    np.testing.assert_allclose(
        logprobs_of(PeftModel.from_pretrained(plain, tmp_path / "out").eval()), expected, atol=1e-5
    )


def test_a_base_that_has_moved_is_named(base, adapted, tmp_path):
    checkpoint, _, folder = adapted
    moved = base.with_name("moved")
    base.rename(moved)
    try:
        with pytest.raises(ConfigError, match=r"model\.path=.* cannot be loaded"):
            export_checkpoint(checkpoint, tmp_path / "out")
        export_checkpoint(checkpoint, tmp_path / "out", base=str(moved))
    finally:
        moved.rename(base)
    assert same_weights(tmp_path / "out", folder / "policy")


# ---------------------------------------------------------------------------------------------- a real server

PROMPT = [5, 17, 42, 99, 7]


@pytest.mark.sglang
@pytest.mark.parametrize("lora", [LoRAConfig(), LoRAConfig(rank=3, alpha=6.0)], ids=["full", "merged"])
def test_a_real_server_computes_with_an_export_what_the_learner_computed(base, tmp_path, lora):
    checkpoint, expected = checkpoint_of(ModelConfig(path=str(base), lora=lora), tmp_path)
    export_checkpoint(checkpoint, tmp_path / "out")
    server = Supervisor(
        sglang_on_cpu(), log_file=tmp_path / "server.log", start_timeout_s=240, max_restarts=0
    )
    try:
        url = server.start(str(tmp_path / "out"), "2")
        scored, sampled = trio.run(scored_and_sampled_by, url)
    finally:
        server.stop()
    np.testing.assert_allclose(scored, expected, atol=1e-4)
    assert set(sampled.versions) == {2}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = torch.tensor([*PROMPT, *sampled.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(loaded(ids[None]).logits[0], -1)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(
        sampled.logprobs, logprobs.gather(1, ids[len(PROMPT) :, None])[:, 0], atol=1e-4
    )


async def scored_and_sampled_by(url):
    """Return the server's log-probabilities of the microbatch's targets, and a generation of its own."""
    [microbatch] = microbatches()
    sequences = np.split(microbatch.token_ids, np.cumsum(microbatch.segment_lengths)[:-1])
    body = {
        "input_ids": [sequence.tolist() for sequence in sequences],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with HttpClient(url) as http:
        replies = (await http.request("POST", "/generate", json=body)).json()
    of_tokens = [triple[0] for reply in replies for triple in reply["meta_info"]["input_token_logprobs"]]
    client = SGLangClient(url)
    sampled = await client.generate(PROMPT, SamplingParams(40), rid="sampled")
    await client.aclose()
    return np.array([of_tokens[position + 1] for position in microbatch.predictor_positions]), sampled


# ---------------------------------------------------------------------------------------------- reward models


@pytest.mark.parametrize("rank", [0, 2])
def test_a_reward_model_is_exported_with_its_head(base, tmp_path, rank):
    model = ModelConfig(path=str(base), lora=LoRAConfig(rank=rank))
    pairs = [
        Sample.pair(index, np.arange(4, 9, dtype=np.int32), np.arange(5, 11, dtype=np.int32))
        for index in range(3)
    ]
    [packed] = pack(pairs, max_tokens=1000, world_size=1)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2))
    spec = LearnerSpec(model, config, AlgorithmConfig(), "on_policy", 3, 1.0, 10, score_head=ScoreHead(1))
    with lone_learner(spec) as one:
        one.supervised_update(packed)
        save = partial(
            save_checkpoint, tmp_path / "checkpoints", step=1, version=1, buffer_state=b"", keep_last=1
        )
        checkpoint = save(save_learner=one.save).folder
        one.export(str(tmp_path / "policy"))
    export_checkpoint(checkpoint, tmp_path / "out")
    assert same_weights(tmp_path / "out", tmp_path / "policy")
    assert "score.weight" in load_file(tmp_path / "out/model.safetensors")
    described, theirs = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "policy")
    )
    assert described == theirs
    if rank:
        with pytest.raises(
            ConfigError, match="whose head is trained together with the adapter; export it without --adapter"
        ):
            export_checkpoint(checkpoint, tmp_path / "adapter", adapter_only=True)


# --------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_one_line(base, adapted, tmp_path):
    checkpoint, _, _ = adapted
    with pytest.raises(ConfigError, match=r"is not a checkpoint: it has no manifest\.json"):
        export_checkpoint(base, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_checkpoint(checkpoint, base)
    full, _ = checkpoint_of(ModelConfig(path=str(base)), tmp_path)
    with pytest.raises(ConfigError, match="has no LoRA adapter"):
        export_checkpoint(full, tmp_path / "out", adapter_only=True)
    shard = next((full / "learner").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"is damaged: learner/.*distcp was changed$"):
        export_checkpoint(full, tmp_path / "out")
    assert not (tmp_path / "out").exists()
