"""The plan of buckets: every tensor once, in order, within the budget."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.buckets import plan_buckets
from agentrl.types import TensorSpec

specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.uuids().map(str),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        shape=st.just((1,)),
        num_bytes=st.integers(1, 100),
    ),
    max_size=30,
)


@given(specs, st.integers(1, 150))
def test_buckets_keep_order_budget_and_dtype(tensors, max_bytes):
    buckets = plan_buckets(tensors, max_bytes=max_bytes)
    assert [t for bucket in buckets for t in bucket] == tensors
    assert all(bucket for bucket in buckets)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(t.num_bytes for t in bucket) <= max_bytes
        assert len({t.dtype for t in bucket}) == 1


@given(specs, st.integers(1, 150))
def test_no_two_neighbours_could_be_one(tensors, max_bytes):
    buckets = plan_buckets(tensors, max_bytes=max_bytes)
    for left, right in pairwise(buckets):
        assert (
            left[-1].dtype != right[0].dtype
            or sum(t.num_bytes for t in left) + right[0].num_bytes > max_bytes
        )
