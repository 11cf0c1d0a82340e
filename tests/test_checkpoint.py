"""Checkpoints are whole or absent, whatever happens while one is written."""

import errno
import json
from pathlib import Path

import pytest

from agentrl.config.schema import TrainerConfig
from agentrl.controller.checkpoint import find_checkpoint, save_checkpoint
from agentrl.controller.run_dir import write_atomically
from agentrl.errors import CheckpointError, ConfigError


def save(parent: Path, step: int, *, keep_last: int = 3, content: bytes = b"weights"):
    def save_learner(folder: str) -> None:
        (Path(folder) / "shard_0").write_bytes(content)

    return save_checkpoint(parent, step=step, version=step + 1, save_learner=save_learner, buffer_state=b"buffer", keep_last=keep_last)


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10)
    found = find_checkpoint(tmp_path, TrainerConfig())
    assert (found.step, found.version, found.buffer_state()) == (10, 11, b"buffer")
    assert (found.learner / "shard_0").read_bytes() == b"weights"
    assert find_checkpoint(tmp_path, TrainerConfig(resume_mode="disable")) is None
    assert find_checkpoint(tmp_path, TrainerConfig(resume_mode=str(tmp_path / "step_000005"))).step == 5


def test_a_full_disk_leaves_earlier_checkpoints_and_no_debris(tmp_path):
    save(tmp_path, 5)

    def full(folder: str) -> None:
        (Path(folder) / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 10.*No space left.*earlier ones are untouched"):
        save_checkpoint(tmp_path, step=10, version=11, save_learner=full, buffer_state=b"", keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000005"]
    assert find_checkpoint(tmp_path, TrainerConfig()).step == 5


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    save(tmp_path, 5)
    torn = tmp_path / "step_000010"
    torn.mkdir()
    (torn / "buffer.bin").write_bytes(b"half")
    assert find_checkpoint(tmp_path, TrainerConfig()).step == 5


def test_a_damaged_checkpoint_is_named_with_an_older_one(tmp_path):
    save(tmp_path, 5)
    newest = save(tmp_path, 10)
    (newest.learner / "shard_0").write_bytes(b"wEights")
    with pytest.raises(CheckpointError, match=r"learner/shard_0 is missing or changed; trainer.resume_mode=.*step_000005"):
        find_checkpoint(tmp_path, TrainerConfig())


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]


def test_the_same_step_may_be_written_again(tmp_path):
    save(tmp_path, 5, content=b"old")
    save(tmp_path, 5, content=b"new")
    assert (find_checkpoint(tmp_path, TrainerConfig()).learner / "shard_0").read_bytes() == b"new"


def test_a_wrong_resume_path_says_what_would_be_right(tmp_path):
    with pytest.raises(ConfigError, match="neither auto nor disable nor a checkpoint"):
        find_checkpoint(tmp_path, TrainerConfig(resume_mode=str(tmp_path)))


def test_manifest_lists_every_file(tmp_path):
    folder = save(tmp_path, 5).folder
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    assert listed == {"buffer.bin", "learner/shard_0"}


def test_atomic_write_replaces_or_keeps(tmp_path):
    target = tmp_path / "a.yaml"
    write_atomically(target, "one")
    write_atomically(target, "two")
    assert target.read_text() == "two"
    assert list(tmp_path.iterdir()) == [target]
