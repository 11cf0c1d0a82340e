"""A run is copied to object storage while it runs: complete or absent, resumed after any interruption, owned
by one run folder at a time.
"""

import json
import shutil
import tempfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.audit import audit
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.journal import FILE as JOURNAL
from agentrl.buffer.journal import Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.records import Records
from agentrl.config.opponents import OpponentConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import complete_checkpoints, find_checkpoint, prune, save_checkpoint
from agentrl.controller.run_dir import RunDir
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.checkpoint_files import stored_file
from agentrl.errors import ConfigError, StorageError
from agentrl.extras.opponents.refresh import OpponentRefresh, needed_snapshots
from agentrl.extras.storage.command import disk, fetch
from agentrl.extras.storage.storage import StoragePath
from agentrl.extras.storage.upload import RunUpload
from agentrl.extras.storage.uploaded import INDEX, VERSIONS_SKIPPED, claim_upload, fetch_run, read_upload
from parts.trajectories import Rows, make_trajectory, play
from parts.trajectories import stored as attempts

STRIDE = 8
"""Of so many places where an upload can end, one is tried; they are alike, and each costs three uploads."""
LEASED = Event(EventKind.LEASED, 0, "actor")


class RunFolder:
    """A run without processes: it writes what a run writes."""

    def __init__(self, root: Path, url: str, **trainer) -> None:
        self.root = root
        self.trainer = TrainerConfig(run_dir=str(root), upload_to=url, **trainer)
        self.place = StoragePath.of(url)
        self.dir = RunDir.open(self.trainer, "trainer: {}\n")
        self.said: list[str] = []

    def claim(self, **options) -> RunUpload:
        index = claim_upload(self.place, self.dir, self.trainer, say=self.said.append)
        return RunUpload(self.place, index, self.dir, interval_s=0.01, say=self.said.append, **options)

    def step(self, number: int, *, keep_last: int = 2, content: str = "") -> None:
        """Make a step: versions, trajectories, metrics, journal, checkpoint."""
        self.dir.journal_version(self.dir.next_version(), step=number, what="policy")
        (self.root / "trajectories").mkdir(exist_ok=True)
        (self.root / f"trajectories/step_{number:06d}.parquet").write_text(f"played {number}")
        with (self.root / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": number}) + "\n")
        journal = Journal(self.root / JOURNAL)
        [attempt] = attempts(make_trajectory([-1, 0], group_id=number), folder=self.root / "attempts")
        journal.append([replace(LEASED, group_id=number)], {(number, "actor", 0): attempt.to_json()})
        if number > 2:  # the run lets go of old attempts
            data = journal.attempts(number - 2, "actor")[0]
            gone = AttemptFacts.from_json(data, self.root / "attempts")
            journal.forget([number - 2])
            Path(gone.source.path).unlink()
        journal.close()
        self.save(number, keep_last=keep_last, content=content)

    def save(self, number: int, *, keep_last: int = 2, content: str = "", pinned=()) -> None:
        def write(folder: str):
            files = [Path(folder) / name for name in ("shard_0.distcp", "model.json")]
            for file in files:
                file.write_text(f"{file.name} of {number} {content}")
            return [stored_file(Path(folder), file) for file in files]

        save_checkpoint(
            self.dir.checkpoints,
            step=number,
            version=number - 1,
            save_learner=write,
            buffer_state=b"buffer",
            keep_last=99,
        )
        prune(self.dir.checkpoints, TrainerConfig(keep_last=keep_last), pinned=pinned)

    def files(self, *, below: str = "") -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted((self.root / below).rglob("*"))
            if path.is_file()
        }

    def attempts(self) -> list[int]:
        """Load every stored attempt; return the group of each."""
        with Records.open(self.root / JOURNAL) as records:
            stored = [
                AttemptFacts.from_json(records.data_of(one), self.root / "attempts")
                for one in records.stored()
            ]
        return sorted(one.load().group_id for one in stored)

    def events(self) -> list[Event]:
        journal = Journal(self.root / JOURNAL)
        try:
            return list(journal.events())
        finally:
            journal.close()

    def newest(self) -> int:
        return find_checkpoint(self.dir.checkpoints, self.trainer).step


def stored(run: RunFolder, folder: str) -> set[str]:
    """Return the names in a folder of the storage, without their hashes."""
    names = {name.split("/")[1] for name in run.place.files() if name.startswith(f"{folder}/")}
    return {name.rpartition("_")[0] for name in names}


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/storage/run"


