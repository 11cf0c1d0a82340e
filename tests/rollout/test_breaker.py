"""The circuit breaker against a model of it that keeps nothing but the log of what happened."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.servers.breaker import CircuitBreaker

PAUSE_S = 10.0


class BreakerMachine(RuleBasedStateMachine):
    """Calls begin, end and are given up in any order and at any time."""

    @initialize(max_failures=st.integers(1, 4))
    def build(self, max_failures):
        self.max_failures = max_failures
        self.breaker = CircuitBreaker(max_failures=max_failures, pause_s=PAUSE_S)
        self.now = 0.0
        self.running: list[tuple[int, int]] = []  # (ticket, number of changes at its beginning)
        self.row = 0  # failures in a row of calls that began since the last change
        self.opened_at: float | None = None
        self.is_probing = False
        self.changes = 0
        self.openings = 0

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, PAUSE_S]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def begin(self):
        ticket = self.breaker.begin(self.now)
        if self.opened_at is None:
            assert ticket is not None
        elif self.is_probing or self.now - self.opened_at < PAUSE_S:
            assert ticket is None
        else:
            assert ticket is not None
            self.is_probing = True
        if ticket is not None:
            self.running.append((ticket, self.changes))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["succeeded", "failed", "abandoned"]))
    def end(self, data, how):
        ticket, began = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if how == "failed":
            self.breaker.failed(ticket, self.now)
        else:
            getattr(self.breaker, how)(ticket)
        if began != self.changes:
            return  # it began before the breaker last changed
        is_probe = self.is_probing
        self.row = {"succeeded": 0, "failed": self.row + 1, "abandoned": self.row}[how]
        if how == "failed" and (is_probe or self.row == self.max_failures):
            self.opened_at, self.row = self.now, 0
            self.changes += 1
            self.openings += 1
        elif how == "succeeded" and is_probe:
            self.opened_at = None
            self.changes += 1
        if is_probe:
            self.is_probing = False

    @invariant()
    def agree(self):
        if hasattr(self, "breaker"):
            assert self.breaker.is_open == (self.opened_at is not None)
            assert self.breaker.num_openings == self.openings


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def failing(breaker: CircuitBreaker, times: int, *, now: float) -> None:
    for _ in range(times):
        breaker.failed(breaker.begin(now), now)


def test_a_life():
    breaker = CircuitBreaker(max_failures=3, pause_s=PAUSE_S)
    failing(breaker, 2, now=0.0)
    breaker.succeeded(breaker.begin(0.0))
    failing(breaker, 2, now=1.0)
    assert not breaker.is_open  # not three in a row
    failing(breaker, 1, now=2.0)
    assert breaker.is_open
    assert breaker.begin(2.0 + PAUSE_S - 0.01) is None
    probe = breaker.begin(2.0 + PAUSE_S)
    assert probe is not None
    assert breaker.begin(2.0 + PAUSE_S) is None  # one at a time
    breaker.failed(probe, 13.0)
    assert breaker.begin(13.0 + PAUSE_S - 0.01) is None
    breaker.succeeded(breaker.begin(13.0 + PAUSE_S))
    assert not breaker.is_open
    assert breaker.num_openings == 2


def test_an_abandoned_probe_lets_the_next_one_try():
    breaker = CircuitBreaker(max_failures=1, pause_s=PAUSE_S)
    failing(breaker, 1, now=0.0)
    breaker.abandoned(breaker.begin(PAUSE_S))
    assert breaker.is_open
    assert breaker.begin(PAUSE_S) is not None


@pytest.mark.parametrize("late", ["succeeded", "failed"])
def test_calls_from_before_say_nothing_about_after(late):
    breaker = CircuitBreaker(max_failures=1, pause_s=PAUSE_S)
    slow = breaker.begin(0.0)
    failing(breaker, 1, now=1.0)
    if late == "succeeded":
        breaker.succeeded(slow)
    else:
        breaker.failed(slow, 9.0)
    assert breaker.is_open
    assert breaker.begin(1.0 + PAUSE_S) is not None  # the pause counts from the opening


def test_each_opening_without_a_success_between_lasts_longer():
    breaker = CircuitBreaker(max_failures=1, pause_s=1.0, max_pause_s=4.0, is_open=True)
    breaker.succeeded(breaker.begin(0.0))  # begun open: the first call is a probe
    assert (breaker.is_open, breaker.num_openings) == (False, 0)
    now = 0.0
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        failing(breaker, 1, now=now)
        assert breaker.begin(now + 0.99 * pause_s) is None
        now += pause_s
        breaker.succeeded(breaker.begin(now))  # the probe
    breaker.succeeded(breaker.begin(now))  # an ordinary call
    failing(breaker, 1, now=now)
    assert breaker.begin(now + 1.0) is not None
