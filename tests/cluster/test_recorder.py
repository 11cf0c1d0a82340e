"""The recorder writes what a step learned from, without anybody waiting, and says what it could not write."""

import threading

import pytest

from agentrl.cluster import recorder
from agentrl.cluster.recorder import Recorder
from agentrl.controller.recording import MAX_BEHIND, MAX_TRIES, WHAT, LocalRecording, RemoteRecording
from agentrl.data.attempt_files import remove_files
from agentrl.data.trajectories import decode, read_parquet
from agentrl.errors import InfrastructureError
from agentrl.tracking.unwritten import UnwrittenFiles
from agentrl.types import RewardEvent
from parts.trajectories import make_trajectory, stored

WAIT_S = 60.0  # a test that waits so long has failed


def attempts(number: int = 3):
    played = [make_trajectory([-1, 0, 0], member=m, reward=float(m)) for m in range(number)]
    return stored(*played)


@pytest.fixture
def slow(monkeypatch):
    """Files wait to be written until the event is set."""
    may_write, write = threading.Event(), recorder.write_attempts

    def waiting(*args):
        assert may_write.wait(WAIT_S)
        write(*args)

    monkeypatch.setattr(recorder, "write_attempts", waiting)
    yield may_write
    may_write.set()


def test_a_step_is_written_with_what_changed_since_it_was_played(tmp_path):
    writer, path = Recorder(), tmp_path / "trajectories" / "step_000001.parquet"
    facts = attempts()
    event = RewardEvent("batch", 5.0, 1)
    facts[1] = facts[1].replace(rewards=(*facts[1].rewards, event), metrics={"own": 2.0})
    writer.record(str(path), facts, {"step": 1, "learned_by": 4})
    assert writer.wait(WAIT_S)
    assert writer.news().written == (str(path),)
    batch = read_parquet(path)
    assert batch.column("learned_by").to_pylist() == [4] * 3
    assert [t.member for t in decode(batch)] == [0, 1, 2]
    assert decode(batch)[1].rewards[-1] == event
    assert decode(batch)[1].metrics == {"own": 2.0}
    assert writer.news().written == (), "what was told is told once"


