"""A file of trajectories lives as long as the buffer stores an attempt in it, whatever happens."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.rows import StoredFacts
from agentrl.data.attempt_files import FOLDER
from agentrl.errors import JournalError
from parts.trajectories import Rows, play, stored

RULES = LedgerRules(groups_per_step=2, max_staleness=1, group_size=2)


def opened(folder: Path, **options) -> ReplayBuffer:
    return ReplayBuffer(Rows(), RULES, folder / FOLDER, journal=Journal(folder / FILE), **options)


def begun(folder: Path, **options) -> ReplayBuffer:
    buffer = opened(folder, **options)
    buffer.advance(0, 0)
    return buffer


def files(folder: Path) -> set[str]:
    return {str(path) for path in (folder / FOLDER).glob("*")}


class FilesMachine(RuleBasedStateMachine):
    """Owners play groups and ship members in any mixture; the learner takes, publishes and goes back."""

    @initialize(drops=st.booleans())
    def begin(self, drops: bool) -> None:
        import tempfile

        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.options = {"drop_constant_groups": drops}
        self.buffer = begun(self.folder, **self.options)
        self.held, self.sent, self.version, self.step, self.saved = [], [], 0, 0, 0
        self.strays: set[str] = set()  # what a buffer that was killed left; a resume removes them
        self.read: dict[int, set[str]] = {}  # step -> files that are still read

    @rule(owner=st.sampled_from("ab"), number=st.integers(1, 3))
    def lease(self, owner: str, number: int) -> None:
        for lease in self.buffer.lease(owner, number, 0.0):
            self.held += [(owner, lease, member) for member in range(2)]

    @rule(data=st.data())
    def ship(self, data: st.DataObject) -> None:
        """Several members of one owner in one file, some of them perhaps late or twice."""
        if not self.held:
            return
        owner = data.draw(st.sampled_from(sorted({o for o, _, _ in self.held})))
        mine = [held for held in self.held if held[0] == owner]
        chosen = data.draw(st.lists(st.sampled_from(range(len(mine))), min_size=1, unique=True))
        rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(chosen), max_size=len(chosen)))
        played = [
            play(mine[i][1], mine[i][2], reward=reward) for i, reward in zip(chosen, rewards, strict=True)
        ]
        facts = stored(*played, folder=self.folder / FOLDER)
        self.sent.append((owner, facts))
        self.buffer.add(owner, facts)
        for index in sorted(chosen, reverse=True):
            self.held.remove(mine[index])

    @rule(data=st.data())
    def ship_again(self, data: st.DataObject) -> None:
        """The answer of an earlier call was lost."""
        if self.sent:
            owner, facts = self.sent[-1]
            self.buffer.add(owner, facts)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.held:
            owner, lease, _ = data.draw(st.sampled_from(self.held))
            self.buffer.drop_group(owner, lease.group_id, "test")

    @rule()
    def learn(self) -> None:
        taken = self.buffer.take(2, 0.0, self.step + 1)
        if taken is not None:
            self.step, self.version = self.step + 1, self.version + 1
            self.read.setdefault(self.step, set()).update(t.source.path for t in taken)
            self.buffer.advance(self.version, self.step)
            assert [(t.load().group_id, t.load().member) for t in taken] == [
                (t.group_id, t.member) for t in taken
            ], "a batch can be read after it was published"

    @rule(behind=st.integers(0, 2))
    def record(self, behind: int) -> None:
        before = self.step + 1 - behind
        self.read = {step: paths for step, paths in self.read.items() if step >= before}
        self.buffer.release_batches(before)

    @rule()
    def settle(self) -> None:
        self.saved = self.step
        self.buffer.settle(self.step)

    @rule()
    def go_back(self) -> None:
        self.buffer.roll_back(self.saved)
        self.step, self.version = self.saved, self.version + 1
        self.buffer.advance(self.version, self.step)

    @rule(resumes=st.booleans())
    def restart(self, resumes: bool) -> None:
        self.buffer.close()
        self.buffer._journal.close()
        self.buffer = opened(self.folder, **self.options)
        self.strays |= set().union(*self.read.values())
        self.read = {}
        if resumes:
            self.held, self.sent = [], []
            self.buffer.resume(self.saved, None)
            self.strays = set()
            self.step, self.version = self.saved, self.version + 1
            self.buffer.advance(self.version, self.step)

    @invariant()
    def files_are_those_of_stored_attempts(self) -> None:
        self.buffer.close()  # files are removed in the background
        self.buffer._is_closed = False
        journal = self.buffer._journal
        blobs = [data for play in journal.plays() for data in journal.attempts(*play).values()]
        named = {attempt.source.path for attempt in StoredFacts(blobs, self.folder / FOLDER)}
        found = files(self.folder)
        assert found >= named | set().union(*self.read.values())
        assert found - self.strays == (named | set().union(*self.read.values())) - self.strays

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            self.temporary.cleanup()


FilesMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestFiles = FilesMachine.TestCase


def test_a_call_that_failed_keeps_its_file_for_the_next_try(tmp_path, monkeypatch):
    """The first attempt is late, the second cannot be written: without the file the retry would store it
    nowhere.
    """
    buffer = begun(tmp_path)
    late, lease = buffer.lease("a", 2, 0.0)
    buffer.drop_group("a", late.group_id, "test")
    facts = stored(play(late, 0), play(lease, 0), folder=tmp_path / FOLDER)
    append, calls = Journal.append, []

    def failing(self, events, attempts=None):
        calls.append(events)
        if len(calls) == 2:
            raise JournalError("the disk is full")
        append(self, events, attempts)

    monkeypatch.setattr(Journal, "append", failing)
    with pytest.raises(JournalError):
        buffer.add("a", facts)
    buffer.close()
    assert files(tmp_path) == {facts[0].source.path}
    buffer.add("a", facts)
    buffer.close()
    assert files(tmp_path) == {facts[0].source.path}
    assert buffer.stats()["stored_attempts"] == 1


def test_a_state_brings_its_files_into_another_folder_and_plays_again_what_is_gone(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    buffer = begun(first)
    leases = buffer.lease("a", 2, 0.0)
    for lease in leases:
        buffer.add("a", stored(*(play(lease, member) for member in range(2)), folder=first / FOLDER))
    state = buffer.state()
    lost = next(t for t in buffer.take(2, 0.0) if t.group_id == leases[1].group_id)
    Path(lost.source.path).unlink()
    other = opened(second)
    other.resume(0, state)
    other.advance(0, 0)
    counts = other.counts()
    assert (counts.ready, counts.queued) == (1, 1)
    assert counts.is_balanced
    assert [lease.group_id for lease in other.lease("b", 1, 0.0)] == [leases[1].group_id]
    played = play(leases[1], 0), play(leases[1], 1)
    other.add("b", stored(*played, folder=second / FOLDER))
    taken = other.take(2, 0.0)
    assert all(Path(t.source.path).parent == second / FOLDER for t in taken)
    assert [t.load().group_id for t in taken] == [t.group_id for t in taken]


def test_a_state_with_groups_of_another_size_plays_them_again(tmp_path):
    buffer = begun(tmp_path)
    leases = buffer.lease("a", 3, 0.0)
    for lease in leases[:2]:
        buffer.add("a", stored(*(play(lease, member) for member in range(2)), folder=tmp_path / FOLDER))
    state = buffer.state()
    for size, num_again in ((2, 0), (3, 2)):
        folder = tmp_path / str(size)
        folder.mkdir()
        other = ReplayBuffer(Rows(), replace(RULES, group_size=size), folder / FOLDER)
        assert other.resume(0, state).num_other == num_again
        counts = other.counts()
        assert (counts.ready, counts.queued) == (2 - num_again, 1 + num_again)
        assert counts.is_balanced


@pytest.mark.parametrize("per_step", [1, 2, 3])
def test_a_resumed_run_leases_what_its_steps_need_also_with_batches_of_another_size(per_step, tmp_path):
    buffer = begun(tmp_path)
    for step in (1, 2):
        for lease in buffer.lease("a", 2, 0.0):
            buffer.add("a", stored(*(play(lease, member) for member in range(2)), folder=tmp_path / FOLDER))
        assert len(buffer.take(2, 0.0)) == 4
        buffer.advance(step, step)
    for folder, num_steps in ((tmp_path / "ends", 3), (tmp_path / "has_more", 9)):
        folder.mkdir()
        rules = replace(RULES, groups_per_step=per_step, total_groups=num_steps * per_step)
        resumed = ReplayBuffer(Rows(), rules, folder / FOLDER)
        assert resumed.resume(2, buffer.state()).num_other == 0
        resumed.advance(3, 2)
        num_ahead = 1 if num_steps == 3 else RULES.max_staleness + 1
        assert len(resumed.lease("b", 100, 0.0)) == num_ahead * per_step


def test_a_resumed_run_plays_other_groups_where_files_are_lost(tmp_path):
    """Of a group that was ready, and of one whose batch is undone, whose own task is played again."""
    buffer = begun(tmp_path)
    first, second, third, _ = buffer.lease("a", 4, 0.0)
    facts = {
        lease.group_id: stored(*(play(lease, m) for m in range(2)), folder=tmp_path / FOLDER)
        for lease in (first, second, third)
    }
    for own in facts.values():
        buffer.add("a", own)
    assert [t.group_id for t in buffer.take(2, 0.0)] == [0, 0, 1, 1]
    for lost in (second, third):
        Path(facts[lost.group_id][0].source.path).unlink()
    buffer.close()
    buffer._journal.close()
    again = opened(tmp_path)
    again.resume(0, None)
    counts = again.counts()
    assert (counts.ready, counts.dropped) == (1, {"files_lost": 1})
    assert counts.discarded["rolled_back"] == 2
    assert counts.is_balanced
    again.advance(1, 0)
    assert [lease.group_id for lease in again.lease("b", 9, 0.0)][:1] == [second.group_id]


def test_a_batch_can_be_read_while_others_add(tmp_path):
    """What is taken stays until it is published, however many files come and go beside it."""
    buffer = begun(tmp_path)
    stop, errors = threading.Event(), []

    def play_on(owner: str) -> None:
        try:
            while not stop.is_set():
                for lease in buffer.lease(owner, 2, 0.05):
                    for member in range(2):
                        buffer.add(owner, stored(play(lease, member), folder=tmp_path / FOLDER))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=play_on, args=(owner,)) for owner in "abc"]
    for thread in threads:
        thread.start()
    for step in range(1, 8):
        taken = buffer.take(2, 60.0, step)
        assert [(t.load().group_id, t.member) for t in taken] == [(t.group_id, t.member) for t in taken]
        buffer.advance(step, step)
        buffer.settle(step)
        buffer.release_batches(step)
    stop.set()
    for thread in threads:
        thread.join(60.0)
    assert errors == []
