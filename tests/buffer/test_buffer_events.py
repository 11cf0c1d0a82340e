"""The replay buffer, change by change: whom it wakes, what stays stored, and what its figures say."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.records import Records
from agentrl.errors import CheckpointError
from agentrl.types import ConversationRecord, HeldLease, Lease, RewardEvent
from parts.trajectories import ATTEMPTS, Rows, play, stored

SOON_S = 20.0  # a test that waits so long has failed


def opened(
    *, groups_per_step: int = 1, max_staleness: int = 0, path: Path | None = None, **options
) -> ReplayBuffer:
    """A buffer of groups of two."""
    rules = LedgerRules(groups_per_step=groups_per_step, max_staleness=max_staleness, group_size=2)
    return ReplayBuffer(Rows(), rules, ATTEMPTS, journal=None if path is None else Journal(path), **options)


def begun(**options) -> ReplayBuffer:
    target = opened(**options)
    target.advance(0, 0)
    return target


def add(target: ReplayBuffer, lease: Lease, owner: str = "a", *, members=(0, 1), **fields) -> None:
    target.add(owner, stored(*(play(lease, member, **fields) for member in members)))


def learn(target: ReplayBuffer, step: int) -> None:
    """Play and take the batch of `step`, and publish what was learned."""
    for lease in target.lease("a", 9, 0.0):
        add(target, lease)
    assert target.take(1, 0.0, step) is not None
    target.advance(step, step)


def groups_of(batch: bytes | None) -> list[int]:
    return [] if batch is None else [t.group_id for t in batch if t.member == 0]


# ------------------------------------------------------------------------------------------------------ waits


def leave_out(target: ReplayBuffer, lease: Lease) -> None:
    target.leave_out("a", lease.group_id, 1, "retried")


def restore(target: ReplayBuffer, lease: Lease) -> None:
    other = begun()
    add(other, *other.lease("a", 1, 0.0))
    target.restore(other.state())


@pytest.mark.parametrize("change", [leave_out, restore])
def test_what_makes_a_group_ready_wakes_the_learner(change: Callable[[ReplayBuffer, Lease], None]):
    target = begun()
    [lease] = target.lease("a", 1, 0.0)
    add(target, lease, members=[0])
    assert groups_of(woken(target.take, 1, SOON_S, by=lambda: change(target, lease))) == [lease.group_id]


def test_what_makes_room_wakes_who_plays():
    target = begun()
    add(target, *target.lease("a", 1, 0.0))
    assert groups_of(target.take(1, 0.0, 1)) == [0]
    leases = woken(target.lease, "b", 1, SOON_S, by=lambda: target.reject(1, "not finite"))
    assert [lease.group_id for lease in leases] == [1]


def test_what_a_rollback_makes_ready_again_wakes_the_learner():
    target = begun()
    learn(target, 1)
    assert groups_of(woken(target.take, 1, SOON_S, by=lambda: target.roll_back(0))) == [0]


def woken(call, *args, by: Callable[[], None]):
    """Return what `call` returns once `by` has happened; it waits for it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*args)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "it waits"
    by()
    thread.join(SOON_S / 4)
    assert found, "still waiting"
    return found[0]


class Waiting(threading.Thread):
    """A lease that waits."""

    def __init__(self, target: ReplayBuffer, owner: str, limit: int) -> None:
        super().__init__(daemon=True)
        self._target, self._owner, self._limit = target, owner, limit
        self.leased: list[int] | None = None
        self.start()

    def run(self) -> None:
        leases = self._target.lease(self._owner, self._limit, SOON_S)
        self.leased = [lease.group_id for lease in leases]

    def result(self) -> list[int]:
        self.join(SOON_S)
        assert self.leased is not None, "still waiting"
        return self.leased


