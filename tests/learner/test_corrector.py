"""What the correction decides about an update, by hand: which tokens stay, what they weigh, which are
singled out; the same wherever the segments of a sequence are.
"""

import itertools
import math

import numpy as np
import pytest

from agentrl.config.algorithm import AlgorithmConfig, ClipCovConfig, KLCovConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.batch import Sample
from agentrl.learner.correction import Corrector
from agentrl.learner.packing import pack
from agentrl.learner.ranks import join_ranks, leave_ranks
from parts.learner import reserved_port

SCORE = math.log(0.1)
"""Proximal log-probability of every token, unless a test says otherwise."""


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    join_ranks(LearnerConfig(), rank=0, address="127.0.0.1", port=reserved_port())
    yield
    leave_ranks()


def sample(index, ratios, *, out=(), advantages=None, segments=1):
    """An attempt of `segments` equal segments, each a token of prompt and then action tokens of probability
    0.1, on which proximal / behavior is `ratios`; `out`: places of tokens that left the loss before.
    """
    rows = np.split(np.array(ratios, np.float64), segments)
    mask = np.concatenate([[False, *[True] * len(row)] for row in rows])
    behavior, laid = np.zeros(len(mask)), np.zeros(len(mask))
    behavior[mask] = SCORE - np.log(np.concatenate(rows))
    laid[mask] = np.arange(1, len(ratios) + 1) if advantages is None else advantages
    loss_mask = mask.copy()
    loss_mask[np.flatnonzero(mask)[list(out)]] = False
    starts = tuple(itertools.accumulate([len(row) + 1 for row in rows[:-1]], initial=0))
    return Sample(index, np.arange(len(mask), dtype=np.int32), mask, loss_mask, behavior, laid, starts)


def correct(samples, *, max_tokens=1000, mode="decoupled", scores=SCORE, policy_loss="ppo_clip", **own):
    """Return the microbatches and their corrections. `scores`: proximal log-probability of every token, or
    None.
    """
    options = {key: own.pop(key) for key in ("clip_cov", "kl_cov") if key in own}
    algorithm = AlgorithmConfig(policy_loss=policy_loss, correction=CorrectionConfig(**own), **options)
    [microbatches] = pack(samples, max_tokens=max_tokens, world_size=1)
    proximal = [None if scores is None else np.full(m.num_action_tokens, scores) for m in microbatches]
    return microbatches, Corrector(algorithm, mode).correct(microbatches, proximal)


def by_token(microbatches, columns):
    """{(sample, place): value} of a column of each microbatch."""
    return {
        (int(index), int(place)): value
        for m, column in zip(microbatches, columns, strict=True)
        for index, place, value in zip(
            m.sample_indices[m.sequence_ids], m.action_places, column.tolist(), strict=True
        )
    }


def in_order(microbatches, columns):
    return [value for _, value in sorted(by_token(microbatches, columns).items())]


# -------------------------------------------------------------------------------------------------- rejection

FAR = RejectionConfig(level="token", upper=1.5)
LOW = RejectionConfig(level="token", lower=0.7)
LONG = RejectionConfig(level="sequence_sum", upper=1.9)


