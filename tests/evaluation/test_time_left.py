"""The time left of an evaluation, against simulated schedules of which the truth is known."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.evaluation.time_left import Durations, TimeLeft

TOKENS_PER_S = 10.0
NO_LIMIT = 10**9


def events(durations: Sequence[float], slots: int) -> Iterator[tuple[float, int, bool]]:
    """Yield (time, attempt, is its end) of attempts that start in order, each in the first free slot."""
    running: list[tuple[float, int]] = []
    now = 0.0
    for attempt, seconds in enumerate(durations):
        if len(running) == slots:
            now, ended = heapq.heappop(running)
            yield now, ended, True
        yield now, attempt, False
        heapq.heappush(running, (now + seconds, attempt))
    while running:
        now, ended = heapq.heappop(running)
        yield now, ended, True


def estimate(durations: Sequence[float], slots: int, share: float, *, max_tokens: int) -> tuple[float, float]:
    """Return the estimated and the true seconds left after `share` of the whole time, as shares of it."""
    schedule = list(events(durations, slots))
    whole_s = schedule[-1][0]
    now = 0.0
    left = TimeLeft(len(durations), max_tokens=max_tokens, timeout_s=math.inf, clock=lambda: now)
    for time_s, attempt, is_end in schedule:
        if time_s > share * whole_s:
            break
        now = time_s
        if is_end:
            left.ended(str(attempt), math.ceil(durations[attempt] * TOKENS_PER_S))
        else:
            left.began(str(attempt))
    now = share * whole_s
    return left.seconds(slots) / whole_s, 1 - share


def old_estimate(durations: Sequence[float], slots: int, share: float) -> float:
    """Return the estimate by the pace of finished attempts alone, as a share of the whole time."""
    schedule = list(events(durations, slots))
    num_ended = sum(is_end for time_s, _, is_end in schedule if time_s <= share * schedule[-1][0])
    return share * (len(durations) - num_ended) / num_ended


slots_and_rounds = st.tuples(st.integers(2, 32), st.integers(6, 10))


@settings(deadline=None)
@given(slots_and_rounds, st.randoms(use_true_random=False), st.floats(0.01, 1000))
def test_attempts_of_like_length_are_estimated_to_a_fifth(shape, chance, unit_s):
    slots, rounds = shape
    durations = [unit_s * chance.uniform(1, 1.5) for _ in range(slots * rounds)]
    for share, bound in ((0.5, 0.2), (0.8, 0.12)):
        estimated, true = estimate(durations, slots, share, max_tokens=NO_LIMIT)
        assert abs(estimated - true) <= bound


@settings(deadline=None)
@given(slots_and_rounds, st.data())
def test_in_any_order_the_error_is_bounded_by_the_spread_of_the_lengths(shape, data):
    slots, rounds = shape
    num = slots * rounds
    durations = data.draw(st.lists(st.floats(1, 2), min_size=num, max_size=num))
    for share, bound in ((0.5, 0.75), (0.8, 0.35)):
        estimated, true = estimate(durations, slots, share, max_tokens=NO_LIMIT)
        assert abs(estimated - true) <= bound


@given(st.integers(1, 32), st.integers(2, 20), st.floats(0.1, 100))
def test_attempts_of_one_length_are_estimated_exactly(slots, rounds, seconds):
    for share in (0.5, 0.8):
        estimated, true = estimate([seconds] * slots * rounds, slots, share, max_tokens=NO_LIMIT)
        assert estimated == pytest.approx(true, abs=1e-6)


def test_a_few_long_attempts_are_known_by_their_budget():
    errors: dict[float, list[float]] = {0.5: [], 0.8: []}
    old: dict[float, list[float]] = {0.5: [], 0.8: []}
    for seed in range(100):
        chance = random.Random(seed)
        slots = chance.choice((8, 16, 32))
        lengths = [100.0 if chance.random() < 0.1 else chance.uniform(4, 12) for _ in range(8 * slots)]
        for share in errors:
            estimated, true = estimate(lengths, slots, share, max_tokens=round(100 * TOKENS_PER_S))
            errors[share].append(abs(estimated - true))
            old[share].append(abs(old_estimate(lengths, slots, share) - true))
    nine_in_ten = {share: sorted(found)[89] for share, found in errors.items()}
    assert nine_in_ten[0.5] <= 0.2
    assert nine_in_ten[0.8] <= 0.05
    assert sorted(old[0.5])[89] >= 0.4, "the pace of finished attempts alone"


def test_the_first_of_many_at_once_does_not_set_the_pace():
    """32 attempts of 105 to 130 s, 16 at once: after the first, the pace alone said 54 minutes."""
    chance = random.Random(0)
    durations = [105.0, *(chance.uniform(106, 130) for _ in range(31))]
    whole_s = list(events(durations, 16))[-1][0]
    share = 105.5 / whole_s
    estimated, true = estimate(durations, 16, share, max_tokens=NO_LIMIT)
    assert estimated == pytest.approx(true, rel=0.75)
    assert old_estimate(durations, 16, share) > 10 * true


def test_an_attempt_at_its_budget_is_about_to_end():
    now = 100.0
    left = TimeLeft(3, max_tokens=200, timeout_s=math.inf, clock=lambda: now)
    for key in "abc":
        left.began(key)
    assert math.isnan(left.seconds(3)), "nothing has ended yet"
    now = 110.0
    left.ended("a", 100)  # ten tokens per second: nothing takes more than 20 s
    assert 0 < left.seconds(3) <= 5.0
    now = 120.0
    assert left.seconds(3) == 0.0
    left.ended("b", 200)
    left.ended("c", 200)
    assert left.seconds(3) == 0.0


@given(
    st.lists(st.floats(0, 100), min_size=1),
    st.lists(st.floats(0, 100)),
    st.lists(st.floats(0, 0.999), min_size=2),
    st.floats(0, 120),
)
def test_quantiles_rise_and_never_lie_before_the_time_so_far(finished, running, shares, after_s):
    durations = Durations(finished, running, limit_s=math.inf)
    found = [durations.quantile(share, after_s=after_s) for share in sorted(shares)]
    assert found == sorted(found)
    assert found[0] >= after_s
    assert found[-1] <= max(after_s, 1.5 * max(finished + running))


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.001, 0.999))
def test_without_attempts_in_flight_quantiles_are_those_of_the_finished(finished, share):
    found = Durations(finished, [], limit_s=math.inf).quantile(share)
    assert sum(seconds <= found for seconds in finished) >= share * len(finished)
    assert sum(seconds < found for seconds in finished) <= share * len(finished) + 1e-6


def test_more_waiting_attempts_than_are_simulated_count_at_the_mean():
    estimated, true = estimate([1.0] * 5000, 4, 0.5, max_tokens=NO_LIMIT)
    assert estimated == pytest.approx(true, abs=1e-3)