def test_a_member_that_arrives_wakes_no_lease():
    """Each look at what there is to lease reads the clock once, and so does each arrival."""
    num_readings = 0

    def clock() -> float:
        nonlocal num_readings
        num_readings += 1
        return 0.0

    target = begun(groups_per_step=4, max_staleness=1, clock=clock)
    leases = target.lease("a", 99, 0.0)
    waiting = [Waiting(target, f"w{i}", limit=3) for i in range(6)]
    until(lambda: num_readings >= 1 + 2 + 1 + 2 * len(waiting))
    before = num_readings
    for lease in leases:
        for member in (0, 1):
            add(target, lease, members=[member])
    assert num_readings == before + 2 * len(leases)
    target.close()
    assert [each.result() for each in waiting] == [[]] * 6


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@settings(max_examples=40, deadline=None)
@given(
    limits=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    changes=st.lists(
        st.tuples(st.sampled_from(["drop", "release", "learn", "reject", "stale"]), st.integers(0, 99)),
        max_size=12,
    ),
)
def test_nobody_sleeps_beside_a_group_that_he_could_have(
    limits: list[int], changes: list[tuple[str, int]]
) -> None:
    """Whatever makes room: in the end there is none left, or nobody waits."""
    target = begun(groups_per_step=4, max_staleness=1)
    held = {"0": [lease.group_id for lease in target.lease("0", 99, 0.0)]}
    waiting = [Waiting(target, str(number), limit) for number, limit in enumerate(limits, 1)]
    version = 0

    def is_at_rest() -> bool:
        with target._lock:
            return not target._ledger.can_lease() or not any(each.is_alive() for each in waiting)

    for change, which in changes:
        held |= {
            each._owner: list(each.leased) for each in waiting if each.leased and each._owner not in held
        }
        mine = [(owner, group) for owner, groups in sorted(held.items()) for group in groups]
        if not mine:
            break
        owner, group = mine[which % len(mine)]
        if change == "drop":
            target.drop_group(owner, group, "tool_error")
            held[owner].remove(group)
        elif change == "release":
            target.release(owner)
            held[owner] = []
        else:
            lease = Lease(group, Rows().task(group), 2, version)
            add(target, lease, owner, version=version - 2 if change == "stale" else version)
            held[owner].remove(group)
            if change != "stale" and target.take(1, 0.0) is not None:
                if change == "reject":
                    target.reject(target._groups.step, "reward_error")
                else:
                    version += 1
                    target.advance(version)
        until(is_at_rest)
        assert target.counts().is_balanced
    target.close()
    for each in waiting:
        each.result()


@pytest.mark.parametrize("limit", ["lease_timeout_s", "duplicate_after_s"])
def test_who_waits_gets_what_is_due_meanwhile(limit):
    """Nothing else happens in the buffer, and his wait is longer."""
    target = begun(groups_per_step=2, **{limit: 0.2})
    [first] = target.lease("a", 1, 0.0)
    [second] = target.lease("b", 1, 0.0)
    assert Waiting(target, "b", limit=1).result() in ([first.group_id], [second.group_id])


def test_a_lease_of_nothing_is_refused():
    with pytest.raises(ValueError, match="limit=0: lease at least 1 group"):
        begun().lease("a", 0, 0.0)


def test_the_time_a_call_may_wait_is_kept():
    target = begun()
    assert woken(target.take, 1, 0.3, by=lambda: None) is None
    target.lease("a", 1, 0.0)
    assert woken(target.lease, "b", 1, 0.3, by=lambda: None) == []


# -------------------------------------------------------------------------------------------- expiry, copies


def test_a_lease_that_is_too_old_goes_to_another_and_its_attempts_are_forgotten():
    now = [100.0]
    target = begun(lease_timeout_s=10.0, clock=lambda: now[0])
    [lease] = target.lease("a", 1, 0.0)
    add(target, lease, members=[0])
    now[0] = 109.0
    assert target.lease("b", 1, 0.0) == []
    assert target.leases() == [HeldLease(0, "a", 9.0, 1)]
    assert target.stats()["stored_attempts"] > 0
    now[0] = 111.0
    assert target.lease("b", 1, 0.0) == [lease]
    assert target.leases() == [HeldLease(0, "b", 0.0, 0)]
    assert target.stats()["stored_attempts"] == 0
    assert [target.withdrawn(owner, {0, 7}) for owner in "ab"] == [[0, 7], [7]]


def test_of_two_copies_of_a_group_the_first_that_is_complete_counts():
    now = [100.0]
    target = begun(duplicate_after_s=5.0, clock=lambda: now[0])
    [lease] = target.lease("a", 1, 0.0)
    now[0] = 104.0
    assert target.lease("b", 1, 0.0) == []
    now[0] = 106.0
    assert target.lease("b", 1, 0.0) == [lease]
    add(target, lease, "a", members=[0])
    one_attempt = target.stats()["stored_attempts"]
    add(target, lease, "b", reward=1.0)
    assert target.stats()["stored_attempts"] == pytest.approx(2 * one_attempt, rel=0.1), "nothing of a"
    assert target.withdrawn("a", {0}) == [0]
    batch = target.take(1, 0.0, 1)
    assert batch is not None
    assert [t.reward for t in batch] == [1.0, 1.0]


