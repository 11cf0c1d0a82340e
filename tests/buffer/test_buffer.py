"""The replay buffer: long polls, whole groups in Arrow, and a checkpoint that loses nothing."""

from __future__ import annotations

import threading

import pytest

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.ledger import LedgerRules
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import CheckpointError
from agentrl.types import Failure, Lease, Outcome
from parts.trajectories import ATTEMPTS, Rows, play, stored

FOREVER_S = 60.0  # a test that reaches it has failed


def buffer(
    *, groups_per_step: int = 2, max_staleness: int = 0, group_size: int = 2, total_groups: int | None = None
) -> ReplayBuffer:
    made = ReplayBuffer(
        Rows(),
        LedgerRules(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            group_size=group_size,
            total_groups=total_groups,
        ),
        ATTEMPTS,
    )
    made.advance(0)
    return made


def finish(target: ReplayBuffer, lease: Lease, owner: str = "a", **options) -> None:
    target.add(owner, stored(*(play(lease, member, **options) for member in range(lease.group_size))))


def keys(batch: list[AttemptFacts] | None) -> list[tuple[int, int]]:
    assert batch is not None
    return [(t.group_id, t.member) for t in batch]


class Background(threading.Thread):
    """Runs one call in a thread; `result` waits for it."""

    def __init__(self, call, *args) -> None:
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self.start()

    def run(self) -> None:
        self._value = self._call(*self._args)

    def result(self):
        self.join(FOREVER_S)
        assert not self.is_alive(), "still waiting"
        return self._value


def test_a_batch_is_whole_groups_in_order_of_lease_and_member():
    target = buffer()
    first, second = target.lease("a", 8, 0.0)
    assert [lease.task.task_id for lease in (first, second)] == ["t:0", "t:1"]
    assert (first.group_size, first.version) == (2, 0)
    target.add("a", stored(play(second, 1), play(first, 1, length=7)))
    target.add("a", stored(play(second, 0)))
    assert target.take(2, 0.0) is None
    target.add("a", stored(play(first, 0)))
    batch = target.take(2, 0.0)
    assert keys(batch) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert batch is not None
    lengths = [t.num_tokens for t in batch]
    assert lengths == [4, 7, 4, 4]
    assert [t.load().token_ids[0] for t in batch] == [0, 1, 100, 101]
    assert target.stats()["stored_attempts"] > 0, "the batch may be asked for again"
    target.advance(1)
    target.settle(1)
    assert target.stats()["stored_attempts"] == 0