@pytest.fixture(params=("s3", "file"))
def any_url(request, s3, url):
    return f"{s3.url}/run" if request.param == "s3" else url


# -------------------------------------------------------------------------------------------- there and back


def test_another_folder_continues_where_the_upload_ends(any_url, tmp_path):
    first = RunFolder(tmp_path / "first", any_url)
    upload = first.claim()
    for step in (1, 2, 3):
        first.step(step)
    upload.send()
    first.step(4)  # never uploaded
    checkpoint = {n: b for n, b in first.files(below="checkpoints").items() if "000003" in n}
    shutil.rmtree(first.root)

    second = RunFolder(tmp_path / "second", any_url)
    second.claim()
    assert second.newest() == 3
    assert second.files(below="checkpoints") == checkpoint
    assert [event.group_id for event in second.events()] == [1, 2, 3]
    assert second.attempts() == [2, 3]
    assert [json.loads(line)["step"] for line in second.files()["metrics.jsonl"].splitlines()] == [1, 2, 3]
    assert second.dir.next_version() == 2 + VERSIONS_SKIPPED + 1, "version 3 was published and is lost"
    assert "trajectories/step_000001.parquet" not in second.files(), "they stay in storage"
    assert [line.split(" (")[0] for line in second.said] == ["fetching step_000003"]
    assert not (second.root / ".fetching").exists()


class Policy:
    """A learner that exports its step."""

    def __init__(self) -> None:
        self.step = 0

    def run(self, method, folder) -> None:
        Path(folder).mkdir(parents=True)
        for name in ("model.safetensors", "config.json"):
            (Path(folder) / name).write_text(f"{name} of {self.step}")


class Frozen:
    """Servers of opponents that read what they get."""

    def __init__(self) -> None:
        self.read = {}

    def replace(self, key, snapshot, **_) -> None:
        self.read[key] = (
            None if snapshot is None else (Path(snapshot.folder) / "model.safetensors").read_text()
        )