@pytest.mark.parametrize("limit", [1, 4, 1000])
def test_a_large_step_is_written_in_parts(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(recorder, "MAX_BATCH_TOKENS", limit)
    writer, path = Recorder(), tmp_path / "step.parquet"
    writer.record(str(path), attempts(7), {"step": 1})
    assert writer.wait(WAIT_S)
    assert [t.member for t in decode(read_parquet(path))] == list(range(7))


def test_what_cannot_be_read_or_written_is_told_and_the_next_is_written(tmp_path):
    writer, facts = Recorder(), attempts()
    (tmp_path / "file").write_text("no folder")
    bad = str(tmp_path / "file" / "a.parquet")
    writer.record(bad, facts, {})
    assert writer.wait(WAIT_S)
    remove_files([facts[0].source.path])
    failed = dict(writer.news().failed)
    writer.record(str(tmp_path / "b.parquet"), facts, {})
    assert "Not a directory" in failed[bad] or "File exists" in failed[bad]
    assert writer.wait(WAIT_S)
    assert "cannot be read" in writer.news().failed[str(tmp_path / "b.parquet")]
    assert list(tmp_path.glob("b.parquet*")) == [], "no half of a file"
    writer.record(str(tmp_path / "c.parquet"), attempts(), {})
    assert writer.wait(WAIT_S)
    assert (tmp_path / "c.parquet").exists()


# --------------------------------------------------------------------------------------------- the controller


class Here:
    """An actor of this process."""

    def __init__(self) -> None:
        self.recorder, self.is_dead = Recorder(), False

    def run(self, method, *args):
        if self.is_dead:
            raise InfrastructureError("the recorder died")
        return getattr(self.recorder, method.__name__)(*args)


@pytest.fixture
def said():
    return []


def test_too_far_behind_steps_are_left_out_and_told(tmp_path, said, slow):
    unwritten = UnwrittenFiles(said.append)
    recording = RemoteRecording(Here(), unwritten, said.append)
    paths = [tmp_path / f"{step}.parquet" for step in range(MAX_BEHIND + 2)]
    for step, path in enumerate(paths[:-1]):
        recording.write(path, attempts(), step=step)
    assert unwritten.take_count() == 1
    assert said[0].startswith(f"{WHAT}: {paths[MAX_BEHIND]}: {MAX_BEHIND} earlier files still wait")
    slow.set()
    recording.wait()
    recording.write(paths[-1], attempts(), step=99)
    recording.finish()
    assert [path.exists() for path in paths] == [*[True] * MAX_BEHIND, False, True]


def test_what_a_disk_refuses_is_told_counted_and_tried_again_with_the_next_step(tmp_path, said, slow):
    unwritten = UnwrittenFiles(said.append)
    recording = RemoteRecording(Here(), unwritten, said.append)
    (tmp_path / "file").write_text("no folder")
    slow.set()
    recording.write(tmp_path / "file" / "1.parquet", attempts(), step=1)
    recording.wait()
    assert unwritten.take_count() == 1
    assert said[0].startswith(f"{WHAT}: ")
    assert "1.parquet" in said[0]
    assert recording.oldest_step == 1, "the buffer keeps its attempts"
    (tmp_path / "file").unlink()
    recording.write(tmp_path / "2.parquet", attempts(), step=2)
    recording.finish()
    assert said[1:] == [f"{WHAT}: written again"]
    assert unwritten.take_count() == 0
    assert (tmp_path / "file" / "1.parquet").exists()
    assert (tmp_path / "2.parquet").exists()


def test_what_can_never_be_written_holds_up_nothing_else(tmp_path, said, slow):
    recording = RemoteRecording(Here(), UnwrittenFiles(said.append), said.append)
    slow.set()
    gone = attempts()
    remove_files([gone[0].source.path])
    recording.write(tmp_path / "1.parquet", gone, step=1)
    for step in range(2, MAX_TRIES + 4):
        recording.wait()
        recording.write(tmp_path / f"{step}.parquet", attempts(), step=step)
    recording.finish()
    assert recording.oldest_step is None
    assert [step for step in range(1, MAX_TRIES + 4) if not (tmp_path / f"{step}.parquet").exists()] == [1]


class Stuck(Recorder):
    """A recorder that writes nothing before it dies."""

    def _run(self):
        pass


def test_what_a_recorder_had_to_write_when_it_died_is_written_by_the_next(tmp_path, said):
    unwritten, actor = UnwrittenFiles(said.append), Here()
    actor.recorder = Stuck()
    recording = RemoteRecording(actor, unwritten, said.append)
    recording.write(tmp_path / "1.parquet", attempts(), step=1)
    recording.write(tmp_path / "2.parquet", attempts(), step=2)
    actor.is_dead = True
    recording.write(tmp_path / "3.parquet", attempts(), step=3)
    assert unwritten.take_count() == 1
    assert recording.oldest_step == 1, "the buffer keeps its attempts"
    actor.is_dead, actor.recorder = False, Recorder()
    recording.wait()  # a checkpoint is not complete without them
    assert recording.oldest_step is None
    assert all((tmp_path / f"{step}.parquet").exists() for step in (1, 2, 3))
    assert said[1:] == ["the recorder died; it is given 2 files again", f"{WHAT}: written again"]


def test_a_file_with_which_each_recorder_dies_is_given_up_alone(tmp_path, said):
    unwritten, actor = UnwrittenFiles(said.append), Here()
    recording = RemoteRecording(actor, unwritten, said.append)
    for _ in range(MAX_TRIES + 1):
        actor.recorder = Stuck()
        if recording.oldest_step is None:
            recording.write(tmp_path / "1.parquet", attempts(), step=1)
        else:
            recording.write(tmp_path / "2.parquet", attempts(), step=2)
    assert recording.oldest_step == 2
    assert unwritten.take_count() == 1
    actor.recorder = Recorder()
    recording.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["2.parquet"]


def test_a_step_that_is_made_again_replaces_what_still_waits_to_be_written(tmp_path, said, slow):
    recording = RemoteRecording(Here(), UnwrittenFiles(said.append), said.append)
    path = tmp_path / "1.parquet"
    recording.write(path, attempts(3), step=1)
    recording.write(path, attempts(5), step=1)
    slow.set()
    recording.finish()
    assert read_parquet(path).num_rows == 5
    assert recording.oldest_step is None


def test_a_checkpoint_does_not_wait_for_a_disk_that_hangs(tmp_path, said, slow, monkeypatch):
    monkeypatch.setattr("agentrl.controller.recording.MAX_WAIT_S", 0.05)
    monkeypatch.setattr("agentrl.controller.recording.WAIT_S", 0.01)
    recording = RemoteRecording(Here(), UnwrittenFiles(said.append), said.append)
    recording.write(tmp_path / "1.parquet", attempts(), step=1)
    recording.wait()
    assert not (tmp_path / "1.parquet").exists()


def test_an_unexpected_error_is_told_with_its_kind(tmp_path, monkeypatch):
    def broken(*_):
        raise KeyError("column")

    monkeypatch.setattr(recorder, "write_attempts", broken)
    writer = Recorder()
    writer.record("a.parquet", [], {})
    assert writer.wait(WAIT_S)
    assert writer.news().failed == {"a.parquet": "KeyError: 'column'"}


def test_a_replay_writes_by_itself(tmp_path, said):
    unwritten = UnwrittenFiles(said.append)
    LocalRecording(unwritten).write(tmp_path / "a.parquet", attempts(2), step=3)
    LocalRecording(unwritten).finish()
    assert read_parquet(tmp_path / "a.parquet").column("step").to_pylist() == [3, 3]
    (tmp_path / "file").write_text("no folder")
    LocalRecording(unwritten).write(tmp_path / "file" / "a.parquet", attempts(2), step=3)
    assert unwritten.take_count() == 1