# ----------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(("max_staleness", "kept"), [(0, [1]), (1, [1, 2]), (2, [1, 2, 3])])
def test_published_batches_are_kept_as_long_as_a_rollback_could_use_them(tmp_path, max_staleness, kept):
    """Group g is of version g, one member of the version before if it may be; the only checkpoint is that of
    the start.
    """
    target = begun(max_staleness=max_staleness, path=tmp_path / FILE)
    for step in range(1, 5):
        [lease] = target.lease("a", 1, 0.0)
        add(target, lease, members=[0], version=max(0, step - 1 - min(1, max_staleness)))
        add(target, lease, members=[1], version=step - 1)
        assert groups_of(target.take(1, 0.0, step)) == [step - 1]
        target.advance(step, step)
    with Records.open(tmp_path / FILE) as records:
        assert sorted({attempt.key[0] + 1 for attempt in records.attempts()}) == kept


def test_a_checkpoint_settles_the_batches_up_to_its_step(tmp_path):
    target = begun(max_staleness=9, path=tmp_path / FILE)
    for step in range(1, 5):
        [lease, *_] = target.lease("a", 1, 0.0)
        add(target, lease, version=step - 1)
        assert target.take(1, 0.0, step) is not None
        target.advance(step, step)
    target.settle(2)
    with Records.open(tmp_path / FILE) as records:
        assert sorted({attempt.key[0] for attempt in records.attempts()}) == [2, 3]


def test_a_rejected_batch_leaves_nothing():
    target = begun()
    add(target, *target.lease("a", 1, 0.0))
    assert target.take(1, 0.0, 1) is not None
    assert target.stats()["stored_attempts"] > 0
    target.reject(1, "not finite")
    assert target.stats()["stored_attempts"] == 0
    assert target.counts().dropped == {"not finite": 1}


def test_a_group_that_came_too_late_leaves_nothing():
    target = begun()
    [lease] = target.lease("a", 1, 0.0)
    target.advance(1, 0)
    add(target, lease, members=[0])
    assert target.stats()["stored_attempts"] > 0
    waiting = Waiting(target, "b", limit=1)
    add(target, lease, members=[1])
    assert target.counts().dropped == {"stale": 1}
    assert target.stats()["stored_attempts"] == 0
    assert waiting.result() == [1], "its room is given away without a take"
    assert target.take(1, 0.0) is None


@pytest.mark.parametrize(
    ("rewards", "is_constant"),
    [
        ((0.1 + 0.2, 0.3), True),
        ((-0.3, -(0.1 + 0.2)), True),
        ((3e5, 3e5 * (1 + 5e-13)), True),
        ((1.0, 1 + 1e-10), False),
        ((3e-9, 3.001e-9), False),
        ((0.0, 0.0), True),
        ((1.0, -1.0), False),
    ],
)
def test_rewards_are_equal_up_to_the_rounding_of_sums(rewards, is_constant):
    target = begun(drop_constant_groups=True)
    [lease] = target.lease("a", 1, 0.0)
    for member, reward in enumerate(rewards):
        add(target, lease, members=[member], reward=reward)
    assert target.counts().dropped == ({"no_variance": 1} if is_constant else {})


@pytest.mark.parametrize(
    ("credit", "games", "is_constant"),
    [
        ("attempt", [(1.0, -1.0), (-1.0, 1.0)], True),  # zero-sum: the sums are equal
        ("own", [(1.0, -1.0), (-1.0, 1.0)], False),
        ("own", [(1.0, -1.0), (1.0, -1.0)], True),
        ("own", [(1.0, -1.0), (1.0, 1.0)], False),
        ("attempt", [(1.0, -1.0), (1.0, 1.0)], False),
    ],
)
def test_rewards_that_are_compared_are_those_that_credit_compares(credit, games, is_constant):
    target = begun(drop_constant_groups=True, conversation_credit=credit)
    [lease] = target.lease("a", 1, 0.0)
    for member, (first, second) in enumerate(games):
        turns = np.array([-1, 0, -1, 1], np.int16)
        played = play(lease, member).replace(
            turn_ids=turns,
            action_mask=turns >= 0,
            segment_starts=(0, 2),
            conversations=tuple(ConversationRecord(name, ()) for name in ("main", "first", "second")),
            segment_conversations=(1, 2),
            rewards=(RewardEvent("r", first, 1), RewardEvent("r", second, 3)),
        )
        target.add("a", stored(played))
    assert target.counts().dropped == ({"no_variance": 1} if is_constant else {})