@pytest.mark.parametrize(
    ("own", "accepted", "rejected"),
    [
        ({}, [1, 1, 1, 0, 1], {}),
        ({"max_lag": 3}, [1, 1, 1, 0, 1], {"max_lag": 1}),
        ({"reject": {"far": FAR}}, [0, 1, 1, 0, 1], {"far": 1}),
        ({"reject": {"far": FAR, "low": LOW}}, [0, 1, 1, 0, 0], {"far": 1, "low": 1}),
        # Each stage counts on its own: the first token is rejected by both.
        ({"reject": {"far": FAR, "long": LONG}}, [0, 0, 1, 0, 1], {"far": 1, "long": 2}),
        ({"max_lag": 3, "reject": {"low": LOW}}, [1, 1, 1, 0, 0], {"max_lag": 1, "low": 1}),
        # (log rho')^2 is 0.48, 0, 0.01, 0.48: the last and the first are equal, and stay or go together.
        ({"m2po_threshold": 0.3}, [1, 1, 1, 0, 1], {"m2po": 0}),
        ({"m2po_threshold": 0.2}, [0, 1, 1, 0, 0], {"m2po": 2}),
        ({"m2po_threshold": 0.001}, [0, 1, 0, 0, 0], {"m2po": 3}),
        # M2PO sees only what the others left: 0, 0.01 and 0.48, whose mean is 0.163.
        ({"m2po_threshold": 0.2, "reject": {"far": FAR}}, [0, 1, 1, 0, 1], {"far": 1, "m2po": 0}),
    ],
)
@pytest.mark.parametrize("max_tokens", [1000, 1])
def test_which_tokens_are_accepted_and_how_many_each_stage_rejects(own, accepted, rejected, max_tokens):
    """Ratios 2 and 1; 1.1 and 0.5, of which the 0.5 left the loss before; 0.5."""
    samples = [sample(0, [2.0, 1.0]), sample(1, [1.1, 0.5], out=[1]), sample(2, [0.5])]
    microbatches, found = correct(samples, max_tokens=max_tokens, weight="none", **own)
    assert in_order(microbatches, [c.accepted for c in found]) == [bool(flag) for flag in accepted]
    assert all(set(c.rejected) == set(rejected) for c in found)
    assert {name: sum(c.rejected[name] for c in found) for name in rejected} == rejected


# ---------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("own", "weights"),
    [
        ({"weight": "none"}, [1, 1, 1, 1]),
        ({}, [2, 1, 0.5, 1.25]),
        ({"cap": 9.0}, [4, 1, 0.5, 1.25]),
        ({"cap": 9.0, "floor": 0.75}, [4, 1, 0.75, 1.25]),
        ({"cap": 3.0, "floor": 0.75, "outside": "mask"}, [0, 1, 0, 1.25]),
        ({"cap": 9.0, "weight": "sequence"}, [4, 4, 0.625, 0.625]),
        ({"cap": 9.0, "weight": "geometric"}, [2, 2, 0.625**0.5, 0.625**0.5]),
        ({"cap": 9.0, "mode": "bypass"}, [1, 1, 1, 1]),
        ({"cap": 9.0, "mode": "on_policy"}, [1, 1, 1, 1]),
        ({"cap": 9.0, "scores": None}, [1, 1, 1, 1]),
    ],
)
def test_what_a_token_weighs(own, weights):
    samples = [sample(0, [4.0, 1.0]), sample(1, [0.5, 1.25])]
    microbatches, found = correct(samples, **own)
    assert in_order(microbatches, [c.weights for c in found]) == pytest.approx(weights)
    products = [0.0, 0.0] if own.get("scores", 0) is None else [math.log(4.0), math.log(0.625)]
    [together] = found
    order = np.argsort(microbatches[0].sample_indices)
    assert together.log_products[order].tolist() == pytest.approx(products)


@pytest.mark.parametrize(
    ("attempts", "own", "weights"),
    [
        # Tokens: the mean of 4, 1 and 1 is 2.
        ([[4.0, 1.0], [1.0]], {}, [2, 0.5, 0.5]),
        ([[0.5], [0.25]], {}, [4 / 3, 2 / 3]),
        ([[0.25]], {}, [1]),
        # Sequences: 4 and 2 have a mean of 3, however long they are.
        ([[2.0, 2.0], [2.0]], {"weight": "sequence"}, [4 / 3, 4 / 3, 2 / 3]),
        ([[2.0, 2.0], [2.0, 1.0, 1.0]], {"weight": "sequence"}, [4 / 3, 4 / 3, 2 / 3, 2 / 3, 2 / 3]),
        ([[4.0, 1.0], [1.0]], {"weight": "geometric"}, [4 / 3, 4 / 3, 2 / 3]),
        # The 8 is rejected: neither it nor its weight is in the mean of 4, 1 and 1.
        (
            [[8.0, 4.0], [1.0, 1.0]],
            {"reject": {"far": RejectionConfig(level="token", upper=5.0)}},
            [4, 2, 0.5, 0.5],
        ),
        # Where all weights are 0, they stay 0.
        ([[8.0], [9.0]], {"cap": 2.0, "outside": "mask"}, [0, 0]),
    ],
)
@pytest.mark.parametrize("max_tokens", [1000, 1])
def test_normalized_weights_have_a_mean_of_1(attempts, own, weights, max_tokens):
    samples = [sample(index, ratios) for index, ratios in enumerate(attempts)]
    microbatches, found = correct(
        samples, max_tokens=max_tokens, self_normalize=True, **{"cap": 100.0, **own}
    )
    assert in_order(microbatches, [c.weights for c in found]) == pytest.approx(weights)


