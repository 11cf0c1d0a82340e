"""Deadlines of publishes grow with their bytes, at the rate of the last one."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.weights.pace import FIRST_BYTES_PER_S, SLACK, Pace

BYTES = st.integers(1, 10**13)


@given(st.floats(0.1, 1000), BYTES)
def test_before_anything_was_measured_bytes_add_time_at_the_assumed_rate(timeout_s, num_bytes):
    pace = Pace(timeout_s)
    assert pace.allowed_s(0) == timeout_s
    assert pace.allowed_s(num_bytes) == timeout_s + SLACK * num_bytes / FIRST_BYTES_PER_S


@given(BYTES, st.floats(0.001, 10_000), BYTES)
def test_a_publish_may_take_so_many_times_as_long_for_its_bytes_as_the_last_one(before, seconds, num_bytes):
    pace = Pace(1.0)
    pace.observe(10 * before, seconds / 7)
    pace.observe(before, seconds)
    own_s = pace.allowed_s(num_bytes) - 1.0
    assert abs(own_s - SLACK * seconds * num_bytes / before) <= 1e-9 * (1 + own_s)


def test_nothing_was_learned_from_an_attempt_without_bytes():
    pace = Pace(1.0)
    pace.observe(0, 5.0)
    assert pace.allowed_s(10**9) == 1.0 + SLACK * 10**9 / FIRST_BYTES_PER_S


def test_a_message_names_the_key_and_the_bytes():
    assert Pace(120).limit(1000) == "rollout.weights.timeout_s=120"
    assert Pace(120).limit(65 * 10**9) == "rollout.weights.timeout_s=120, and 1300 s for 65.0 GB"
