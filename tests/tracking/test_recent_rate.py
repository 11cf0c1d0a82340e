"""Rates over the last steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tracking.recent_rate import WINDOW_S, RecentRate

QUARTERS = st.integers(1, 240).map(lambda count: count / 4)  # seconds whose sums are exact


@given(st.lists(st.tuples(QUARTERS, st.integers(0, 10_000)), min_size=1, max_size=60))
def test_the_rate_is_over_the_fewest_last_steps_that_fill_the_window_or_over_all(steps):
    rate, lengths, counts = RecentRate(7.0), [], []
    for step_s, count in steps:
        lengths.append(step_s)
        counts.append(count)
        sizes = range(1, len(lengths) + 1)
        size = next((n for n in sizes if sum(lengths[-n:]) >= WINDOW_S), len(lengths))
        expected = sum(counts[-size:]) / sum(lengths[-size:])
        assert rate.after(step_s, total=7.0 + sum(counts)) == pytest.approx(expected)
