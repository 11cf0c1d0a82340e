"""Gaps of the event loop: never counted shorter than they were, on clocks of our own and on the real ones."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.loop_gaps import PREFIX, REFRESH_NS, SHORT_S, LoopGaps, gap_metrics

BUCKET = 2**0.25
"""Upper over lower bound of a bucket."""
TASK: trio.lowlevel.Task = None  # type: ignore[assignment]  # the instrument does not look at it


@dataclass
class Clocks:
    """A thread that computes, and waits for the network."""

    wall_ns: int = 7
    thread_ns: int = 3

    def compute(self, ns: int) -> None:
        self.wall_ns += ns
        self.thread_ns += ns

    def wait(self, ns: int) -> None:
        self.wall_ns += ns


def bounds(counters) -> dict[float, float]:
    return {float(name.removeprefix(PREFIX)): count for name, count in counters.items()}


steps = st.lists(st.tuples(st.integers(0, 80_000_000), st.integers(0, 5_000_000)), min_size=1, max_size=30)


@given(steps)
def test_a_gap_is_counted_at_least_as_long_as_it_was_and_hardly_longer(steps):
    clocks = Clocks()
    gaps = LoopGaps(lambda: clocks.wall_ns, lambda: clocks.thread_ns)
    gaps.before_run()
    for computed, waited in steps:
        before = bounds(gaps.counters())
        clocks.wait(waited)
        clocks.compute(computed)
        gaps.after_task_step(TASK)
        after = bounds(gaps.counters())
        (counted,) = [bound for bound, count in after.items() if count > before.get(bound, 0)]
        assert computed / 1e9 <= counted * 1.00001
        assert counted <= max(SHORT_S, (computed + REFRESH_NS) / 1e9 * BUCKET * 1.00001)
    assert sum(bounds(gaps.counters()).values()) == len(steps)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=50), st.integers(1, 400))
def test_the_percentile_is_that_of_the_sorted_gaps(indices, repeats):
    values = sorted([SHORT_S * BUCKET**index for index in indices] * repeats)
    growth = {f"{PREFIX}{value:.6g}": float(values.count(value)) for value in set(values)}
    measured = gap_metrics({**growth, "finished": 12.0})
    wanted = values[len(values) - 1 - math.floor(len(values) / 1000 + 1e-9)]
    assert measured["p999"] == pytest.approx(wanted, rel=1e-5)
    assert measured["max"] == pytest.approx(values[-1], rel=1e-5)


def test_nothing_counted_is_nothing_reported_and_an_actor_replaced_is_no_gap():
    assert gap_metrics({"finished": 3.0}) == {}
    assert gap_metrics({f"{PREFIX}0.5": -4.0, f"{PREFIX}0.001": 10.0}) == {"p999": 0.001, "max": 0.001}


def test_a_task_that_computes_is_seen_and_one_that_waits_is_not():
    async def compute() -> None:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        await trio.lowlevel.checkpoint()

    async def wait() -> None:
        await trio.sleep(0.06)

    measured = {}
    for task in (compute, wait):
        gaps = LoopGaps()
        trio.run(task, instruments=[gaps])
        measured[task] = gap_metrics(gaps.counters())["max"]
    assert measured[compute] >= 0.03
    assert measured[wait] < 0.06
