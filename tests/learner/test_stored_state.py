"""Checkpoints are data: what real ones hold is read, and nothing that somebody writes into one runs."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from typer.testing import CliRunner

from agentrl.chat.tiny import build_tiny_tokenizer, write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.saving import CheckpointWriter
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.learner import LearnerSpec
from agentrl.learner.stored_state import METADATA, PlainPlanner, PlainReader, read_metadata
from parts.learner import learner_spec, lone_learner, update_once, write_tiny_model

VOCABULARY = build_tiny_tokenizer().get_vocab_size(with_added_tokens=True)
KINDS = {"adamw": {}, "lora": {"lora": LoRAConfig(rank=2)}, "bfloat16": {"dtype": "bfloat16"}}


class Opening:
    """A pickle of it makes a folder where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_tiny_tokenizer(folder)
    write_tiny_model(folder, VOCABULARY)
    return folder


def spec(base: Path, **changes) -> LearnerSpec:
    return learner_spec(ModelConfig(path=str(base), **changes), learner=LearnerConfig(), temperature=1.0)


@pytest.fixture(scope="module")
def checkpoints(base, tmp_path_factory):
    """One checkpoint of each kind, as a run writes them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind, changes in KINDS.items():
        with lone_learner(spec(base, **changes)) as learner:
            update_once(learner, VOCABULARY)
            writer = CheckpointWriter(folder / kind, TrainerConfig())
            writer.save(learner, step=1, version=1, buffer_state=b"", metric=None)
            writer.finish()
            writer.close()
    return folder


@pytest.fixture
def checkpoint(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "adamw/step_000001", tmp_path / "step_000001")
    return tmp_path / "step_000001"


def sign(checkpoint: Path) -> None:
    """Write the hashes of the files as they are, as somebody does who changes them on purpose."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    del manifest["checksum"]  # whoever writes such a file needs none
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def export(checkpoint: Path, *options: str):
    return CliRunner().invoke(app, ["export", str(checkpoint), str(checkpoint.parent / "out"), *options])


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_real_checkpoints_are_those_that_pickle_reads(checkpoints, kind):
    learner = checkpoints / kind / "step_000001/learner"
    with (learner / METADATA).open("rb") as file:
        expected = pickle.load(file)
    found = read_metadata(learner)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data
    assert str(found.storage_meta.checkpoint_id) == str(expected.storage_meta.checkpoint_id)


@pytest.mark.parametrize("how", ["export", "resume"])
def test_metadata_that_run_a_command_are_refused_in_one_line(base, checkpoint, tmp_path, how):
    opened = tmp_path / "opened"
    (checkpoint / "learner" / METADATA).write_bytes(pickle.dumps(Opening(opened)))
    sign(checkpoint)
    if how == "export":
        error = export(checkpoint).exception
        assert isinstance(error, CheckpointError)
        said = str(error)
    else:
        with lone_learner(spec(base)) as learner, pytest.raises(CheckpointError) as caught:
            learner.load(str(checkpoint / "learner"))
        said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert "it refers to posix.mkdir, which does not belong in a checkpoint" in said
    assert not opened.exists()


def test_a_plain_value_that_runs_a_command_is_refused(base, checkpoint, tmp_path):
    """The optimizer's numbers are objects of their own in the file of a rank; DCP reads them by a plain
    torch.load.
    """
    opened, learner = tmp_path / "opened", checkpoint / "learner"
    found = read_metadata(learner)
    index = MetadataIndex("optimizer.param_groups.0.lr")
    buffer = io.BytesIO()
    torch.save(Opening(opened), buffer)
    (learner / "evil.distcp").write_bytes(buffer.getvalue())
    found.storage_data[index] = _StorageInfo("evil.distcp", 0, len(buffer.getvalue()))
    (learner / METADATA).write_bytes(pickle.dumps(found))
    with (
        lone_learner(spec(base)) as one,
        pytest.raises(CheckpointError, match=r"param_groups\.0\.lr is damaged"),
    ):
        one.load(str(learner))
    assert not opened.exists()


