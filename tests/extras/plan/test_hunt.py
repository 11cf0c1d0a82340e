"""The hunt finds what is planted, replays it, and finds nothing in what is there."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from agentrl.buffer.ledger import Ledger
from agentrl.extras.plan.hunt import Schedule, ScheduleResult, hunt_lines, run_schedule, shrink

MOST = 200
"""Schedules in which a planted bug must be found."""


def first_violation() -> ScheduleResult:
    results = (run_schedule(Schedule(seed)) for seed in range(MOST))
    return next(result for result in results if result.law is not None)


def one_more(self: Ledger) -> bool:
    """`can_lease` with a bound that is off by one."""
    groups, rules = self.groups, self.rules
    ahead = math.ceil(rules.oversample * (rules.max_staleness + 1) * rules.groups_per_step)
    bound = min(groups.published + ahead + 1, rules.total_groups or 0)
    return groups.consumed + len(groups.ready) + len(groups.leased) < bound


def is_replayed(found: ScheduleResult) -> bool:
    """Return whether the shrunk schedule has no more faults, and repeats the same events."""
    smaller = shrink(found)
    again = run_schedule(smaller.schedule)
    assert len(smaller.faults) <= len(found.faults)
    assert smaller.law == found.law
    return (again.law, again.what, again.fingerprint) == (smaller.law, smaller.what, smaller.fingerprint)


def test_a_lease_that_is_not_released_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "release", lambda self, owner: [])
    found = first_violation()
    assert found.law == "dead"
    assert is_replayed(found)


def test_a_bound_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "can_lease", one_more)
    found = first_violation()
    assert found.law == "bound"
    assert is_replayed(found)


def test_a_stale_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take, drop_stale = Ledger.take, Ledger.drop_stale

    def with_one_more(self: Ledger, call):  # type: ignore[no-untyped-def]
        rules = self.rules
        self.rules = replace(rules, max_staleness=rules.max_staleness + 1)
        try:
            return call()
        finally:
            self.rules = rules

    monkeypatch.setattr(Ledger, "take", lambda self, *args: with_one_more(self, lambda: take(self, *args)))
    monkeypatch.setattr(Ledger, "drop_stale", lambda self: with_one_more(self, lambda: drop_stale(self)))
    assert first_violation().law == "staleness"


def test_all_laws_hold() -> None:
    lines = list(hunt_lines(12, seed=0))
    assert lines[-1].text.endswith("all laws hold")
    assert not any(line.is_violation for line in lines)


FOUND = {
    101: "events of a checkpoint of another folder lacked the members of groups in play (audit)",
    29: "events lacked the members of copies that another owner overtook (audit)",
    1488: "old groups were overtaken by younger ones, and became too stale together (waste)",
    107276: "groups that take longer than a lease were begun again for ever (stall)",
}
"""Seeds of bugs that the hunt found."""


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_mended(seed: int) -> None:
    result = run_schedule(Schedule(seed))
    assert result.law is None, result.what


def test_a_seed_repeats_in_another_process() -> None:
    """No order depends on addresses or hashes."""
    code = (
        "from agentrl.extras.plan.hunt import *\n"
        "print([run_schedule(Schedule(seed)).fingerprint for seed in (1, 5)])"
    )
    here = [run_schedule(Schedule(seed)).fingerprint for seed in (1, 5)]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(here)
    assert len(set(here)) == 2
