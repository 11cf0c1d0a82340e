"""An export from object storage into object storage."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

from agentrl.chat.tiny import build_tiny_tokenizer, write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.config.model import ModelConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.saving import CheckpointWriter
from agentrl.extras.storage.fetched import fetched_folder
from agentrl.extras.storage.storage import StoragePath
from agentrl.learner.packing import pack
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes

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


def same_weights(left, right):
    ours, theirs = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert list(ours) == list(theirs)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_export_from_storage_into_storage_is_the_same(base, tmp_path, s3):
    checkpoint, _ = checkpoint_of(ModelConfig(path=str(base)), tmp_path)
    place = StoragePath.of(f"{s3.url}/step_000002")
    for path in [path for path in checkpoint.rglob("*") if path.is_file()]:
        (place / str(path.relative_to(checkpoint))).upload(path)
    arguments = ["export", f"{s3.url}/step_000002", f"{s3.url}/out"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert same_weights(fetched_folder(f"{s3.url}/out"), tmp_path / "policy")
    assert "exists and is not empty" in str(CliRunner().invoke(app, arguments).exception)
    shard = next(name for name in place.files() if name.endswith(".distcp"))
    (place / shard).write(b"another")
    (place / "manifest.json").write((place / "manifest.json").read() + b" ")  # else the local copy is used
    assert f"{shard} is damaged" in str(CliRunner().invoke(app, [*arguments[:2], "out"]).exception)
    (place / "manifest.json").delete()
    assert "it has no manifest.json" in str(CliRunner().invoke(app, [*arguments[:2], "out"]).exception)
