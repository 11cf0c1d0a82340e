"""Checkpoints are data: what real ones hold is read, and nothing that somebody writes into one runs."""

import io
import pickle
import random
import shutil
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from agentrl.config.model import LoRAConfig
from agentrl.errors import CheckpointError
from agentrl.learner.stored_state import METADATA, PlainPlanner, PlainReader, read_metadata
from parts.learner import lone_learner
from parts.stored_checkpoint import Opening, sign, spec_of, write_base, write_checkpoint

KINDS = {"adamw": {}, "lora": {"lora": LoRAConfig(rank=2)}, "bfloat16": {"dtype": "bfloat16"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def checkpoints(base, tmp_path_factory):
    """One checkpoint of each kind, as a run writes them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind, changes in KINDS.items():
        write_checkpoint(base, folder / kind, **changes)
    return folder


@pytest.fixture
def checkpoint(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "adamw/step_000001", tmp_path / "step_000001")
    return tmp_path / "step_000001"


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


def test_metadata_that_run_a_command_are_refused_in_one_line(base, checkpoint, tmp_path):
    opened = tmp_path / "opened"
    (checkpoint / "learner" / METADATA).write_bytes(pickle.dumps(Opening(opened)))
    sign(checkpoint)
    with lone_learner(spec_of(base)) as learner, pytest.raises(CheckpointError) as caught:
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
        lone_learner(spec_of(base)) as one,
        pytest.raises(CheckpointError, match=r"param_groups\.0\.lr is damaged"),
    ):
        one.load(str(learner))
    assert not opened.exists()


def test_random_state_that_runs_a_command_is_refused(base, checkpoint, tmp_path):
    torch.save(Opening(tmp_path / "opened"), checkpoint / "learner/random_state_rank0.pt")
    with lone_learner(spec_of(base)) as one, pytest.raises(CheckpointError, match="could not be read"):
        one.load(str(checkpoint / "learner"))
    assert not (tmp_path / "opened").exists()


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
