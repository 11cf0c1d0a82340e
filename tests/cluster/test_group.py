"""Groups of real Ray actors: how calls are spread over ranks and replicas, what stays there, and what is said
when a rank fails.
"""

import os
import signal
import threading
import time

import pytest

from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import Seat
from agentrl.cluster.starting import wait_until_all_ready
from agentrl.errors import ConfigError, LearnerError
from agentrl.learner.dispatch import dispatch
from parts.local_ray import local_ray


class Counter:
    """A worker that tells what it was given; `unit` is whatever every rank is told."""

    def __init__(self, unit, *, rank, address, port):
        self.unit, self.rank, self.port = unit, rank, port
        self.may_go = threading.Event()

    @dispatch("dp", join="concat")
    def tag(self, items, others, suffix="", *, times=1):
        return [
            f"{self.rank}:{item}{other}{suffix * times}" for item, other in zip(items, others, strict=True)
        ]

    @dispatch("dp", join="sum")
    def total(self, items):
        return {"total": float(sum(items)), "ranks": 1.0}

    @dispatch("dp", join="mean")
    def mean(self, items):
        return float(sum(items))

    @dispatch("dp", join="max")
    def largest(self, items):
        return max(items)

    @dispatch("dp", join="remote")
    def square(self, items):
        return [(self.rank, item * item) for item in items]

    @dispatch("dp", join="concat")
    def reveal(self, items):
        return [(self.rank, *item) for item in items]

    @dispatch("all", join="concat")
    def ranks(self):
        return [self.rank]

    @dispatch("all")
    def facts(self):
        return self.unit, self.rank, self.port

    @dispatch("rank0")
    def first_rank(self):
        self.was_asked = True
        return self.rank

    @dispatch("all")
    def of_first_rank(self):
        """Return what can be pickled on rank 0 alone: a result that is sent from elsewhere is an error."""
        return "rank 0" if self.rank == 0 else threading.Lock()

    @dispatch("all", join="sum")
    def num_asked(self):
        return int(hasattr(self, "was_asked"))

    @dispatch("all")
    def fail(self, error, on_rank):
        if self.rank == on_rank:
            raise error

    @dispatch("all")
    def wait_for_release(self):
        assert self.may_go.wait(60)
        return "released"

    @dispatch("all", thread="beside")
    def release(self):
        self.may_go.set()

    @dispatch("all", thread="beside")
    def linger(self):
        time.sleep(0.1)
        return self.rank

    @dispatch("all")
    def hang_on(self, rank):
        if self.rank == rank:
            time.sleep(600)

    @dispatch("all")
    def die_on(self, rank):
        """Rank `rank` is gone, and the others notice it as a broken collective, before the driver can know of
        the death.
        """
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")


class Meeting:
    """A worker that is made once workers of as many groups as `num_groups` are being made; as `impossible` it
    never is.
    """

    def __init__(self, folder, name, num_groups, *, rank, address, port):
        if name == "impossible":
            raise ConfigError("no such model")
        (folder / f"{name}{rank}").touch()
        while sum(1 for _ in folder.iterdir()) < num_groups:
            time.sleep(0.01)

    @dispatch("all")
    def stands(self):
        return True


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(__name__):
        yield


def start(num_ranks, *, num_replicas=1, seconds=60.0):
    deadlines = CallDeadlines(seconds, key="critic.collective_timeout_s")
    return WorkerGroup.start(
        Counter,
        "unit",
        seats=[Seat()] * num_ranks,
        name="critic",
        deadlines=deadlines,
        num_replicas=num_replicas,
    )


@pytest.fixture(scope="module")
def replicated(cluster):
    """Four ranks: 0 and 1 are replicas of data-parallel rank 0, 2 and 3 of rank 1."""
    group = start(4, num_replicas=2)
    yield group
    group.stop()


def test_lists_are_cut_by_data_and_the_first_replica_answers(replicated):
    assert replicated.dp_size == 2
    assert replicated.run(Counter.tag, ["a", "b"], ["x", "y"], "!", times=2) == ["0:ax!!", "2:by!!"]
    assert replicated.run(Counter.total, [1, 2, 3, 4]) == {"total": 10.0, "ranks": 2.0}
    assert replicated.run(Counter.mean, [1, 2, 3, 4]) == 5.0
    assert replicated.run(Counter.largest, [4, 9, 3, 1]) == 9


def test_what_is_kept_stays_with_the_ranks_and_can_be_passed_on_or_read(replicated):
    kept = replicated.run(Counter.square, [1, 2, 3, 4])
    assert len(kept) == 4
    assert replicated.run(Counter.reveal, kept) == [(0, 0, 1), (0, 0, 4), (2, 2, 9), (2, 2, 16)]
    assert (kept[-1], kept[:1], list(kept)[2]) == ((2, 16), [(0, 1)], (2, 9))


def test_all_ranks_or_the_first_alone(replicated):
    assert replicated.run(Counter.ranks) == [0, 1, 2, 3]
    unit, rank, port = replicated.run(Counter.facts)
    assert (unit, rank) == ("unit", 0)
    assert port > 0
    assert replicated.run(Counter.of_first_rank) == "rank 0"
    assert replicated.run(Counter.first_rank) == 0
    assert replicated.run(Counter.num_asked) == 1
    assert len(set(replicated.pids())) == 4


def test_a_handle_waits_while_other_methods_run_beside_it(replicated):
    handle = replicated.begin(Counter.wait_for_release)
    replicated.run(Counter.release)
    assert handle.wait() == handle.wait() == "released"