def test_groups_without_variance_are_replaced_and_the_counts_balance():
    target = ReplayBuffer(
        Rows(),
        LedgerRules(groups_per_step=2, max_staleness=0, group_size=2, total_groups=2),
        ATTEMPTS,
        drop_constant_groups=True,
    )
    target.advance(0)
    first, second = target.lease("a", 8, 0.0)
    finish(target, first, reward=0.1)
    target.add("a", stored(play(second, 0, reward=1.0), play(second, 1, reward=0.0)))
    assert target.take(2, 0.0) is None
    assert target.counts().dropped == {"no_variance": 1}
    of_one_group = target.stats()["stored_attempts"]
    [third] = target.lease("a", 8, 0.0)  # in its place, and no more
    assert third.group_id == 2
    target.add("a", stored(play(third, 0, reward=0.5), play(third, 1, reward=0.4)))
    assert target.stats()["stored_attempts"] == pytest.approx(2 * of_one_group, rel=0.1), (
        "nothing of the first"
    )
    assert keys(target.take(2, 0.0)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert target.counts().is_balanced


def test_a_group_with_a_greedy_attempt_is_complete_with_it():
    target = ReplayBuffer(
        Rows(), LedgerRules(groups_per_step=1, max_staleness=1, group_size=2), ATTEMPTS, has_greedy=True
    )
    target.advance(0)
    [lease, _] = target.lease("a", 9, 0.0)
    assert (lease.group_size, lease.has_greedy, lease.num_attempts) == (2, True, 3)
    finish(target, lease)
    assert target.take(1, 0.0) is None
    target.add("a", stored(play(lease, 2).replace(is_greedy=True)))
    resumed = ReplayBuffer(
        Rows(), LedgerRules(groups_per_step=1, max_staleness=1, group_size=2), ATTEMPTS, has_greedy=True
    )
    resumed.restore(target.state())
    for one in (target, resumed):
        batch = one.take(1, 0.0)
        assert batch is not None
        assert [(t.member, t.is_greedy) for t in batch] == [
            (0, False),
            (1, False),
            (2, True),
        ]
        assert one.counts().is_balanced


def test_an_old_greedy_attempt_makes_its_group_old():
    target = ReplayBuffer(
        Rows(), LedgerRules(groups_per_step=1, max_staleness=0, group_size=1), ATTEMPTS, has_greedy=True
    )
    target.advance(3)
    [lease] = target.lease("a", 1, 0.0)
    finish(target, lease)
    target.add("a", stored(play(lease, 1, version=2).replace(is_greedy=True)))
    assert target.take(1, 0.0) is None
    assert target.counts().dropped == {"stale": 1}


@pytest.mark.parametrize(("greedy_reward", "is_dropped"), [(0.5, True), (1.0, False)])
def test_a_group_teaches_something_when_it_differs_from_its_greedy_attempt(greedy_reward, is_dropped):
    target = ReplayBuffer(
        Rows(),
        LedgerRules(groups_per_step=1, max_staleness=0, group_size=1),
        ATTEMPTS,
        has_greedy=True,
        drop_constant_groups=True,
    )
    target.advance(0)
    [lease] = target.lease("a", 1, 0.0)
    finish(target, lease, reward=0.5)
    target.add("a", stored(play(lease, 1, reward=greedy_reward).replace(is_greedy=True)))
    assert (target.take(1, 0.0) is None) == is_dropped
    assert target.counts().dropped == ({"no_variance": 1} if is_dropped else {})


@pytest.mark.parametrize(("reward", "is_dropped"), [(1.0, True), (0.0, False)])
def test_a_failed_member_earned_nothing_that_could_differ(reward, is_dropped):
    target = ReplayBuffer(
        Rows(),
        LedgerRules(groups_per_step=1, max_staleness=0, group_size=3),
        ATTEMPTS,
        drop_constant_groups=True,
    )
    target.advance(0)
    [lease] = target.lease("a", 1, 0.0)
    failed = play(lease, 2).replace(outcome=Outcome.TIMEOUT, rewards=(), failure=Failure("late"))
    target.add("a", stored(play(lease, 0, reward=1.0), play(lease, 1, reward=reward), failed))
    assert (target.take(1, 0.0) is None) == is_dropped


def test_groups_without_variance_are_kept_unless_they_are_to_be_dropped():
    target = buffer(groups_per_step=1)
    [lease] = target.lease("a", 1, 0.0)
    finish(target, lease, reward=1.0)
    assert keys(target.take(1, 0.0)) == [(0, 0), (0, 1)]


def test_a_waiting_take_gets_the_batch_when_the_last_member_comes():
    target = buffer(groups_per_step=1)
    [lease] = target.lease("a", 1, 0.0)
    waiting = Background(target.take, 1, FOREVER_S)
    finish(target, lease)
    assert keys(waiting.result()) == [(0, 0), (0, 1)]
    assert target.counts().is_balanced


@pytest.mark.parametrize("event", ["advance", "drop", "stale"])
def test_a_waiting_lease_gets_its_group_when_the_bound_admits_one(event):
    target = buffer(groups_per_step=1)
    [lease] = target.lease("a", 9, 0.0)
    waiting = Background(target.lease, "b", 9, FOREVER_S)
    if event == "drop":
        target.drop_group("a", lease.group_id, "tool_error")
    else:
        finish(target, lease)
        target.take(1, 0.0)
        target.advance(1)
        if event == "stale":
            [late] = waiting.result()
            finish(target, late, "b", version=0)
            waiting = Background(target.lease, "b", 9, FOREVER_S)
            assert target.take(1, 0.0) is None
    assert [granted.group_id for granted in waiting.result()] == [2 if event == "stale" else 1]
    assert target.counts().is_balanced


def test_a_dead_owners_groups_go_to_another_and_its_late_members_are_counted():
    target = buffer()
    leases = target.lease("a", 2, 0.0)
    target.add("a", stored(play(leases[0], 0)))
    waiting = Background(target.lease, "b", 2, FOREVER_S)
    assert target.release("a") == 2
    again = waiting.result()
    assert [lease.group_id for lease in again] == [0, 1]
    target.add("a", stored(play(leases[0], 1)))
    for lease in again:
        finish(target, lease, "b")
    target.add("b", stored(play(again[0], 0)))
    assert keys(target.take(2, 0.0)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    counts = target.counts()
    assert counts.is_balanced
    assert counts.discarded == {"owner_lost": 1, "late": 2}


def test_a_long_poll_of_a_dead_owner_takes_nothing():
    """Its process is gone, its call still waits here: the groups that its death frees must not go to it."""
    target = buffer(max_staleness=0)
    leased = target.lease("a", 2, 0)
    assert len(leased) == 2
    results: list[list[Lease]] = []
    waiting = threading.Thread(target=lambda: results.append(target.lease("a", 2, 60)))
    waiting.start()
    assert target.release("a") == 2
    waiting.join(30)
    assert results == [[]]
    assert [lease.group_id for lease in target.lease("b", 2, 0)] == [lease.group_id for lease in leased]
    assert target.lease("a", 2, 0) == []


def test_a_member_that_comes_twice_is_kept_once():
    target = buffer(groups_per_step=1)
    [lease] = target.lease("a", 1, 0.0)
    target.add("a", stored(play(lease, 0, length=4)))
    target.add("a", stored(play(lease, 0, length=9), play(lease, 1)))
    batch = target.take(1, 0.0)
    assert keys(batch) == [(0, 0), (0, 1)]
    assert batch is not None
    assert batch[0].num_tokens == 4
    assert target.counts().discarded == {"duplicate": 1}


def test_a_publish_drops_what_it_makes_too_old():
    target = buffer(groups_per_step=1, max_staleness=1)
    old, fresh = target.lease("a", 2, 0.0)
    finish(target, old)
    finish(target, fresh, version=1)
    target.advance(2)
    assert target.counts().dropped == {"stale": 1}
    assert keys(target.take(1, 0.0)) == [(1, 0), (1, 1)]
    stats = target.stats()
    assert (
        stats["batch_lag_max"],
        stats["batch_lag_mean"],
        stats["batch_lag_1"],
        stats["dropped_stale"],
    ) == (1, 1, 1, 1)


def test_no_more_is_leased_than_the_run_needs():
    target = buffer(groups_per_step=2, max_staleness=3, total_groups=4)
    leases = target.lease("a", 99, 0.0)
    assert len(leases) == 4
    target.add("a", stored(play(leases[1], 0)))
    target.drop_group("a", 1, "reward_error")
    assert target.stats()["stored_attempts"] == 0
    assert [lease.group_id for lease in target.lease("a", 99, 0.0)] == [4]
    assert target.lease("a", 99, 0.0) == []


def test_close_ends_all_waiting():
    target = buffer(groups_per_step=1)
    target.lease("a", 1, 0.0)
    waiting = [Background(target.lease, "b", 1, FOREVER_S), Background(target.take, 1, FOREVER_S)]
    target.close()
    assert [thread.result() for thread in waiting] == [[], None]


def test_waiting_is_measured_with_the_clock():
    ticks = iter(range(1000))
    target = ReplayBuffer(
        Rows(),
        LedgerRules(groups_per_step=1, max_staleness=0, group_size=1),
        ATTEMPTS,
        clock=lambda: float(next(ticks)),
    )
    assert target.take(1, 0.0) is None
    assert target.take(1, 0.0) is None
    target.lease("a", 1, 0.0)
    stats = target.stats()
    assert (stats["take_wait_s"], stats["lease_wait_s"]) == (2.0, 2.0)
    assert (
        stats["since_last_add_s"] == 8.0
    )  # readings since the constructor's: two per wait, one per look for leases, one here


def test_a_checkpoint_keeps_cursor_ready_groups_and_the_duty_to_play_what_was_leased():
    target = buffer(groups_per_step=2, max_staleness=1, group_size=2)
    leases = target.lease("a", 9, 0.0)
    finish(target, leases[2])
    finish(target, leases[0], length=5)
    target.add("a", stored(play(leases[1], 0)))
    saved = target.state()

    resumed = ReplayBuffer(Rows(), LedgerRules(groups_per_step=2, max_staleness=1, group_size=2), ATTEMPTS)
    resumed.restore(saved)
    resumed.advance(1)
    counts = resumed.counts()
    assert (counts.drawn, counts.queued, counts.leased, counts.ready) == (4, 2, 0, 2)
    assert counts.discarded == {"owner_lost": 1}
    assert counts.is_balanced
    assert [lease.group_id for lease in resumed.lease("z", 9, 0.0)] == [1, 3]
    batch = resumed.take(2, 0.0)
    assert keys(batch) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert batch is not None
    assert [t.num_tokens for t in batch] == [5, 5, 4, 4]
    resumed.advance(2)
    assert [lease.group_id for lease in resumed.lease("z", 9, 0.0)] == [4, 5]


def test_a_checkpoint_without_ready_groups_and_one_that_comes_too_late():
    empty = buffer()
    resumed = ReplayBuffer(Rows(), LedgerRules(groups_per_step=2, max_staleness=0, group_size=2), ATTEMPTS)
    resumed.restore(empty.state())
    assert resumed.counts() == empty.counts()

    target = buffer()
    for lease in target.lease("a", 2, 0.0):
        finish(target, lease)
    resumed.restore(target.state())
    resumed.advance(1)
    assert resumed.counts().dropped == {}, "the weights are those that sampled them"
    resumed.advance(2)
    assert resumed.counts().dropped == {"stale": 2}
    assert resumed.stats()["stored_attempts"] == 0


def test_foreign_bytes_are_refused():
    with pytest.raises(CheckpointError, match="cannot be read"):
        buffer().restore(b"no state")
    with pytest.raises(CheckpointError, match=r"cannot be read.*folder"):
        buffer().restore(b"{}")


def test_many_owners_and_one_learner_lose_nothing():
    """Threads race; one owner dies now and then.

    Each batch is whole, each group comes once, the counts balance.
    """
    steps, per_step = 30, 3
    target = buffer(groups_per_step=per_step, max_staleness=1, group_size=2, total_groups=steps * per_step)

    def own(name: str) -> None:
        life = 0
        while leases := target.lease(f"{name}.{life}", 2, FOREVER_S):
            for lease in leases:
                owner = f"{name}.{life}"
                target.add(owner, stored(play(lease, 0)))
                assert target.counts().is_balanced
                if lease.group_id % 7 == 0 and life == 0:
                    target.release(owner)
                    life += 1
                    break
                if lease.group_id % 11 == 0:
                    target.drop_group(owner, lease.group_id, "tool_error")
                else:
                    target.add(owner, stored(play(lease, 1)))

    owners = [Background(own, name) for name in "abcd"]
    seen: list[int] = []
    for step in range(1, steps + 1):
        batch = target.take(per_step, FOREVER_S)
        found = keys(batch)
        assert [member for _, member in found] == [0, 1] * per_step
        seen += [group_id for group_id, member in found if member == 0]
        assert batch is not None
        assert all(step - 1 - t.min_version <= 1 for t in batch)
        target.advance(step)
    target.close()
    for owner in owners:
        owner.result()
    counts = target.counts()
    assert counts.is_balanced
    assert counts.consumed == len(seen) == len(set(seen)) == steps * per_step