def test_a_group_of_which_the_variance_was_not_looked_at_before_a_death_is_looked_at_after_it(tmp_path):
    first = begun(path=tmp_path / FILE)
    add(first, *first.lease("a", 1, 0.0), reward=0.5)
    second = opened(path=tmp_path / FILE, drop_constant_groups=True)
    assert second.counts().dropped == {"no_variance": 1}


# ----------------------------------------------------------------------------------------------------- resume

STEP_1 = "the state of the replay buffer is unknown after step 1: its journal goes back only to step 0"


@pytest.mark.parametrize(
    ("num_steps", "settled", "step", "has_state", "consumed"),
    [
        (0, 0, 0, False, 0),  # a run that begins
        (0, 0, 1, False, None),  # the journal is lost
        (0, 0, 1, True, 1),
        (2, 0, 0, False, 0),  # rolled back
        (2, 0, 1, True, 1),
        (2, 1, 1, False, 1),
        (2, 2, 1, False, None),  # a settled step cannot be rolled back
        (2, 2, 1, True, 1),
    ],
)
def test_a_run_goes_on_from_its_journal_or_from_its_checkpoint(
    tmp_path, num_steps, settled, step, has_state, consumed
):
    saved = begun()
    learn(saved, 1)
    if num_steps:
        first = begun(path=tmp_path / FILE)
        for number in range(1, num_steps + 1):
            learn(first, number)
        first.settle(settled)
        first.lease("dead", 1, 0.0)
    target = opened(path=tmp_path / FILE)
    if consumed is None:
        with pytest.raises(
            CheckpointError, match=f"unknown after step {step}: .* back only to step {settled}"
        ):
            target.resume(step, None)
        return
    target.resume(step, saved.state() if has_state else None)
    assert target.counts().consumed == consumed
    assert target.leases() == []
    assert target.counts().is_balanced


# ---------------------------------------------------------------------------------------------------- account


def test_figures_by_hand():
    now = [100.0]
    target = opened(groups_per_step=3, max_staleness=2, clock=lambda: now[0])
    before = target.stats()
    assert [before[f"batch_lag_{what}"] for what in ("max", "mean")] == [0, 0]
    for version, num_groups in enumerate((2, 0, 1)):
        lineage = target.advance(version, version)
        now[0] = 100.0 + version
        for lease in target.lease("a", num_groups, 0.0) if num_groups else ():
            add(target, lease)
    assert [lineage.version, lineage.lag(0)] == [2, 2]
    now[0] = 107.0
    assert groups_of(target.take(3, 0.0, 1)) == [0, 1, 2]
    stats = target.stats()
    assert {name: value for name, value in stats.items() if name.startswith("batch_lag")} == {
        "batch_lag_max": 2, "batch_lag_mean": pytest.approx(4 / 3), "batch_lag_0": 1, "batch_lag_2": 2,
    }  # fmt: skip
    assert stats["since_last_add_s"] == 5.0
    assert stats["consumed"] == 3
    assert target.curriculum() == {}
    assert [task.task_id for task in target.tasks([3, 1])] == ["t:3", "t:1"]


def test_the_journal_names_the_task_of_each_group(tmp_path):
    target = begun(groups_per_step=2, path=tmp_path / FILE)
    target.lease("a", 2, 0.0)
    with Records.open(tmp_path / FILE) as records:
        assert records.tasks() == {0: "t:0", 1: "t:1"}


def test_what_a_checkpoint_learned_from_is_on_the_disk(tmp_path):
    """Not only in SQLite's log, of which a power loss may take the end."""
    target = begun(path=tmp_path / FILE)
    learn(target, 1)
    target.state()
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / FILE, tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / FILE) as database:
        kinds = [kind for (kind,) in database.execute("SELECT kind FROM events ORDER BY seq")]
    assert kinds[-2:] == ["consumed", "published"]