def test_a_wrong_call_is_refused_before_any_rank_is_called(replicated):
    with pytest.raises(
        ValueError, match="total: 3 items cannot be split into equal parts for 2 data-parallel ranks"
    ):
        replicated.run(Counter.total, [1, 2, 3])
    with pytest.raises(TypeError, match="total: there is no list among the positional arguments"):
        replicated.run(Counter.total, 3)
    with pytest.raises(TypeError, match="__init__ is not marked by @dispatch"):
        replicated.run(Counter.__init__, "unit")


def test_errors_of_ours_arrive_as_they_were_and_others_name_the_rank(replicated):
    with pytest.raises(ConfigError, match=r"^no such model$"):
        replicated.run(Counter.fail, ConfigError("no such model"), 2)
    with pytest.raises(LearnerError, match=r"^critic rank 3 failed in 'fail': KeyError\('missing'\)$"):
        replicated.run(Counter.fail, KeyError("missing"), 3)
    assert replicated.run(Counter.ranks) == [0, 1, 2, 3]


def test_a_lost_rank_is_named_although_the_others_fail_first():
    group = start(2)
    try:
        with pytest.raises(LearnerError, match=r"^critic rank 1 was lost during 'die_on'$"):
            group.run(Counter.die_on, 1)
    finally:
        group.stop()


def launch(name, folder, *, num_groups, seconds=60.0):
    return WorkerGroup.launch(
        Meeting, folder, name, num_groups, seats=[Seat()], name=name, deadlines=CallDeadlines(seconds)
    )


def readiness(groups):
    return [group.readiness for group in groups]


def test_groups_are_made_side_by_side(tmp_path):
    groups = [
        launch(name, tmp_path, num_groups=2) for name in ("learner", "critic")
    ]  # one after the other, each would wait for ever
    try:
        wait_until_all_ready(groups)
        assert [group.starting for group in groups] == [{}, {}]
        assert [one.is_ready for one in readiness(groups)] == [True, True]
        assert all(group.run(Meeting.stands) for group in groups)
    finally:
        for group in groups:
            group.stop()


def test_the_first_that_fails_ends_the_wait_for_all(tmp_path):
    groups = [
        launch(name, tmp_path, num_groups=9, seconds=600.0) for name in ("learner", "impossible", "critic")
    ]
    try:
        with pytest.raises(ConfigError, match=r"^no such model$"):
            wait_until_all_ready(groups)
    finally:
        for group in groups:
            group.stop()


def test_the_first_that_is_late_is_named(tmp_path):
    groups = [
        launch("learner", tmp_path, num_groups=9, seconds=600.0),
        launch("critic", tmp_path, num_groups=9, seconds=0.5),
    ]
    try:
        late = (
            r"^critic rank 0 did not finish '(start|find_address)' in time \(.*\); start-up: learner 0/1, "
            r"critic 0/1$"
        )
        with pytest.raises(LearnerError, match=late):
            wait_until_all_ready(
                groups,
                table=lambda: ", ".join(f"{r.name} {r.num_ready}/{r.num_parts}" for r in readiness(groups)),
            )
    finally:
        for group in groups:
            group.stop()


def test_a_call_has_its_time_from_the_end_of_the_one_before(replicated):
    first, second, beside = (
        replicated.begin(method) for method in (Counter.facts, Counter.ranks, Counter.release)
    )
    assert second.deadline - first.deadline == pytest.approx(120.0)
    assert beside.deadline - first.deadline < 60.0  # in a thread of its own
    assert (first.is_over, [handle.wait() for handle in (second, beside)]) == (False, [[0, 1, 2, 3], None])
    assert replicated.begin(Counter.facts).deadline < second.deadline


def test_a_call_on_a_thread_of_its_own_may_have_a_bound_of_its_own(replicated):
    own = CallDeadlines(0.001, key="learner.save_timeout_s")
    group = WorkerGroup(
        replicated._hosts,
        name="critic",
        deadlines=CallDeadlines(60.0, of_threads={"beside": own}),
        num_replicas=2,
    )
    assert group.run(Counter.ranks) == [0, 1, 2, 3]
    with pytest.raises(
        LearnerError, match=r"did not finish 'linger' in time \(learner.save_timeout_s=0.001\)$"
    ):
        group.run(Counter.linger)
    patient = WorkerGroup(
        replicated._hosts,
        name="critic",
        deadlines=CallDeadlines(0.001, of_threads={"beside": CallDeadlines(60.0)}),
        num_replicas=2,
    )
    assert patient.run(Counter.linger) == 0


def test_ranks_that_have_not_answered_are_named():
    group = start(2)
    try:
        assert group.unanswered() == []
        group.begin(Counter.hang_on, 1)
        wanted = "critic rank 1 of 2 has been running 'hang_on' for "
        deadline = time.monotonic() + 60
        while not (said := group.unanswered()) or not said[0].startswith(
            wanted
        ):  # rank 0 ends at once, but not before it was asked
            assert time.monotonic() < deadline, said
    finally:
        group.stop()


def test_a_rank_that_hangs_is_named_with_the_bound():
    group = start(2, seconds=30.0)
    try:
        hurried = group.patient(0.01)  # 0.6 s for a call without items
        with pytest.raises(
            LearnerError,
            match=r"^critic rank 1 did not finish 'hang_on' in time \(critic.collective_timeout_s=30\)$",
        ):
            hurried.run(Counter.hang_on, 1)
    finally:
        group.stop()
