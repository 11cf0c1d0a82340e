"""Checkpoints are whole or absent, whatever happens while one is written; the newest and the best are
kept.
"""

import errno
import json
import resource
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster.workers import LocalWorker
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import find_checkpoint, put_aside, read_checkpoint, tidy
from agentrl.controller.roles import Roles
from agentrl.controller.saving import CheckpointWriter, metric_of
from agentrl.data.atomic_files import write_atomically
from agentrl.data.checkpoint_files import StoredFile, stored_file
from agentrl.errors import CheckpointError, ConfigError, LearnerError


class Writing:
    """A learner whose data take as long as the test wants."""

    def __init__(self, content: bytes = b"weights", error: Exception | None = None) -> None:
        self.content, self.error = content, error
        self.may_end = threading.Event()
        self.may_end.set()

    def start_save(self, folder: str) -> None:
        self.folder, self.copy = Path(folder), self.content

    def finish_save(self) -> list[StoredFile]:
        (self.folder / "half").write_bytes(b"x")
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error
        (self.folder / "shard_0").write_bytes(self.copy)
        return [stored_file(self.folder, self.folder / name) for name in ("half", "shard_0")]


def save(parent: Path, step: int, *, learner: Writing | None = None, metric: float | None = None, **trainer):
    writer = CheckpointWriter(parent, TrainerConfig(**trainer))
    try:
        start(writer, step, learner or Writing(), metric)
        writer.finish()
    finally:
        writer.close()
    return find_checkpoint(parent, TrainerConfig())


def start(writer, step, learner, metric=None):
    writer.save(
        Roles(LocalWorker(learner)), step=step, version=step + 1, buffer_state=b"buffer", metric=metric
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -------------------------------------------------------------------------------------------- whole or absent


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10, metric=0.25)
    found = find_checkpoint(tmp_path, TrainerConfig())
    assert (found.step, found.version, found.metric, found.buffer_state()) == (10, 11, 0.25, b"buffer")
    assert (found.learner / "shard_0").read_bytes() == b"weights"
    assert find_checkpoint(tmp_path, TrainerConfig(resume_mode="disable")) is None
    assert find_checkpoint(tmp_path, TrainerConfig(resume_mode=str(tmp_path / "step_000005"))).step == 5
    assert read_checkpoint(tmp_path / "step_000005").metric is None


def test_the_loop_goes_on_while_data_are_written_and_nothing_is_found_before_the_end(tmp_path):
    save(tmp_path, 5)
    learner = Writing(b"of step 10")
    learner.may_end.clear()
    writer = CheckpointWriter(tmp_path, TrainerConfig())
    start(writer, 10, learner)
    learner.content = b"later"  # the learner goes on; what was copied stays
    writer.check()
    assert find_checkpoint(tmp_path, TrainerConfig()).step == 5
    assert not list(tmp_path.glob("*/manifest.json")) or names(tmp_path)[-1] == "step_000005"
    learner.may_end.set()
    writer.finish()
    writer.close()
    assert (find_checkpoint(tmp_path, TrainerConfig()).learner / "shard_0").read_bytes() == b"of step 10"


def test_a_save_waits_for_the_one_before(tmp_path):
    first, second = Writing(b"1"), Writing(b"2")
    first.may_end.clear()
    writer = CheckpointWriter(tmp_path, TrainerConfig())
    start(writer, 1, first)
    thread = threading.Thread(target=start, args=(writer, 2, second))
    thread.start()
    assert not hasattr(second, "folder")
    first.may_end.set()
    thread.join(30)
    writer.finish()
    writer.close()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_without_background_a_save_is_complete_when_it_returns(tmp_path):
    writer = CheckpointWriter(tmp_path, TrainerConfig(save_in_background=False))
    start(writer, 1, Writing())
    assert names(tmp_path) == ["step_000001"]
    writer.close()


def test_what_fails_in_the_background_is_raised_at_the_next_look_and_leaves_nothing(tmp_path):
    save(tmp_path, 5)
    writer = CheckpointWriter(tmp_path, TrainerConfig())
    start(writer, 10, Writing(error=LearnerError("learner rank 1 was lost")))
    writer._executor.submit(lambda: None).result()  # the one thread has ended what came before
    with pytest.raises(LearnerError, match="rank 1 was lost"):
        writer.check()
    writer.check()  # told once
    writer.close()
    assert names(tmp_path) == ["step_000005"]


def test_a_full_disk_leaves_earlier_checkpoints_and_no_debris(tmp_path, monkeypatch):
    save(tmp_path, 5)

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        CheckpointError, match=r"step_000010.*No space left.*earlier checkpoints are unchanged"
    ):
        save(tmp_path, 10, keep_last=1)
    assert names(tmp_path) == ["step_000005"]


