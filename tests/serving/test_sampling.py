"""Laws of the embedded server's own mathematics: sampling and attention of packed requests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.serving.embedded.attention import segment_attention
from agentrl.serving.embedded.sampler import GREEDY, RowSampling, sample, truncate

rows = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([-1, 1, 3]),
    min_p=st.sampled_from([0.0, 0.2]),
)


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def allowed(probs, row):
    """The tokens that top_k, top_p and min_p leave, one at a time from the most likely."""
    kept, mass = set(), 0.0
    for rank, token in enumerate(np.argsort(-probs, kind="stable")):
        if rank > 0 and (
            (row.top_k > 0 and rank >= row.top_k)
            or mass >= row.top_p
            or probs[token] < row.min_p * probs.max()
        ):
            break
        kept.add(int(token))
        mass += probs[token]
    return kept


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=6), st.integers(0, 2**31))
def test_each_row_samples_by_its_own_parameters(row_list, seed):
    torch.manual_seed(seed)
    logits = torch.randn(len(row_list), 11) * 3
    tokens, logprobs = sample(logits, row_list)
    for i, row in enumerate(row_list):
        reference = log_softmax(logits[i].double().numpy() / (row.temperature or 1.0))
        assert logprobs[i].item() == pytest.approx(reference[tokens[i]], abs=1e-5)
        if row == GREEDY or row.temperature == 0.0:
            assert tokens[i].item() == logits[i].argmax().item()
        else:
            assert tokens[i].item() in allowed(np.exp(reference), row)


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(0, 2**31))
def test_truncation_keeps_exactly_the_allowed_tokens_unchanged(row, seed):
    torch.manual_seed(seed)
    probs = torch.softmax(torch.randn(1, 11).double() * 2, -1)
    kept = truncate(probs, [row])[0]
    assert set(kept.nonzero().flatten().tolist()) == allowed(probs[0].numpy(), row)
    assert torch.equal(kept[kept > 0], probs[0][kept > 0])


def test_frequencies_follow_the_distribution():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0])
    tokens, _ = sample(logits.repeat(40_000, 1), [RowSampling(temperature=2.0)] * 40_000)
    frequencies = np.bincount(tokens.numpy(), minlength=3) / 40_000
    np.testing.assert_allclose(frequencies, np.exp(log_softmax(logits.numpy() / 2.0)), atol=0.01)


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