def test_nothing_is_weighed_where_a_part_was_not_scored():
    samples = [sample(0, [4.0]), sample(1, [0.5])]
    [microbatches] = pack(samples, max_tokens=1, world_size=1)
    corrector = Corrector(AlgorithmConfig())
    found = corrector.correct(microbatches, [None, np.full(1, SCORE)])
    assert [c.weights.tolist() for c in found] == [[1.0], [1.0]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_are_of_the_type_of_the_scores(dtype):
    [[microbatch]] = pack([sample(0, [4.0, 1.0])], max_tokens=100, world_size=1)
    corrector = Corrector(AlgorithmConfig())
    alone = corrector.correct_alone(microbatch, np.full(2, SCORE, dtype))
    [together] = corrector.correct([microbatch], [np.full(2, SCORE, dtype)])
    assert alone.weights.dtype == together.weights.dtype == dtype
    assert alone.weights.tolist() == together.weights.tolist() == pytest.approx([2.0, 1.0])
    [unscored] = corrector.correct([microbatch], [None])
    assert unscored.weights.dtype == microbatch.behavior_logprobs.dtype


# -------------------------------------------------------------------------------------------------- selection


def four_tokens(**changes):
    """Tokens whose covariances are 6, 1, 0 and 8, with a mean log-probability of -2 and a mean advantage of
    2; and one out of the loss whose own would be 10^6.
    """
    return selecting([-0.0, -1.0, -3.0, -4.0, 1000.0], [5.0, 3.0, 2.0, -2.0, 1000.0], out=[4], **changes)


def selecting(logprobs, advantages, *, out=(), **own):
    """Return whether each token is singled out; the proximal log-probabilities are `logprobs`."""
    [[microbatch]] = pack(
        [sample(0, [1.0] * len(logprobs), out=out, advantages=advantages)], max_tokens=100, world_size=1
    )
    algorithm = AlgorithmConfig(correction=CorrectionConfig(weight="none"), **own)
    [found] = Corrector(algorithm).correct([microbatch], [np.array(logprobs)])
    return None if found.is_selected is None else found.is_selected.tolist()


@pytest.mark.parametrize(
    ("lower", "upper", "chosen"),
    [
        (0.0, 8.0, [1, 1, 0, 0]),  # the bounds are outside
        (0.0, 9.0, [1, 1, 0, 1]),
        (-1.0, 8.0, [1, 1, 1, 0]),
        (1.0, 6.0, [0, 0, 0, 0]),
    ],
)
def test_clip_cov_chooses_among_covariances_between_its_bounds(lower, upper, chosen):
    found = four_tokens(policy_loss="clip_cov", clip_cov=ClipCovConfig(share=0.999, lower=lower, upper=upper))
    assert found == [*map(bool, chosen), False]


@pytest.mark.parametrize(("share", "num"), [(0.01, 1), (0.5, 2), (0.75, 3), (0.99, 3)])
def test_the_share_is_of_all_tokens_of_the_loss(share, num):
    clipped = four_tokens(policy_loss="clip_cov", clip_cov=ClipCovConfig(share=share, lower=-1.0, upper=9.0))
    assert (sum(clipped), clipped[4]) == (num, False)
    held = four_tokens(policy_loss="kl_cov", kl_cov=KLCovConfig(share=share))
    assert held == [*(cov in [8, 6, 1][:num] for cov in (6, 1, 0, 8)), False]


@pytest.mark.parametrize("policy_loss", ["clip_cov", "kl_cov"])
def test_a_lone_token_has_a_covariance_of_0_and_none_selects_none(policy_loss):
    own = {"policy_loss": policy_loss, "clip_cov": ClipCovConfig(share=0.5, lower=-0.5, upper=0.5)}
    assert selecting([-2.0], [2.0], **own) == [True]
    assert selecting([-2.0], [2.0], out=[0], **own) == [False]


def test_other_losses_single_out_none():
    assert four_tokens() is None


# ---------------------------------------------------------------------------------- sequences that are cut

EVERYTHING = {
    "weight": "sequence",
    "cap": 9.0,
    "self_normalize": True,
    "reject": {"far": RejectionConfig(level="sequence_sum", upper=8.0), "low": LOW},
    "m2po_threshold": 0.5,
}


@pytest.mark.parametrize(
    "own",
    [
        {},
        EVERYTHING,
        {"weight": "geometric", "self_normalize": True, "reject": {"far": FAR}},
        {"policy_loss": "kl_cov", "kl_cov": KLCovConfig(share=0.3)},
        {"policy_loss": "clip_cov", "clip_cov": ClipCovConfig(share=0.3, lower=-99.0, upper=99.0)},
        {"mode": "bypass", "scores": math.log(0.05)},
        {"mode": "on_policy", "scores": None},
        {"scores": math.log(0.05)},
    ],
)
def test_decisions_are_those_of_whole_sequences_and_each_part_knows_those_of_the_rest(own):
    """Attempts of one, two and three segments. Cut, a segment of them is alone in its microbatch."""
    rng = np.random.default_rng(3)
    samples = [
        sample(
            index,
            np.exp(rng.normal(0, 0.5, 2 * segments)),
            out=[index % 2],
            segments=segments,
            advantages=rng.normal(size=2 * segments),
        )
        for index, segments in enumerate([1, 2, 3, 2])
    ]
    whole, [together] = correct(samples, **own)
    cut, found = correct(samples, max_tokens=3, **own)
    assert (len(whole), len(cut)) == (1, 8)
    columns = ["accepted", "weights", *(["is_selected"] if together.is_selected is not None else [])]
    decided = {name: by_token(whole, [getattr(together, name)]) for name in columns}
    for name in columns:
        assert by_token(cut, [getattr(c, name) for c in found]) == pytest.approx(decided[name])
    counted = zip(cut, found, strict=True)
    products = {
        int(i): float(p)
        for m, c in counted
        for i, p in zip(m.sample_indices[m.is_counted], c.log_products, strict=True)
    }
    assert products == pytest.approx(
        dict(zip(whole[0].sample_indices.tolist(), together.log_products, strict=True))
    )
    decided["behavior_logprobs"] = by_token(whole, [whole[0].behavior_logprobs])
    decided["advantages"] = by_token(whole, [whole[0].advantages])
    is_scored = own.get("mode") != "bypass" and own.get("scores", 0) is not None
    decided["proximal_logprobs"] = (
        dict.fromkeys(decided["accepted"], own.get("scores", SCORE))
        if is_scored
        else decided["behavior_logprobs"]
    )
    for m, correction in zip(cut, found, strict=True):
        [index], here = m.sample_indices.tolist(), set(m.action_places.tolist())
        rest = correction.rest
        assert set(rest.sequence_ids.tolist()) <= {0}
        for name, values in decided.items():
            elsewhere = [value for (i, place), value in values.items() if i == index and place not in here]
            assert sorted(getattr(rest, name).tolist()) == pytest.approx(sorted(elsewhere)), name
        if "is_selected" not in decided:
            assert not rest.is_selected.any()
