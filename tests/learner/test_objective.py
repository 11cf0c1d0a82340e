"""The policy's objective by a loop: every term, sum and maximum of a microbatch, in each mode."""

import math

import numpy as np
import pytest
import torch

from agentrl.algorithms.aggregation import UpdateCounts
from agentrl.algorithms.corrections import correction_statistics
from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.correction import CorrectionConfig, RejectionConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.batch import Sample, ScoredMicrobatch
from agentrl.learner.correction import Corrector
from agentrl.learner.loss import PolicyObjective
from agentrl.learner.loss_part import LossPart
from agentrl.learner.packing import pack
from agentrl.learner.ranks import join_ranks, leave_ranks
from parts.learner import reserved_port

TEMPERATURE = 0.7
CAP, BETA, BONUS = 1.3, 0.2, 0.05
COUNTS = UpdateCounts(loss_tokens=10, sequences=4, action_tokens=14)
LENGTHS = (4, 3)
"""Action tokens of two attempts. Each token is another word, and the third is out of the loss."""
OUT = 2
NUM = sum(LENGTHS)
rng = np.random.default_rng(4)
POLICY, PROXIMAL, BEHAVIOR, REF = (rng.normal(-2.0, 0.3, NUM) for _ in range(4))
ENTROPY, ADVANTAGES = rng.random(NUM), rng.normal(size=NUM)
SEQUENCE = np.repeat([0, 1], LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    join_ranks(LearnerConfig(), rank=0, address="127.0.0.1", port=reserved_port())
    yield
    leave_ranks()


class Given:
    """A policy of the log-probabilities and entropies above, by word."""

    device = torch.device("cpu")

    def __init__(self):
        self.logprobs, self.entropies = (
            torch.tensor(column, requires_grad=True) for column in (POLICY, ENTROPY)
        )

    def score(self, microbatch, predictors, targets, *, temperature):
        assert temperature == TEMPERATURE
        assert microbatch.token_ids[(predictors + 1).numpy()].tolist() == targets.tolist()
        return self.logprobs[targets], self.entropies[targets]


def microbatch():
    samples = []
    for index in range(len(LENGTHS)):
        words = np.flatnonzero(np.equal(SEQUENCE, index))
        mask = np.array([False, *[True] * len(words)])

        def behind_the_prompt(column, words=words):
            return np.array([0, *column[words]])

        samples.append(
            Sample(
                index,
                behind_the_prompt(np.arange(NUM)).astype(np.int32),
                mask,
                mask & (behind_the_prompt(np.arange(NUM)) != OUT),
                behind_the_prompt(BEHAVIOR),
                behind_the_prompt(ADVANTAGES),
            )
        )
    [[found]] = pack(samples, max_tokens=100, world_size=1)
    return found


def part_of(mode, *, is_scored=True, kl=True, **correction):
    """Return the part in numbers, and the gradients by word."""
    algorithm = AlgorithmConfig(
        aggregation="sequence_mean_token_mean",
        entropy_coefficient=BONUS,
        kl=KLConfig(coefficient=BETA, estimator="k2"),
        correction=CorrectionConfig(cap=CAP, **correction),
    )
    m, policy = microbatch(), Given()
    proximal = PROXIMAL[m.targets] if is_scored else None
    [decided] = Corrector(algorithm, mode).correct([m], [proximal])
    scored = ScoredMicrobatch(m, proximal, REF[m.targets] if kl else None, decided)
    part = PolicyObjective(algorithm, mode, temperature=TEMPERATURE).part(policy, scored, COUNTS)
    part.loss.backward()
    told = LossPart(
        part.loss.item(), *({n: v.item() for n, v in c.items()} for c in (part.sums, part.maxima))
    )
    return told, policy.logprobs.grad.numpy(), policy.entropies.grad.numpy()


def loop(mode, *, is_scored=True, kl=True, accepted=None, dropped=()):
    """The same, token by token. `dropped`: sequences that are out of the policy loss alone."""
    words = [w for w in range(NUM) if w != OUT and (accepted is None or w in accepted)]
    proximal = {"decoupled": PROXIMAL if is_scored else POLICY, "bypass": BEHAVIOR, "on_policy": POLICY}[mode]
    sums = dict.fromkeys(
        (
            "policy_loss",
            "kl",
            "entropy",
            "ppo_kl",
            "ratio_mean",
            "clip_low",
            "clip_high",
            "mismatch_mean",
            "loss",
        ),
        0.0,
    )
    ratios, mismatches, slopes, entropy_slopes = [], [], np.zeros(NUM), np.zeros(NUM)
    for w in words:
        scale = 1 / (COUNTS.sequences * sum(SEQUENCE[v] == SEQUENCE[w] for v in words))
        rho, a = math.exp(POLICY[w] - proximal[w]), ADVANTAGES[w]
        clipped = min(max(rho, 0.8), 1.2)
        is_held = -clipped * a > -rho * a
        weight = min(math.exp(proximal[w] - BEHAVIOR[w]), CAP) if mode == "decoupled" else 1.0
        kept = SEQUENCE[w] not in dropped
        distance = POLICY[w] - REF[w] if kl else 0.0
        term = scale * weight * max(-rho * a, -clipped * a) * kept
        slopes[w] = scale * weight * ((0.0 if is_held else -rho * a) * kept + BETA * distance)
        entropy_slopes[w] = -BONUS * scale
        found = {
            "policy_loss": term,
            "loss": term + scale * (weight * BETA * distance**2 / 2 - BONUS * ENTROPY[w]),
            "kl": distance**2 / 2,
            "entropy": ENTROPY[w],
            "ppo_kl": proximal[w] - POLICY[w],
            "ratio_mean": rho,
            "clip_low": float(is_held and rho < 1),
            "clip_high": float(is_held and rho > 1),
            "mismatch_mean": abs(POLICY[w] - BEHAVIOR[w]),
        }
        sums = {name: value + found[name] for name, value in sums.items()}
        ratios.append(rho)
        mismatches.append(found["mismatch_mean"])
    return sums, {"ratio_max": max(ratios), "mismatch_max": max(mismatches)}, slopes, entropy_slopes, words


MODES = [
    ("decoupled", {}),
    ("decoupled", {"is_scored": False}),  # the forward of the update is the proximal policy
    ("decoupled", {"kl": False}),
    ("bypass", {"is_scored": False}),
    ("bypass", {}),
    ("on_policy", {"is_scored": False}),
]


@pytest.mark.parametrize(("mode", "own"), MODES)
def test_every_term_and_sum_equals_a_loop(mode, own):
    part, slopes, entropy_slopes = part_of(mode, **own)
    sums, maxima, expected_slopes, expected_entropy_slopes, _ = loop(mode, **own)
    assert part.loss == pytest.approx(sums["loss"])
    assert {name: part.sums[name] for name in sums} == pytest.approx(sums)
    assert {name: part.maxima[name] for name in maxima} == pytest.approx(maxima)
    np.testing.assert_allclose(slopes, expected_slopes, atol=1e-12)
    np.testing.assert_allclose(entropy_slopes, expected_entropy_slopes, atol=1e-12)
    rejected = {name: value for name, value in part.sums.items() if name.startswith("rejected/")}
    assert rejected == {"rejected/all": 1.0, "rejected/action_tokens": 7.0}


@pytest.mark.parametrize(("mode", "own"), MODES)
def test_the_correction_is_told_of_all_scored_tokens(mode, own):
    """Without scores only loss tokens are known: on policy, and in bypass, where proximal is behavior."""
    part, _, _ = part_of(mode, **own)
    is_scored = own.get("is_scored", True) or mode == "decoupled"
    words = [w for w in range(NUM) if is_scored or w != OUT]
    proximal = {
        ("decoupled", True): PROXIMAL,
        ("decoupled", False): POLICY,
        ("bypass", True): PROXIMAL,
        ("bypass", False): BEHAVIOR,
        ("on_policy", False): POLICY,
    }[mode, own.get("is_scored", True)]
    differences = proximal - BEHAVIOR
    products = [sum(differences[w] for w in words if SEQUENCE[w] == s) for s in (0, 1)]
    columns = (torch.tensor(column) for column in (proximal[words], BEHAVIOR[words], np.array(products)))
    told = correction_statistics(*columns, cap=CAP)
    for found, expected in ((part.sums, told.sums), (part.maxima, told.maxima)):
        own_part = {n: v for n, v in found.items() if n.startswith("correction/")}
        assert own_part == pytest.approx({f"correction/{n}": float(v) for n, v in expected.items()})
        assert own_part


def test_rejected_tokens_are_counted_by_stage_and_absent_from_every_sum():
    rule = RejectionConfig(level="token", lower=0.6, upper=1.6)
    part, slopes, _ = part_of("decoupled", reject={"far": rule})
    accepted = [w for w in range(NUM) if 0.6 <= math.exp(PROXIMAL[w] - BEHAVIOR[w]) <= 1.6]
    sums, _, expected_slopes, _, words = loop("decoupled", accepted=accepted)
    assert 0 < len(words) < NUM - 1
    assert {name: part.sums[name] for name in sums} == pytest.approx(sums)
    np.testing.assert_allclose(slopes, expected_slopes, atol=1e-12)
    found = {name: value for name, value in part.sums.items() if name.startswith("rejected/")}
    assert found == {
        "rejected/far": NUM - 1 - len(words),
        "rejected/all": NUM - len(words),
        "rejected/action_tokens": NUM,
    }


def test_a_sequence_that_the_policy_left_is_out_of_the_policy_loss_alone():
    """OPSM: negative advantages of a sequence whose mean of behavior - policy exceeds the bound."""
    drifts = [
        np.mean((BEHAVIOR - POLICY)[[w for w in range(NUM) if SEQUENCE[w] == s and w != OUT]]) for s in (0, 1)
    ]
    delta = max(drifts) - 1e-3
    assert delta > 0
    part, _, _ = part_of("decoupled", opsm_delta=float(delta))
    gone = [w for w in range(NUM) if SEQUENCE[w] == int(np.argmax(drifts)) and ADVANTAGES[w] < 0 and w != OUT]
    assert part.sums["rejected/opsm"] == len(gone) > 0
    whole, _, _ = part_of("decoupled")
    names = ("kl", "entropy", "ratio_mean", "mismatch_mean")
    assert [part.sums[n] for n in names] == [whole.sums[n] for n in names]
    assert part.sums["policy_loss"] < whole.sums["policy_loss"], "a negative attempt costs"


@pytest.mark.parametrize(
    ("mode", "correction", "needs"),
    [
        ("decoupled", {}, True),
        ("bypass", {}, False),
        ("bypass", {"m2po_threshold": 0.1}, True),
        ("bypass", {"reject": {"far": RejectionConfig(upper=2.0)}}, True),
        ("on_policy", {}, False),
        ("on_policy", {"m2po_threshold": 0.1}, False),
    ],
)
def test_when_the_policy_is_asked_before_the_step(mode, correction, needs):
    algorithm = AlgorithmConfig(correction=CorrectionConfig(**correction))
    assert PolicyObjective(algorithm, mode, temperature=TEMPERATURE).needs_scores is needs
