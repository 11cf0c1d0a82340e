"""Files that a disk does not take: said once, counted, written later; real refusals of the kernel."""

import errno
import os
from types import SimpleNamespace

import pytest

from agentrl.config.rollout import RolloutConfig
from agentrl.controller import publish
from agentrl.controller.publish import Publishing
from agentrl.data.atomic_files import write_atomically
from agentrl.errors import DiskError
from agentrl.tracking.console import PlainConsole, QuietConsole
from agentrl.tracking.metrics import MetricsFile, StepRecord, read_metrics
from agentrl.tracking.tracker import Trackers
from agentrl.tracking.unwritten import AppendedFile, UnwrittenFiles, reason
from agentrl.weights.publish import PublishReport
from parts.full_disk import files_of_at_most


@pytest.mark.parametrize("room", [0, 1, 7, 25])
def test_no_line_is_lost_torn_or_out_of_order_however_little_room_there_was(tmp_path, room):
    file = AppendedFile(tmp_path / "lines")
    file.append(b"line 0\n")
    with files_of_at_most(7 + room):
        for number in (1, 2, 3, 4):
            with pytest.raises(OSError, match="too large"):
                file.append(f"line {number}\n".encode() * 5)
    file.append(b"line 5\n")
    expected = ["line 0", *(f"line {number}" for number in (1, 2, 3, 4) for _ in range(5)), "line 5"]
    assert (tmp_path / "lines").read_text().splitlines() == expected
    assert not file.has_pending


def test_a_metrics_file_catches_up_and_says_so_once(tmp_path):
    said: list[str] = []
    console = QuietConsole()
    console.say = said.append
    trackers = Trackers(MetricsFile(tmp_path / "metrics.jsonl"), console)
    trackers.log(StepRecord("train", 1, 1, 0.0))
    with files_of_at_most(0):
        for step in (2, 3, 4):
            trackers.log(StepRecord("train", step, step, 0.0))
    assert [line.partition(":")[0] for line in said] == ["metrics.jsonl"]
    assert "free some space there" in said[0]
    assert trackers.unwritten.take_count() == 3
    trackers.log(StepRecord("train", 5, 5, 0.0))
    assert said[1:] == ["metrics.jsonl: written again"]
    assert trackers.unwritten.take_count() == 0
    trackers.close()
    assert [record.step for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_records_that_wait_at_the_end_are_written_by_close(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with files_of_at_most(0), pytest.raises(Exception, match="free some space"):
        file.log(StepRecord("train", 1, 1, 0.0))
    file.close()
    assert [record.step for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_run_that_goes_back_has_each_step_once(tmp_path):
    trackers = Trackers(MetricsFile(tmp_path / "metrics.jsonl"), QuietConsole())
    for step in (1, 2, 3, 4):
        trackers.log(StepRecord("train", step, step, 0.0, {"rollout/a": 1.0}))
    trackers.go_back(2)
    assert [record.step for record in trackers.metrics.kept] == [1, 2]
    for step in (3, 4, 5):
        trackers.log(StepRecord("train", step, step, 0.0, {"rollout/a": 2.0}))
    trackers.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record.step, record.values["rollout/a"]) for record in records] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
    ]


@pytest.mark.parametrize("patience_s", [600.0, -1.0])
def test_weights_that_a_full_disk_refuses_hold_the_run_up_and_the_line_says_so(monkeypatch, patience_s):
    said: list[str] = []
    refusal = "the policy could not be written to v2: No space left on device"
    refusals = iter([DiskError(refusal)])

    def talk(urls, send):
        for error in refusals:
            raise error
        return PublishReport(version=2, seconds=0.0, num_bytes=0)

    monkeypatch.setattr(Publishing, "_open", lambda self, learner: SimpleNamespace(publish=lambda: None))
    monkeypatch.setattr(publish, "DISK_POLL_S", 0.0)
    publishing = Publishing(
        learner=None,
        rollout=RolloutConfig(),
        model_path="",
        newest_version=1,
        disk_patience_s=patience_s,
        run_dir=None,
        servers=SimpleNamespace(talk=talk),
        rollouts=None,
        observer=SimpleNamespace(unwritten=UnwrittenFiles(said.append)),
    )
    if patience_s < 0:
        with pytest.raises(DiskError, match=f"^{refusal}; free some space there$"):
            publishing._send_patiently([], must_verify=False)
    else:
        publishing._send_patiently([], must_verify=False)
        assert said == [
            f"weights: {refusal}; free some space there; the run waits, for at most "
            "buffer.disk_patience_s=600",
            "weights: written again",
        ]


def full_disk():
    return open("/dev/full", "w")


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("refusing", [full_disk, closed_pipe])
def test_a_console_whose_stream_refuses_ends_nothing(refusing):
    stream = refusing()
    console = PlainConsole(None, stream=stream)
    console.say("a line")
    console.close()
    with pytest.raises(OSError, match=r"space|pipe"):  # it did refuse, and still does
        stream.flush()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/a/b"),
            "No space left on device: /a/b; free some space there",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/a/b"),
            "Read-only file system: /a/b; make it writable",
        ),
        (DiskError("/a/b: No space left on device"), "/a/b: No space left on device; free some space there"),
        (OSError("odd"), "odd"),
    ],
)
def test_the_reason_says_what_would_help(error, text):
    assert reason(error) == text


def test_a_file_that_is_written_whole_keeps_its_old_content_on_a_full_disk(tmp_path):
    write_atomically(tmp_path / "a.json", "old")
    said: list[str] = []
    unwritten = UnwrittenFiles(said.append)
    with files_of_at_most(0):
        assert not unwritten.attempt("a.json", lambda: write_atomically(tmp_path / "a.json", "new"))
    assert (tmp_path / "a.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert unwritten.attempt("a.json", lambda: write_atomically(tmp_path / "a.json", "new"))
    assert len(said) == 2