@settings(max_examples=25)
@given(
    intervals=st.dictionaries(st.sampled_from(["past", "older"]), st.integers(1, 5), min_size=1),
    saves=st.lists(st.booleans(), min_size=1, max_size=9),
    sends=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_opponents_are_on_another_machine_who_they_were(intervals, saves, sends):
    """saves, sends: whether a step ends with a checkpoint, and whether the upload looks then."""
    opponents = {name: OpponentConfig(refresh_steps=every) for name, every in intervals.items()}
    with tempfile.TemporaryDirectory() as place:
        url = f"file://{place}/storage/run"

        def refresh_of(run: RunFolder) -> tuple[OpponentRefresh, Frozen]:
            frozen = Frozen()
            refresh = OpponentRefresh(
                opponents,
                frozen,
                folder=run.root / "opponents",
                published=run.dir.published(),
                checkpoints=lambda: [one.step for one in complete_checkpoints(run.dir.checkpoints)],
                timeout_s=1.0,
                say=run.said.append,
            )
            return refresh, frozen

        first, policy = RunFolder(Path(place) / "first", url), Policy()
        upload = first.claim(snapshots=partial(needed_snapshots, opponents, first.root / "opponents"))
        refresh, frozen = refresh_of(first)
        sent, had = 0, {}
        for step, (saved, is_sent) in enumerate(zip(saves, sends, strict=False), start=1):
            policy.step = step
            refresh.refresh(policy, step=step, version=step)
            if saved:
                first.save(step)
                had[step] = {
                    name: f"model.safetensors of {last}" if (last := step - step % every) else None
                    for name, every in intervals.items()
                }
            if is_sent:
                upload.send()
                sent = max(had, default=0)
        if not sent:
            return
        there = {name for name in first.place.files() if name.startswith("opponents/")}
        kept = {last for every in intervals.values() if (last := sent - sent % every)}
        assert {int(name.split("_")[1]) for name in there} == kept, "what no checkpoint needs is removed"
        shutil.rmtree(first.root)

        second = RunFolder(Path(place) / "second", url)
        second.claim()
        refresh, frozen = refresh_of(second)
        refresh.restore(policy, step=sent, version=2000)
        has = {name: frozen.read.get(f"agent.opponents.{name}") for name in intervals}
        assert has == had[sent]
        assert not any("is not in" in line for line in second.said)


def test_a_buffer_resumes_from_the_upload_with_every_group_accounted_for(url, tmp_path):
    """The replay buffer of a run that was lost after its second checkpoint: no group is trained on twice."""
    rules = LedgerRules(groups_per_step=2, max_staleness=1, group_size=2)

    def opened(run: RunFolder) -> ReplayBuffer:
        journal = Journal(run.root / JOURNAL)
        journal.set_fact("max_staleness", str(rules.max_staleness))
        return ReplayBuffer(Rows(), rules, run.root / "attempts", journal=journal)

    def step(run: RunFolder, buffer: ReplayBuffer, number: int) -> set[int]:
        """Play and ship all leases, learn from a batch, publish; return the batch."""
        for lease in buffer.lease("actor", 4, 0.0):
            buffer.add("actor", attempts(*(play(lease, m) for m in (0, 1)), folder=run.root / "attempts"))
        taken = buffer.take(2, 1.0, number)
        assert [t.load().group_id for t in taken] == [t.group_id for t in taken], "its attempts are there"
        buffer.advance(run.dir.next_version(), number)
        run.dir.journal_version(run.dir.next_version(), step=number, what="policy")
        return {t.group_id for t in taken}

    run = RunFolder(tmp_path / "run", url)
    upload = run.claim()
    run.dir.journal_version(0, step=0, what="policy")
    buffer = opened(run)
    buffer.advance(0, 0)
    learned = []
    for number in (1, 2):
        learned.append(step(run, buffer, number))
        run.save(number)
        upload.send()
        buffer.settle(number)
    step(run, buffer, 3)  # lost
    shutil.rmtree(run.root)

    other = RunFolder(tmp_path / "other", url)
    other.claim()
    buffer = opened(other)
    buffer.resume(other.newest(), None)
    version = other.dir.next_version()
    buffer.advance(version, 2)
    other.dir.journal_version(version, step=2, what="policy")
    learned += [step(other, buffer, number) for number in (3, 4)]
    groups = [group for batch in learned for group in batch]
    assert len(groups) == len(set(groups)) == 8
    assert buffer.counts().is_balanced
    buffer.close()
    with Records.open(other.root / JOURNAL) as records:
        audited = audit(records.events(), max_staleness=1)
    assert audited.is_balanced, audited.problems
    assert audited.num_taken >= 8


def test_the_rest_is_uploaded_at_the_end_and_fetched_as_it_was(url, tmp_path, capsys):
    run = RunFolder(tmp_path / "run", url)
    with run.claim():
        for step in (1, 2, 3):
            run.step(step)
        run.save(4)
        (run.root / "policy").mkdir()
        (run.root / "policy/model.safetensors").write_text("weights")
        journal = Journal(run.root / JOURNAL)
        journal.append([replace(LEASED, group_id=99)])  # after the last checkpoint
        journal.close()
    copy = tmp_path / "copy"
    fetch(url, copy)
    ours = run.files()
    theirs = {str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    missing = {name for name in set(ours) - set(theirs) if not name.startswith(JOURNAL)}
    assert missing == {".lock", "upload.json"}
    assert {name: data for name, data in theirs.items() if not name.startswith(JOURNAL)} == {
        name: ours[name] for name in theirs if not name.startswith(JOURNAL)
    }
    run.root = copy
    assert [event.group_id for event in run.events()] == [1, 2, 3, 99]
    capsys.readouterr()
    disk(str(tmp_path / "run"))
    disk(url)
    told = capsys.readouterr().out
    assert told.startswith("uploaded: step 4, by ")
    assert f"\n{run.place}: step 4, by " in told
    sizes = [line.split() for line in told.splitlines()]
    assert [words[0] for words in sizes].count("trajectories") == 2


def test_what_the_run_removes_is_removed_and_a_repeated_step_replaces(url, tmp_path):
    run = RunFolder(tmp_path / "run", url)
    upload = run.claim()
    for step in (1, 2, 3):
        run.step(step)
        upload.send()
    assert stored(run, "checkpoints") == {"step_000002", "step_000003"}
    assert stored(run, "journal") == {"step_000003"}
    assert sum(name.startswith("attempts/") for name in run.place.files()) == 2, "the others are removed"
    # A rank was lost: step 3 is made again, with the same sizes.
    for content in ("x", "y"):
        run.save(3, content=content)
        upload.send()
    assert stored(run, "checkpoints") == {"step_000002", "step_000003"}
    shutil.rmtree(run.root)
    second = RunFolder(tmp_path / "second", url)
    second.claim()
    assert b"of 3 y" in second.files()["checkpoints/step_000003/learner/shard_0.distcp"]


# --------------------------------------------------------------------------------------------- interruptions


def test_a_checkpoint_is_complete_or_absent_wherever_an_upload_ends(s3, tmp_path):
    """After every number of accepted requests, a new folder gets the old checkpoint or the new one, verified,
    with its journal.
    """
    found = []
    for accepted in range(0, 60, STRIDE):
        url = f"{s3.url}/run_{accepted}"
        run = RunFolder(tmp_path / f"run_{accepted}", url)
        upload = run.claim()
        run.step(1)
        upload.send()
        run.step(2)
        with s3.failing(writes=accepted) as faults:
            try:
                upload.send()
                is_whole = True
            except StorageError:
                is_whole = False
        other = RunFolder(tmp_path / f"other_{accepted}", url)
        other.claim()
        step = other.newest()
        assert [event.group_id for event in other.events()] == list(range(1, step + 1))
        assert other.attempts() == list(range(1, step + 1))
        assert other.dir.next_version() > run.dir.next_version()
        with pytest.raises(StorageError, match="was taken over"):
            upload.send()
        found.append(step)
        if is_whole:
            assert faults.writes >= 0
            break
    assert found == sorted(found), "once the new checkpoint is there, it stays"
    assert {1, 2} == set(found)
    assert len(found) > 2, "there are not so few places to stop"


def test_an_interrupted_upload_continues_with_what_is_missing(s3, tmp_path):
    run = RunFolder(tmp_path / "run", f"{s3.url}/run")
    upload = run.claim()
    run.step(1)
    (run.place / "checkpoints/step_000000_aaaa/half").write(b"of a checkpoint that is gone")
    with s3.failing(forbidden="model.json"), pytest.raises(StorageError, match="access is denied"):
        upload.send()
    assert read_upload(run.place).step is None
    with s3.failing() as faults:
        run.claim().send()  # a new process
    sent = [request.rpartition("/")[2] for request in faults.requests if request.startswith("PUT")]
    assert "model.json" in sent
    assert "shard_0.distcp" not in sent
    assert "step_000001.parquet" not in sent
    assert stored(run, "checkpoints") == {"step_000001"}
    assert read_upload(run.place).step == 1


def test_the_newest_goes_first_and_stays_while_it_is_sent(s3, tmp_path):
    run = RunFolder(tmp_path / "run", f"{s3.url}/run")
    upload = run.claim()
    run.step(1)
    upload.send()
    run.step(2)
    with s3.failing(held=threading.Event(), only="shard_0.distcp") as faults:
        thread = threading.Thread(target=upload.send)
        thread.start()
        assert faults.waiting.wait(30)
        for number in (3, 4, 5):
            run.save(number, keep_last=1, pinned=upload.pinned())
        assert [c.step for c in complete_checkpoints(run.dir.checkpoints)] == [2, 5]
        assert upload.metrics() == {"upload/checkpoints_behind": 2.0}
        faults.held.set()
        thread.join()
    assert read_upload(run.place).step == 5
    assert upload.metrics() == {"upload/checkpoints_behind": 0.0}
    assert upload.pinned() == []
    assert not any("step_000003" in name or "step_000004" in name for name in run.place.files())


def test_storage_that_is_down_is_told_once_and_the_run_goes_on(s3, tmp_path):
    run = RunFolder(tmp_path / "run", f"{s3.url}/run")
    upload = run.claim()
    with upload:
        with s3.failing(forbidden="/run/") as faults:
            run.step(1)
            while sum(request.startswith("PUT") for request in faults.requests) < 3:
                assert faults.arrived.wait(30)
                faults.arrived.clear()
    assert sorted(line.split(";")[0] for line in run.said) == [
        f"upload: {run.place}/config.yaml cannot be written: access is denied",
        "upload: written again",
        f"uploading the rest to {run.place}",
    ]
    assert read_upload(run.place).step == 1


def test_a_checkpoint_that_was_changed_on_disk_is_not_uploaded(url, tmp_path):
    run = RunFolder(tmp_path / "run", url)
    upload = run.claim()
    run.step(1)
    (run.root / "checkpoints/step_000001/learner/shard_0.distcp").write_text("shard_0.distcp of 2 ")
    with pytest.raises(StorageError, match=r"shard_0\.distcp was changed since it was written"):
        upload.send()
    assert read_upload(run.place).step is None
    assert f"played {1}" == (run.place / "trajectories/step_000001.parquet").read().decode()


def test_a_damaged_upload_is_refused(url, tmp_path):
    run = RunFolder(tmp_path / "run", url)
    upload = run.claim()
    run.step(1)
    upload.send()
    [shard] = [name for name in run.place.files() if name.endswith("shard_0.distcp")]
    (run.place / shard).write(b"shard_0.distcp of 2 ")
    for attempt in (1, 2):  # and the folder that failed to get it is still empty
        other = RunFolder(tmp_path / f"other_{attempt % 1}", url)
        with pytest.raises(StorageError, match=r"shard_0\.distcp is damaged"):
            other.claim()
        other.dir.close()
    with pytest.raises(StorageError, match=r"shard_0\.distcp is damaged"):
        fetch_run(url, tmp_path / "copy", say=print)
    assert not (tmp_path / "copy").exists()


# ------------------------------------------------------------------------------------------------- bad input


def test_an_upload_of_another_folder_is_never_overwritten(url, tmp_path):
    run = RunFolder(tmp_path / "run", url)
    upload = run.claim()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        RunFolder(tmp_path / "early", url).claim()
    run.step(1)
    upload.send()
    own = RunFolder(tmp_path / "own", url)
    own.step(1)
    with pytest.raises(ConfigError, match="has a run of its own; choose another"):
        own.claim()
    with pytest.raises(ConfigError, match="resume_mode='disable' would not continue it"):
        RunFolder(tmp_path / "fresh", url, resume_mode="disable").claim()
    upload.send()  # none of them took it over
    before = run.place.files()
    run.dir.close()
    again = RunFolder(tmp_path / "run", url)
    again.claim().send()
    assert set(again.place.files()) == set(before)


def test_what_is_no_upload_is_told(url, tmp_path):
    with pytest.raises(ConfigError, match="contains no uploaded run"):
        fetch(url, tmp_path / "copy")
    with pytest.raises(ConfigError, match="contains no uploaded run"):
        disk(url)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        disk(str(tmp_path))
    place = StoragePath.of(url)
    for content, words in ((b"{", "is not the index"), (b'{"owner": "x", "format": 2}', "has format 2")):
        (place / INDEX).write(content)
        with pytest.raises(ConfigError, match=words):
            RunFolder(tmp_path / words, url).claim()


HASH = "0" * 64
NAME = "step_000001_0a1b2c3d"


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {"../../evil": [1, HASH]}},
        {"files": {"/etc/evil": [1, HASH]}},
        {"files": {"trajectories/../../evil": [1, HASH]}},
        {"files": {"trajectories//evil": [1, HASH]}},
        {"files": {"policy/" + "x" * 300: [1, HASH]}},
        {"files": {"policy/a\x00b": [1, HASH]}},
        {"files": {".lock": [1, HASH]}},
        {"files": {"upload.json": [1, HASH]}},
        {"files": {"ledger.sqlite": [1, HASH]}},
        {"files": {"checkpoints/step_000009/manifest.json": [1, HASH]}},
        {"files": {"trajectories": [1, HASH]}},
        {"files": {"policy/a": [-1, HASH]}},
        {"files": {"policy/a": [10**30, HASH]}},
        {"files": {"policy/a": ["many", HASH]}},
        {"files": {"policy/a": [1, "x"]}},
        {"files": [1]},
        {"checkpoints": {"../step_000001_0a1b2c3d": [1, HASH]}},
        {"checkpoints": {"step": [1, HASH]}},
        {"newest": ["step_000002_0a1b2c3d", 2]},
        {"newest": [NAME, 7]},
        {"journal": "journal/other.sqlite"},
        {"journal": "policy/a", "files": {"policy/a": [1, HASH]}},
        {"owner": None},
    ],
)
def test_an_index_that_names_what_no_run_uploads_writes_nothing(url, tmp_path, changed):
    index = {"owner": "x", "newest": [NAME, 1], "checkpoints": {NAME: [1, HASH]}, **changed}
    (StoragePath.of(url) / INDEX).write(json.dumps(index).encode())
    run = RunFolder(tmp_path / "run", url)
    before = run.files()
    for read in (run.claim, lambda: fetch(url, tmp_path / "copy"), lambda: disk(url)):
        with pytest.raises(ConfigError, match="is not the index of an uploaded run") as caught:
            read()
        assert "\n" not in str(caught.value)
    assert run.files() == before
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("run", "storage")] == []


def test_a_file_that_a_link_would_lead_elsewhere_is_not_fetched(url, tmp_path):
    run = RunFolder(tmp_path / "run", url)
    run.step(1)
    (run.root / "attempts" / "more").mkdir()
    run.claim().send()
    run.dir.close()
    other, elsewhere = RunFolder(tmp_path / "other", url), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (other.root / "attempts").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="over a link"):
        other.claim()
    assert list(elsewhere.iterdir()) == []