@pytest.mark.parametrize("room", [3, 100])
def test_a_disk_that_fills_up_at_any_point_leaves_the_checkpoint_before_and_the_next_is_whole(tmp_path, room):
    """The kernel refuses the buffer's state, or only the manifest."""
    save(tmp_path, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"^checkpoint step_000010 could not be written to .*: .*File too large"
        ):
            save(tmp_path, 10, keep_last=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step_000005"]
    assert save(tmp_path, 11).step == 11


def test_what_ranks_that_were_lost_start_again_from_is_the_newest_of_this_run_s_weights(tmp_path):
    """Not the newest of the folder: a run that goes on from an older one has not got to that."""
    older = save(tmp_path, 5)
    save(tmp_path, 10)
    writer = CheckpointWriter(tmp_path, TrainerConfig(), newest=older)
    assert writer.give_up() == older
    start(writer, 6, Writing())
    assert writer.give_up().step == 6, "what is being written is waited for"
    start(writer, 7, Writing(error=LearnerError("learner rank 1 was lost")))
    assert writer.give_up().step == 6
    assert CheckpointWriter(tmp_path, TrainerConfig()).give_up() is None, "a run that was to begin anew does"
    writer.close()
    assert names(tmp_path) == ["step_000005", "step_000006", "step_000010"]


def test_a_run_that_is_killed_while_writing_leaves_nothing_that_looks_whole(tmp_path):
    """The folders as `kill -9` leaves them: half written, and between the renames of a step that is written
    again.
    """
    save(tmp_path, 5)
    (tmp_path / ".partial_step_000010/learner").mkdir(parents=True)
    (tmp_path / ".partial_step_000010/manifest.json").write_text("{}")
    save(tmp_path, 7)
    (tmp_path / "step_000007").rename(tmp_path / ".replaced_step_000007")
    assert find_checkpoint(tmp_path, TrainerConfig()).step == 5
    tidy(tmp_path)
    assert names(tmp_path) == ["step_000005", "step_000007"]
    assert find_checkpoint(tmp_path, TrainerConfig()).step == 7


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    save(tmp_path, 5)
    torn = tmp_path / "step_000010"
    torn.mkdir()
    (torn / "buffer.bin").write_bytes(b"half")
    assert find_checkpoint(tmp_path, TrainerConfig()).step == 5
    with pytest.raises(ConfigError, match=r"step_000010' is not a checkpoint: it has no manifest\.json"):
        read_checkpoint(torn)


def test_a_damaged_checkpoint_is_named_with_an_older_one(tmp_path):
    save(tmp_path, 5)
    newest = save(tmp_path, 10)
    cure = r"; trainer\.resume_mode=.*step_000005 is older$"
    for name, content, damage in (
        ("learner/shard_0", b"weight", "has 6 bytes instead of 7"),
        ("learner/shard_0", b"weights and more", "has 16 bytes instead of 7"),
        ("learner/shard_0", None, "is missing"),
        ("buffer.bin", b"bUffer", "was changed"),
    ):
        path = newest.folder / name
        whole = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        line = f"is damaged: {name} {damage}"
        with pytest.raises(CheckpointError, match=line + cure):
            find_checkpoint(tmp_path, TrainerConfig())
        with pytest.raises(CheckpointError, match=f"{line}$"):
            read_checkpoint(newest.folder)
        path.write_bytes(whole)
    assert find_checkpoint(tmp_path, TrainerConfig()) == newest


def test_a_file_that_a_rank_wrote_elsewhere_is_told_at_the_save(tmp_path):
    """Its node does not share the folder."""

    class Elsewhere(Writing):
        def finish_save(self):
            return [*super().finish_save(), StoredFile("shard_1", 4, "0" * 64)]

    with pytest.raises(
        CheckpointError,
        match=r"step_000005 could not be written to .*: learner/shard_1 is missing, after a rank wrote it; "
        "checkpoints need a folder that all nodes share",
    ):
        save(tmp_path, 5, learner=Elsewhere())
    assert names(tmp_path) == []


def test_the_same_step_may_be_written_again(tmp_path):
    save(tmp_path, 5, learner=Writing(b"old"))
    save(tmp_path, 5, learner=Writing(b"new"))
    assert (find_checkpoint(tmp_path, TrainerConfig()).learner / "shard_0").read_bytes() == b"new"
    assert names(tmp_path) == ["step_000005"]


@settings(max_examples=20, deadline=None)
@given(
    before=st.sets(st.integers(1, 9), min_size=1),
    begins=st.integers(0, 9),
    after=st.integers(1, 9),
    keep_last=st.integers(1, 3),
)
def test_a_run_that_begins_before_the_newest_is_resumed_from_its_own_steps(
    tmp_path_factory, before, begins, after, keep_last
):
    """Whatever the folder had: once put aside, the newest is of the course that the run takes, and nothing is
    lost.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in before:
        save(folder, step, keep_last=9)
    kept = {step for step in before if begins in before and step <= begins}
    checkpoint = read_checkpoint(folder / f"step_{begins:06d}") if begins in before else None
    said = put_aside(folder, checkpoint)
    assert (said is None) == (kept == before)
    assert {c.name for c in folder.glob("before_*/step_*")} == {f"step_{step:06d}" for step in before - kept}
    newest = find_checkpoint(folder, TrainerConfig())
    assert (newest and newest.step) == (begins if kept else None)
    assert put_aside(folder, newest) is None
    if after > max(kept, default=0):
        assert save(folder, after, learner=Writing(b"own"), keep_last=keep_last).step == after
        assert (find_checkpoint(folder, TrainerConfig()).learner / "shard_0").read_bytes() == b"own"


def test_checkpoints_of_a_folder_are_put_aside_for_one_of_elsewhere(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    save(own, 5)
    assert "up to step_000005, were moved" in put_aside(own, save(other, 7))
    assert names(own) == ["before_000"]
    save(own, 3)
    written_otherwise = read_checkpoint(own / "before_000" / ".." / "step_000003")
    assert put_aside(own, written_otherwise) is None, "its own"
    put_aside(own, None)
    assert names(own) == ["before_000", "before_001"]


def test_a_wrong_resume_path_says_what_would_be_right(tmp_path):
    with pytest.raises(ConfigError, match="use auto, disable, or the folder of a checkpoint"):
        find_checkpoint(tmp_path, TrainerConfig(resume_mode=str(tmp_path)))


def test_manifest_lists_every_file(tmp_path):
    folder = save(tmp_path, 5).folder
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    assert listed == {"buffer.bin", "learner/half", "learner/shard_0"}


# -------------------------------------------------------------------------------------------- newest and best


@settings(max_examples=25, deadline=None)
@given(
    metrics=st.lists(st.none() | st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=1, max_size=7),
    keep_last=st.integers(1, 3),
    keep_best=st.integers(0, 3),
    mode=st.sampled_from(["max", "min"]),
)
def test_the_newest_and_the_best_are_kept_and_no_other(tmp_path_factory, metrics, keep_last, keep_best, mode):
    """After each save, what is there is the newest `keep_last` and the best `keep_best` of what was there
    before it.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    alive: dict[int, float | None] = {}
    for step, metric in enumerate(metrics, start=1):
        save(folder, step, metric=metric, keep_last=keep_last, keep_best=keep_best, best_mode=mode)
        alive[step] = metric
        ranked = sorted(
            (s for s in alive if alive[s] is not None),
            key=lambda s: (alive[s] if mode == "max" else -alive[s], s),
        )
        kept = {*sorted(alive)[-keep_last:], *(ranked[-keep_best:] if keep_best else ())}
        alive = {s: m for s, m in alive.items() if s in kept}
        assert names(folder) == [f"step_{s:06d}" for s in sorted(kept)]
    measured = [m for m in metrics if m is not None]
    if measured and keep_best:
        assert (max if mode == "max" else min)(measured) in alive.values(), "the best of all was lost"


def test_none_is_removed_before_the_next_is_whole(tmp_path):
    save(tmp_path, 5, keep_last=1)
    learner = Writing()
    learner.may_end.clear()
    writer = CheckpointWriter(tmp_path, TrainerConfig(keep_last=1))
    start(writer, 10, learner)
    assert (tmp_path / "step_000005/manifest.json").is_file()
    learner.may_end.set()
    writer.finish()
    writer.close()
    assert names(tmp_path) == ["step_000010"]


def test_a_metric_that_validation_does_not_have_is_told_with_those_it_has():
    trainer = TrainerConfig(keep_best=1, best_metric="val/acuracy")
    with pytest.raises(
        ConfigError,
        match=r"'val/acuracy' is not a validation metric; available: val/accuracy, val/reward_mean",
    ):
        metric_of({"val/reward_mean": 0.0, "val/accuracy": 0.5}, trainer)
    assert metric_of({"val/accuracy": 0.5}, TrainerConfig(keep_best=1, best_metric="val/accuracy")) == 0.5
    assert metric_of(None, trainer) is None


def test_keeping_the_best_needs_something_to_choose_by():
    trainer, data = {"keep_best": 1, "save_freq": 2, "test_freq": 2}, {"val_files": ["val.parquet"]}
    assert Config.model_validate({"trainer": trainer, "data": data}).trainer.keep_best == 1
    for incomplete in ({"trainer": trainer}, {"trainer": trainer | {"test_freq": -1}, "data": data}):
        with pytest.raises(ValueError, match="keep_best=1 needs checkpoints and validations"):
            Config.model_validate(incomplete)


def test_atomic_write_replaces_or_keeps(tmp_path):
    target = tmp_path / "a.yaml"
    write_atomically(target, "one")
    write_atomically(target, "two")
    assert target.read_text() == "two"
    assert list(tmp_path.iterdir()) == [target]