def test_random_state_that_runs_a_command_is_refused(base, checkpoint, tmp_path):
    torch.save(Opening(tmp_path / "opened"), checkpoint / "learner/random_state_rank0.pt")
    with lone_learner(spec(base)) as one, pytest.raises(CheckpointError, match="could not be read"):
        one.load(str(checkpoint / "learner"))
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("change", [{"trust_remote_code": True}, {"external_lib": "opened.py"}])
def test_code_that_a_checkpoint_names_runs_only_where_the_user_says_so(
    checkpoint, tmp_path, monkeypatch, change
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opened.py").write_text("import os\nos.mkdir('opened')\n")
    file = checkpoint / "learner/model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    sign(checkpoint)
    error = export(checkpoint).exception
    assert isinstance(error, ConfigError)
    [key] = change
    assert f"model.{key}" in str(error)
    assert "--trust-remote-code" in str(error)
    assert not (tmp_path / "opened").exists()
    done = export(checkpoint, "--trust-remote-code")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "opened").exists() == ("external_lib" in change)


BROKEN_FILES = {
    "manifest.json": ["", "[]", "{}", '{"format": 2}', "[" * 100_000, '{"format": 1}'],
    "learner/model.json": ["", "[]", '{"dtype": 1}'],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BROKEN_FILES.items() for text in texts]
)
def test_a_broken_file_of_a_checkpoint_is_told_in_one_line(checkpoint, name, text):
    (checkpoint / name).write_text(text)
    if name != "manifest.json":
        sign(checkpoint)
    error = export(checkpoint).exception
    assert isinstance(error, CheckpointError)
    assert "\n" not in str(error)


def changed(change) -> bytes:
    found = Metadata({}, storage_data={})
    change(found)
    return pickle.dumps(found)


REFUSED = {
    "another object": lambda: pickle.dumps([1]),
    "a file elsewhere": lambda: changed(
        lambda found: found.storage_data.update({MetadataIndex("a"): _StorageInfo("../../a", 0, 1)})
    ),
    "an absolute path": lambda: changed(
        lambda found: found.storage_data.update({MetadataIndex("a"): _StorageInfo("/etc/a", 0, 1)})
    ),
    "no places": lambda: changed(lambda found: setattr(found, "storage_data", None)),
    "a foreign entry": lambda: changed(lambda found: found.state_dict_metadata.update(a=1)),
    "an attribute of torch": lambda: b"ctorch\nload\n.",
    "an attribute of a class": lambda: b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n.",
    "a class that is changed": lambda: (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x07versionK\x01stb."
    ),
    "a function that is changed": lambda: b"\x80\x02ctorch.serialization\n_get_layout\n}\x8c\x01aK\x01sb.",
    "nothing": lambda: b"",
    "text": lambda: b"no pickle",
    "a length beyond memory": lambda: b"\x80\x04\x8e" + b"\xff" * 7 + b"\x3f.",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_metadata_is_refused(tmp_path, kind):
    (tmp_path / METADATA).write_bytes(REFUSED[kind]())
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_metadata(tmp_path)
    assert Metadata({}).version is None


def test_missing_metadata_are_told_once(tmp_path):
    with pytest.raises(CheckpointException, match=r"\.metadata cannot be read: No such file") as caught:
        dcp.load(
            {"a": torch.zeros(1)}, storage_reader=PlainReader(tmp_path), planner=PlainPlanner(), no_dist=True
        )
    assert "rank local" not in str(caught.value)


def test_reading_metadata_with_a_changed_byte_ends_with_metadata_or_with_our_error(checkpoints, tmp_path):
    data = (checkpoints / "adamw/step_000001/learner" / METADATA).read_bytes()
    rng = random.Random(7)
    for _ in range(300):
        place = rng.randrange(len(data))
        (tmp_path / METADATA).write_bytes(data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :])
        with suppress(CheckpointError):
            assert isinstance(read_metadata(tmp_path), Metadata)
