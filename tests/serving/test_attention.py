"""The law of attention over packed requests."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.serving.embedded.attention import segment_attention


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=7),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(0, 2**31),
)
def test_packed_attention_equals_attention_of_each_segment_alone(segments, heads, seed):
    """A segment has n new queries after m old keys; the reference is the definition, in float64, query by
    query.
    """
    torch.manual_seed(seed)
    num_heads, groups, size = *heads, 8
    query_lengths = [n for n, _ in segments]
    key_lengths = [n + m for n, m in segments]
    query = torch.randn(num_heads, sum(query_lengths), size)
    key, value = torch.randn(2, groups, sum(key_lengths), size)
    got = segment_attention(
        query, key, value, query_lengths=query_lengths, key_lengths=key_lengths, scale=0.3
    )
    q_start = k_start = 0
    for n, m in segments:
        for i in range(n):
            for head in range(num_heads):
                group = head // (num_heads // groups)
                keys = key[group, k_start : k_start + m + i + 1].double()
                weights = torch.softmax(keys @ query[head, q_start + i].double() * 0.3, 0)
                expected = weights @ value[group, k_start : k_start + m + i + 1].double()
                torch.testing.assert_close(got[q_start + i, head].double(), expected, atol=1e-5, rtol=1e-4)
        q_start, k_start = q_start + n, k_start + n + m
