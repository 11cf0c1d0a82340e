"""What ranks wrote is verified by the ranks, in slices, and the controller tells how far they are."""

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from agentrl.cluster.pools import Seat
from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller import verification
from agentrl.controller.checkpoint import find_checkpoint, read_checkpoint, save_checkpoint
from agentrl.controller.learner import start_learner
from agentrl.controller.roles import Roles
from agentrl.controller.saving import CheckpointWriter
from agentrl.controller.verification import VerificationProgress, verify_by_ranks, verify_here
from agentrl.data.checkpoint_files import (
    BLOCK_BYTES,
    BLOCKS,
    SHARD,
    Verification,
    read_manifest,
    stored_file,
)
from agentrl.errors import CheckpointError
from agentrl.learner.learner import LearnerSpec
from parts.local_ray import local_ray

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}
"""A rank's shard of weights and optimizer state is larger than a block."""


class Opened:
    """Paths that this process opens while `folder` is set. An audit hook cannot be removed."""

    def __init__(self):
        self.folder, self.paths = None, []
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if event == "open" and self.folder is not None and str(arguments[0]).startswith(str(self.folder)):
            self.paths.append(Path(arguments[0]))


OPENED = Opened()


@pytest.fixture(scope="module")
def ranks():
    spec = LearnerSpec(
        ModelConfig(),
        LearnerConfig(world_size=2, microbatch_tokens=4),
        AlgorithmConfig(),
        "decoupled",
        seed=0,
        temperature=1.0,
        total_updates=10,
        from_scratch=ModelFromScratchConfig(architecture="qwen2", sizes=SIZES),
    )
    with local_ray():
        group = start_learner(spec, [Seat()] * 2)
        yield group
        group.stop()


def test_ranks_hash_and_verify_and_the_controller_opens_no_file_of_theirs(ranks, tmp_path):
    writer = CheckpointWriter(tmp_path, TrainerConfig(save_in_background=False))
    OPENED.paths, OPENED.folder = [], tmp_path
    try:
        checkpoint = writer.save(Roles(ranks), step=5, version=6, buffer_state=b"buffer", metric=None)
        assert find_checkpoint(tmp_path, TrainerConfig()) == checkpoint
        for how in ("sample", "full"):
            verify_by_ranks(checkpoint, ranks, how, say=print)
        Roles(ranks).load(checkpoint.learner)
    finally:
        OPENED.folder = None
        writer.close()
    opened = {path.name.removesuffix(".tmp") for path in OPENED.paths if "learner" in path.parts}
    assert opened == {"learner", "huggingface"}, "only the folders, to sync them"
    assert {"buffer.bin", "manifest.json"} <= {path.name for path in OPENED.paths}

    found = {
        str(path.relative_to(checkpoint.folder)): (path.stat().st_size, sha256(path.read_bytes()).hexdigest())
        for path in checkpoint.folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert read_manifest(checkpoint.folder).files == found
    shards = [name for name in found if name.endswith(SHARD)]
    assert len(shards) == 2
    assert all(found[name][0] > BLOCK_BYTES and name + BLOCKS in found for name in shards)

    for name in found:
        if name == "buffer.bin":
            continue
        path = checkpoint.folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 128]))
        with pytest.raises(
            CheckpointError, match=rf"^checkpoint .*step_000005 is damaged: {name} was changed"
        ):
            verify_by_ranks(checkpoint, ranks, "full", say=print)
        path.write_bytes(whole)
    verify_by_ranks(checkpoint, ranks, "full", say=print)


class Rank:
    """One of as many ranks as `world_size`, all of which answer in this process."""

    def __init__(self, world_size):
        self.world_size, self.asked = world_size, []

    def find_damage(self, checkpoint, below, how, part, num_parts):
        folder = Path(checkpoint)
        self.asked.append((part, num_parts))
        reading = Verification(folder, read_manifest(folder), how, below)
        parts = range(part * self.world_size, (part + 1) * self.world_size)
        return [line for own in parts for line in reading.damage(own, num_parts * self.world_size)]


def save(parent, *, step=5, num_files=9, size=1000):
    def save_learner(folder):
        paths = [Path(folder) / f"__{index}_0{SHARD}" for index in range(num_files)]
        for index, path in enumerate(paths):
            path.write_bytes(bytes([index]) * size)
        return [stored_file(Path(folder), path) for path in paths]

    return save_checkpoint(
        parent, step=step, version=step, save_learner=save_learner, buffer_state=b"buffer", keep_last=9
    )


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_are_asked_for_slices_that_together_are_the_checkpoint(tmp_path, monkeypatch, world_size):
    checkpoint = save(tmp_path)
    monkeypatch.setattr(verification, "SLICE_BYTES", 4000)
    rank = Rank(world_size)
    verify_by_ranks(checkpoint, LocalWorker(rank), "full", say=print)
    assert rank.asked == [(0, 3), (1, 3), (2, 3)]
    for index in range(9):
        path = checkpoint.learner / f"__{index}_0{SHARD}"
        path.write_bytes(b"x" * 1000)
        with pytest.raises(CheckpointError, match=f"damaged: learner/{path.name} was changed$"):
            verify_by_ranks(checkpoint, LocalWorker(Rank(world_size)), "full", say=print)
        path.write_bytes(bytes([index]) * 1000)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_of_one_process_find_the_same(tmp_path, num_threads):
    checkpoint = save(tmp_path)
    verify_here(checkpoint, "full", num_threads=num_threads, say=print)
    (checkpoint.learner / f"__4_0{SHARD}").write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match=rf"damaged: learner/__4_0{SHARD} was changed$"):
        verify_here(checkpoint, "full", num_threads=num_threads, say=print)


def test_the_error_names_an_older_checkpoint_of_the_run_and_how_much_else_is_wrong(tmp_path):
    save(tmp_path, step=4)
    checkpoint = read_checkpoint(save(tmp_path).folder)
    for index in (2, 6):
        (checkpoint.learner / f"__{index}_0{SHARD}").write_bytes(b"x" * 1000)
    with pytest.raises(
        CheckpointError,
        match=rf"learner/__2_0{SHARD} was changed, and 1 more; trainer\.resume_mode=.*step_000004 is older$",
    ):
        verify_by_ranks(checkpoint, LocalWorker(Rank(2)), "full", say=print, parent=tmp_path)


def test_progress_is_told_every_ten_seconds_with_the_time_left():
    times = iter([0.0, 4.0, 12.0, 15.0, 24.0])
    lines = []
    progress = VerificationProgress("step_000020", 400 * 10**9, lines.append, clock=lambda: next(times))
    for reached in (50, 100, 150, 300):
        progress.reached(reached * 10**9)
    assert lines == [
        "verifying step_000020: 100.0 of 400.0 GB, 36 s left",
        "verifying step_000020: 300.0 of 400.0 GB, 8 s left",
    ]
