"""Laws of the embedded server's sampling. The reference is a full sort and torch.multinomial in float64."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from agentrl.extras.embedded.engine import Job
from agentrl.extras.embedded.sampler import GREEDY, RowSampling, candidates_of, sample

rows = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    top_k=st.sampled_from([-1, 1, 3, 10_000]),
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


def law(logits, row):
    """The probability of each token, f64[V]."""
    probs = np.exp(log_softmax(logits.double().numpy() / row.temperature))
    kept = np.zeros_like(probs)
    kept[list(allowed(probs, row))] = 1.0
    return probs * kept / (probs * kept).sum()


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=6), st.integers(0, 2**31))
def test_each_row_samples_by_its_own_parameters(row_list, seed):
    torch.manual_seed(seed)
    logits = torch.randn(len(row_list), 11) * 3
    tokens, logprobs = sample(logits, row_list, torch.rand(len(row_list)).tolist())
    for i, row in enumerate(row_list):
        reference = log_softmax(logits[i].double().numpy() / (row.temperature or 1.0))
        assert logprobs[i].item() == pytest.approx(reference[tokens[i]], abs=1e-5)
        if row.temperature == 0.0:
            assert tokens[i].item() == logits[i].argmax().item()
        else:
            assert tokens[i].item() in allowed(np.exp(reference), row)


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(0, 2**31), st.sampled_from([11, 6000]), st.booleans())
def test_truncation_keeps_exactly_the_allowed_tokens(row, seed, vocabulary, has_ties):
    """With 6,000 tokens, flat distributions need more candidates than are selected first."""
    torch.manual_seed(seed)
    logits = torch.randn(vocabulary).double() * (0.1 if vocabulary > 11 else 2)
    weights = torch.exp(logits.round() if has_ties else logits).numpy()
    weights /= weights.max()
    kept = candidates_of(weights, weights.sum(), row)
    # Dividing by the sum as the reference does would round ties at the edge of top_p differently.
    whole = RowSampling(1.0, row.top_p * weights.sum() if row.top_p < 1 else np.inf, row.top_k, row.min_p)
    assert kept.tolist() == sorted(allowed(weights, whole))


@pytest.mark.parametrize(
    "row",
    [
        RowSampling(),
        RowSampling(0.5),
        RowSampling(2.0, top_p=0.8),
        RowSampling(top_k=7),
        RowSampling(top_k=10_000),
        RowSampling(top_p=0.9, top_k=12, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies_follow_the_law_and_those_of_multinomial(row):
    torch.manual_seed(1)
    generator, num = random.Random(2), 10_000
    logits = torch.randn(40).mul(2).round().div(2)  # many ties
    expected = law(logits, row)
    tokens, _ = sample(logits.repeat(num, 1), [row] * num, [generator.random() for _ in range(num)])
    possible = expected > 0
    counts = np.bincount(tokens.numpy(), minlength=40)
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        assert chisquare(counts[possible], num * expected[possible]).pvalue > 1e-3
    drawn = torch.multinomial(torch.from_numpy(expected), num, replacement=True)
    distance = np.abs(counts - np.bincount(drawn.numpy(), minlength=40)).sum() / num / 2
    assert distance < 0.04


def test_a_point_of_the_unit_interval_is_the_token_whose_stretch_it_lies_in():
    logits = torch.log(torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]))
    points = [0.0, 0.2, 0.26, 0.74, 0.76, 1 - 2**-53]
    for row in (RowSampling(), RowSampling(top_k=3)):
        tokens, _ = sample(logits.repeat(6, 1), [row] * 6, points)
        assert tokens.tolist() == [1, 1, 3, 3, 4, 4]


def test_the_tail_of_a_large_vocabulary_is_reached():
    """In float32, sums of 152,000 equal weights lose a tenth of a token's probability at each step."""
    logits = torch.zeros(1, 151_936)
    for token in (0, 1, 75_968, 151_934, 151_935):
        for row in (RowSampling(), RowSampling(min_p=0.5)):
            drawn, logprob = sample(logits, [row], [(token + 0.5) / 151_936])
            assert drawn.item() == token
            assert logprob.item() == pytest.approx(-np.log(151_936), abs=1e-6)


def test_greedy_and_a_tiny_top_p_take_the_most_likely_token():
    torch.manual_seed(0)
    logits = torch.randn(64, 1000)
    for row in (GREEDY, RowSampling(top_p=1e-9), RowSampling(top_k=1), RowSampling(1e-5)):
        tokens, logprobs = sample(logits, [row] * 64, torch.rand(64).tolist())
        assert torch.equal(tokens, logits.argmax(-1))
        expected = torch.log_softmax(logits.double() / (row.temperature or 1.0), -1).amax(-1)
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_logprob_and_leaves_others_alone(value):
    logits = torch.zeros(3, 5)
    logits[1, 2] = value
    for row in (GREEDY, RowSampling(), RowSampling(top_k=2), RowSampling(0.5, top_p=0.5, min_p=0.1)):
        tokens, logprobs = sample(logits, [row] * 3, [0.1] * 3)
        assert logprobs.isnan().tolist() == [False, True, False]
        assert tokens.max() < 5


@settings(max_examples=40, deadline=None)
@given(st.lists(rows, min_size=1, max_size=8), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_the_other_rows(row_list, seed, shuffler):
    torch.manual_seed(seed)
    logits, points = torch.randn(len(row_list), 30_000), torch.rand(len(row_list)).tolist()
    together = [part.tolist() for part in sample(logits, row_list, points)]
    order = list(range(len(row_list)))
    shuffler.shuffle(order)
    order = order[: len(order) // 2 + 1]
    some = sample(logits[order], [row_list[i] for i in order], [points[i] for i in order])
    assert [part.tolist() for part in some] == [[part[i] for i in order] for part in together]


def test_jobs_with_a_seed_repeat_their_numbers_and_others_do_not():
    def numbers(seed):
        job = Job("key", RowSampling(seed=seed), None)
        return [job.uniforms.random() for _ in range(4)]

    assert numbers(3) == numbers(3) != numbers(4)
    assert numbers(None) != numbers(None)
