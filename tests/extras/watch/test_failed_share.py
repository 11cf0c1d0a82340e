"""`FailedShare`: when a run ends because attempts fail, and when it goes on."""

from __future__ import annotations

import pytest

from agentrl.config.rollout import RolloutConfig
from agentrl.errors import InfrastructureError
from agentrl.extras.watch.failed_share import MIN_ATTEMPTS, MIN_UNPROVEN, FailedShare
from agentrl.rollout.attempt_log import AttemptLog
from agentrl.rollout.player import unplayed
from agentrl.rollout.recorder import Attempt
from agentrl.tracking.attempts import AttemptCounts, FailedAttempt
from agentrl.tracking.failures import FailureTally
from agentrl.types import Failure, Lease, Message, Outcome, PluginId, Task

REWARD = PluginId("reward", "custom")
SEARCH = PluginId("tool", "search")
BOOM = Failure(
    "reward 'custom' raised KeyError: 'boom'",
    REWARD,
    "KeyError",
    "/home/me/mine.py:4",
    "Traceback\n  the frames\nKeyError",
)
TASK = Task("t:0", "sums", (Message("user", "?"),), "tool_agent")


def failed(
    failure: Failure = BOOM, *, outcome: Outcome = Outcome.REWARD_ERROR, became="dropped", group: int = 0
) -> FailedAttempt:
    return FailedAttempt(failure, outcome, became, "t:0", "sums", "tool_agent", group, 1, 7, 1234.5)


class Watch:
    """A FailedShare whose clock is set by hand; stall_timeout_s=100: the fault must last for 10 s."""

    def __init__(self, **rollout) -> None:
        self.now = 0.0
        self.share = FailedShare(
            RolloutConfig.model_validate(rollout), stall_timeout_s=100.0, clock=lambda: self.now
        )
        self.counts = AttemptCounts()
        self.tally = FailureTally(lambda line: None, where="failures.parquet")

    def pass_time(self, seconds: float, **ended: int) -> None:
        self.now += seconds
        self.counts.outcomes.update({Outcome(name): count for name, count in ended.items()})
        self.share.check(self.counts, self.tally)

    def use(self, plugin: PluginId, *, seconds: float, num: int, num_failed: int, became="dropped") -> None:
        """Let attempts use a plugin, of which so many fail by it, and as many again use none."""
        log = AttemptLog()
        cause = Failure(f"cause at {self.now:g} s", plugin, "KeyError", "mine.py:4")
        for number in range(2 * num):
            failure = cause if number < num_failed else None
            metrics = {f"num_calls/{plugin.name}": 1.0} if number < num else {}
            outcome = Outcome.TOOL_ERROR if failure else Outcome.COMPLETED
            last = unplayed(Attempt(number, 0, TASK), outcome, cause).replace(
                failure=failure, metrics=metrics
            )
            log.ended(last, Lease(number, TASK, 1, 7), became if failure else None)
        report = log.since(0)
        self.counts += report.counts
        self.tally.add(report.failed)
        self.pass_time(seconds)

    def goes_on(self, seconds: float, **ended: int) -> bool:
        try:
            self.pass_time(seconds, **ended)
        except InfrastructureError:
            return False
        return True


def test_a_run_whose_attempts_fail_ends_with_what_they_fail_with():
    watch = Watch()
    watch.tally.add([failed(failure=BOOM)])
    watch.pass_time(5, aborted=1000)
    with pytest.raises(
        InfrastructureError,
        match=r"2000 of the latest 2000 attempts failed \(rollout.max_failed_share=0.9\).*mine.py:4",
    ):
        watch.pass_time(5, aborted=1000)


def test_a_bound_of_none_or_a_higher_one_lets_it_go_on():
    for bound in (None, 1.0):
        watch = Watch(max_failed_share=bound)
        assert watch.goes_on(20, aborted=95, completed=5)
        assert watch.goes_on(20, aborted=95, completed=5)


def test_few_attempts_a_short_fault_and_one_that_is_over_end_nothing():
    watch = Watch()
    assert watch.goes_on(1000, aborted=MIN_ATTEMPTS - 1)
    watch = Watch()
    assert watch.goes_on(100, completed=1000)
    assert watch.goes_on(9, aborted=900)
    assert watch.goes_on(1, completed=200)
    assert watch.goes_on(1000, completed=200)


def test_a_fault_that_comes_after_hours_is_seen_as_soon_as_one_at_the_start():
    watch = Watch()
    for _ in range(100):
        watch.pass_time(10, completed=1000)
    watch.pass_time(5, aborted=100)
    with pytest.raises(InfrastructureError):
        watch.pass_time(10, aborted=100)


@pytest.mark.parametrize(
    ("outcome", "rollout"),
    [("model_error", {}), ("tool_error", {"on_outcome": {"tool_error": "replace"}})],
    ids=["server", "replaced"],
)
def test_servers_and_what_may_be_away_are_not_counted(outcome, rollout):
    watch = Watch(**rollout)
    for _ in range(5):
        assert watch.goes_on(20, **{outcome: 1000})


def test_a_tool_that_never_worked_ends_the_run_although_half_of_the_attempts_do_not_call_it():
    watch = Watch()
    watch.use(SEARCH, seconds=1, num=MIN_UNPROVEN - 1, num_failed=MIN_UNPROVEN - 1)
    with pytest.raises(
        InfrastructureError,
        match=r"tool 'search' failed in 16 of the latest 16 attempts that used it, and ended them "
        r"\(rollout.max_failed_share=0.9\); the first: cause at 0 s \(mine.py:4\)",
    ):
        watch.use(SEARCH, seconds=1, num=1, num_failed=1)


def test_a_tool_that_has_worked_may_be_away_for_a_short_time():
    watch = Watch()
    watch.use(SEARCH, seconds=1, num=100, num_failed=0)
    watch.use(SEARCH, seconds=9, num=100, num_failed=100)
    with pytest.raises(InfrastructureError, match="tool 'search' failed in 200 of the latest 200 attempts"):
        watch.use(SEARCH, seconds=9, num=100, num_failed=100)


@pytest.mark.parametrize(("bound", "became"), [(None, "dropped"), (0.9, "replaced")])
def test_a_tool_that_may_be_away_ends_nothing(bound, became):
    watch = Watch(max_failed_share=bound)
    for _ in range(5):
        watch.use(SEARCH, seconds=20, num=100, num_failed=100, became=became)
    assert watch.counts.used[SEARCH] == 500, "every attempt used the tool, and the run goes on"
