"""Laws of advantage estimators, over all that are registered: independent float64 loops, context that changes
nothing, groups.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.advantages import checked
from agentrl.algorithms.advantages.groups import grpo
from agentrl.algorithms.advantages.reinforce import whiten
from agentrl.algorithms.advantages.scan import BLOCK, sums_to_go
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions
from agentrl.algorithms.registry import find_estimator
from agentrl.algorithms.reward_kl import adapt_coefficient, penalize
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.errors import PluginError
from parts.built_in import ESTIMATORS

OPTIONS = AdvantageOptions(
    gamma=0.9,
    lam=0.8,
    bootstrap_truncated=True,
    singleton="zero",
    passk_k=2,
    solved_reward=0.5,
    step_weight=0.7,
)
GROUPED = [
    name for name in ESTIMATORS if name not in {"reinforce_plus_plus", "remax", "gae", "gae_turn"}
]  # these compare nothing
REWARDS = (0.0, 0.1, 0.3, 1.0)


@dataclass
class Attempt:
    """One trajectory for the loops: a list of rewards for each turn."""

    group: int
    turns: list[list[float]]
    values: list[float]
    after: float
    truncated: bool
    greedy: float
    anchors: list[int]

    @property
    def rewards(self) -> list[float]:
        return [r for turn in self.turns for r in turn]

    @property
    def outcome(self) -> float:
        return math.fsum(self.rewards)


def make_attempt(rng: np.random.Generator) -> Attempt:
    turns = [[0.0] * n for n in rng.integers(1, 5, size=rng.integers(1, 5))]
    for turn in turns:
        turn[-1] = float(rng.choice(REWARDS))
    return Attempt(
        group=int(rng.integers(4)),
        turns=turns,
        values=rng.normal(size=sum(map(len, turns))).tolist(),
        after=float(rng.normal()),
        truncated=bool(rng.integers(2)),
        greedy=float(rng.choice(REWARDS)),
        anchors=[int(rng.integers(2)) for _ in turns],
    )


def make_batch(seed: int) -> list[Attempt]:
    rng = np.random.default_rng(seed)
    return [make_attempt(rng) for _ in range(rng.integers(1, 14))]


def make_options(seed: int) -> AdvantageOptions:
    rng = np.random.default_rng(seed)
    return AdvantageOptions(
        gamma=float(rng.choice([0.0, 0.9, 1.0])),
        lam=float(rng.choice([0.0, 0.8, 1.0])),
        bootstrap_truncated=bool(rng.integers(2)),
        singleton="zero",
        passk_k=int(rng.integers(1, 3)),
        solved_reward=float(rng.choice([0.3, 1.0])),
        step_weight=float(rng.choice([0.0, 0.7])),
    )


seeds = st.integers(0, 2**31)
batches = seeds.map(make_batch)
options = seeds.map(make_options)


def compact(batch: list[Attempt]) -> ActionBatch:
    def f64(values):
        return torch.tensor(values, dtype=torch.float64)

    return ActionBatch.of_tokens(
        rewards_A=f64([r for a in batch for r in a.rewards]),
        turn_A=torch.tensor(
            [k for a in batch for k, turn in enumerate(a.turns) for _ in turn], dtype=torch.int64
        ),
        num_tokens_N=torch.tensor([len(a.rewards) for a in batch], dtype=torch.int64),
        group_N=torch.tensor([a.group for a in batch], dtype=torch.int64),
        is_truncated_N=torch.tensor([a.truncated for a in batch]),
        group_size=None,
        values_A=f64([v for a in batch for v in a.values]),
        values_after_N=f64([a.after for a in batch]),
        greedy_rewards_N=f64([a.greedy for a in batch]),
        anchors_K=torch.tensor([x for a in batch for x in a.anchors], dtype=torch.int64),
    )


def advantages(name: str, batch: list[Attempt], options: AdvantageOptions = OPTIONS) -> list[list[float]]:
    """Return what the estimator says, attempt by attempt."""
    whole = compact(batch)
    flat = iter(checked(ESTIMATORS[name](whole, options), whole).advantages_A.tolist())
    return [[next(flat) for _ in a.rewards] for a in batch]


# ------------------------------------------------------------------------------------ loops from the formulas


def outcomes_of(batch, a):
    return [b.outcome for b in batch if b.group == a.group]


def is_constant(values):
    return max(values) - min(values) < 1e-9  # sums of tenths differ in the last bit


def grouped(formula: Callable[[float, list[float], AdvantageOptions], float]):
    """A loop for a formula of the own outcome and those of the group."""

    def loop(batch, options):
        rows = []
        for a in batch:
            outcomes = outcomes_of(batch, a)
            rows.append(
                [0.0 if is_constant(outcomes) else formula(a.outcome, outcomes, options)] * len(a.rewards)
            )
        return rows

    return loop


def normalised(value, members):
    return 0.0 if is_constant(members) else (value - np.mean(members)) / (np.std(members, ddof=1) + 1e-6)


def centred(own, outcomes, options):
    return own - np.mean(outcomes)


def pass_at_k_formula(own, outcomes, options):
    n, k, failed = len(outcomes), options.passk_k, sum(r < options.solved_reward - 1e-9 for r in outcomes)
    mean = 1 - math.comb(failed, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    if std == 0:
        return 0.0
    others_fail = (
        0.0 if own >= options.solved_reward - 1e-9 else math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)
    )
    return (1 - mean - others_fail) / std


def opo_loop(batch, options):
    def advantage(a):
        if is_constant(outcomes_of(batch, a)):
            return 0.0
        group = [b for b in batch if b.group == a.group]
        return a.outcome - sum(len(b.rewards) * b.outcome for b in group) / sum(len(b.rewards) for b in group)

    return [[advantage(a)] * len(a.rewards) for a in batch]


def gpg_loop(batch, options):
    unequal = {a.group for a in batch if not is_constant(outcomes_of(batch, a))}
    share = len({a.group for a in batch}) / max(1, len(unequal))
    return [[x * share for x in row] for row in grouped(centred)(batch, options)]


def whitened_loop(rows):
    flat = np.array([x for row in rows for x in row])
    if is_constant(flat):
        return [[0.0] * len(row) for row in rows]
    return [[(x - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8) for x in row] for row in rows]


def to_go(rewards, decay):
    return [sum(decay ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def reinforce_loop(batch, options):
    return whitened_loop([to_go(a.rewards, options.gamma) for a in batch])


def baseline_loop(batch, options):
    rows = whitened_loop(grouped(centred)(batch, options))
    return [
        [0.0] * len(row) if is_constant(outcomes_of(batch, a)) else row
        for a, row in zip(batch, rows, strict=True)
    ]


def per_turn(a, values):
    return [value for turn, value in zip(a.turns, values, strict=True) for _ in turn]


def turn_returns(batch, options):
    return [to_go([math.fsum(turn) for turn in a.turns], options.gamma) for a in batch]


def turn_group_loop(batch, options):
    returns = turn_returns(batch, options)

    def advantage(i, k):
        peers = [returns[j][k] for j, b in enumerate(batch) if b.group == batch[i].group and k < len(b.turns)]
        return normalised(returns[i][k], peers)

    return [per_turn(a, [advantage(i, k) for k in range(len(a.turns))]) for i, a in enumerate(batch)]


def gigpo_loop(batch, options):
    returns = turn_returns(batch, options)

    def step(i, k):
        own = batch[i]
        places = [(j, m) for j, b in enumerate(batch) if b.group == own.group for m in range(len(b.turns))]
        return normalised(
            returns[i][k], [returns[j][m] for j, m in places if batch[j].anchors[m] == own.anchors[k]]
        )

    def advantage(i, k):
        return normalised(batch[i].outcome, outcomes_of(batch, batch[i])) + options.step_weight * step(i, k)

    return [per_turn(a, [advantage(i, k) for k in range(len(a.turns))]) for i, a in enumerate(batch)]


def gae_over(rewards, values, last, options):
    result, following, advantage = [], last, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + options.gamma * following - value + options.gamma * options.lam * advantage
        following = value
        result.insert(0, advantage)
    return result


def last_value(a, options):
    return a.after if a.truncated and options.bootstrap_truncated else 0.0


def gae_loop(batch, options):
    return [gae_over(a.rewards, a.values, last_value(a, options), options) for a in batch]


def gae_turn_loop(batch, options):
    def over_turns(a):
        starts = np.cumsum([0, *map(len, a.turns)])[:-1]
        return gae_over(
            [math.fsum(t) for t in a.turns], [a.values[s] for s in starts], last_value(a, options), options
        )

    return [per_turn(a, over_turns(a)) for a in batch]


def margin(own, outcomes, options):
    return own - sorted(outcomes)[-2] if own > max(outcomes) - 1e-9 else 0.0


LOOPS = {
    "grpo": grouped(lambda own, outcomes, options: normalised(own, outcomes)),
    "dr_grpo": grouped(centred),
    "rloo": grouped(lambda own, outcomes, options: own - (math.fsum(outcomes) - own) / (len(outcomes) - 1)),
    "opo": opo_loop,
    "gpg": gpg_loop,
    "max_rl": grouped(lambda own, outcomes, options: (own - np.mean(outcomes)) / (np.mean(outcomes) + 1e-6)),
    "grpo_passk": grouped(margin),
    "pass_at_k": grouped(pass_at_k_formula),
    "reinforce_plus_plus": reinforce_loop,
    "reinforce_plus_plus_baseline": baseline_loop,
    "remax": lambda batch, options: [[a.outcome - a.greedy] * len(a.rewards) for a in batch],
    "turn_group": turn_group_loop,
    "gigpo": gigpo_loop,
    "gae": gae_loop,
    "gae_turn": gae_turn_loop,
}


def test_every_estimator_has_a_loop():
    assert set(LOOPS) == set(ESTIMATORS)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25)
@given(batch=batches, options=options)
def test_an_estimator_equals_its_loop(name, batch, options):
    for got, expected in zip(advantages(name, batch, options), LOOPS[name](batch, options), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gae", "gae_turn"])
@settings(max_examples=10)
@given(batch=batches)
def test_returns_are_advantages_plus_values(name, batch):
    credit = ESTIMATORS[name](compact(batch), OPTIONS)
    values = [
        v
        for a in batch
        for v in (
            a.values
            if name == "gae"
            else per_turn(a, [a.values[s] for s in np.cumsum([0, *map(len, a.turns)])[:-1]])
        )
    ]
    np.testing.assert_allclose(credit.returns_A, credit.advantages_A.numpy() + values, atol=1e-12)


@given(seed=seeds, decay=st.sampled_from([0.0, 0.5, 0.999, 1.0]))
@settings(max_examples=30)
def test_sums_to_go_equal_a_loop_for_any_lengths(seed, decay):
    rng = np.random.default_rng(seed)
    lengths = rng.choice(
        [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, BLOCK**2 + 1], size=rng.integers(1, 5)
    )
    values = rng.normal(size=lengths.sum())
    expected = values.copy()
    ends = np.cumsum(lengths) - 1
    for t in reversed(range(len(values) - 1)):
        if t not in ends:
            expected[t] += decay * expected[t + 1]
    got = sums_to_go(torch.from_numpy(values), torch.from_numpy(lengths), decay)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------ invariances


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25)
@given(batch=batches, seed=seeds)
def test_neither_order_nor_labels_of_groups_matter(name, batch, seed):
    order = np.random.default_rng(seed).permutation(len(batch))
    shuffled = [replace(batch[i], group=1000 - 7 * batch[i].group) for i in order]
    plain = advantages(name, batch)
    for got, i in zip(advantages(name, shuffled), order, strict=True):
        np.testing.assert_allclose(got, plain[i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_trajectory_without_action_tokens_has_none_and_disturbs_nothing(name):
    batch = make_batch(3)
    empty = Attempt(99, [], [], 0.5, True, 0.0, [])
    for place in (0, 4, len(batch)):
        rows = advantages(name, [*batch[:place], empty, *batch[place:]])
        assert rows.pop(place) == []
        if name != "gpg":  # which counts the groups of the batch
            np.testing.assert_allclose(
                np.concatenate(rows), np.concatenate(advantages(name, batch)), rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_batch_is_nothing(name):
    assert advantages(name, []) == []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_float32_stays_float32_and_close(name):
    batch = compact(make_batch(5))
    single = {
        field: getattr(batch, field).float() for field in ("values_A", "values_after_N", "greedy_rewards_N")
    }
    halved = replace(batch, **single).with_rewards(batch.rewards_A.float())
    got = ESTIMATORS[name](halved, OPTIONS).advantages_A
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got, ESTIMATORS[name](batch, OPTIONS).advantages_A, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------- singleton, constant, incomplete groups


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=25)
@given(reward=st.floats(0, 1e6), size=st.integers(1, 9), seed=seeds)
def test_a_constant_group_has_advantage_exactly_0(name, reward, size, seed):
    other = [replace(a, group=7) for a in make_batch(seed)]  # whitening and gpg look beyond the group
    group = [
        replace(a, group=8, turns=[[0.0] * k + [reward]])
        for k, a in enumerate(make_batch(seed + 1)[:1] * size)
    ]
    group = [replace(a, values=[0.0] * len(a.rewards), anchors=[0]) for a in group]
    chosen = replace(OPTIONS, passk_k=1)
    for row in advantages(name, [*group, *other], chosen)[:size]:
        assert row == [0.0] * len(row)


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_0_or_its_raw_reward(name):
    alone = [
        Attempt(group, [[0.0, reward]], [0.0] * 2, 0.0, False, 0.0, [0])
        for group, reward in ((1, 0.25), (2, 0.75))
    ]
    assert advantages(name, alone) == [[0.0, 0.0], [0.0, 0.0]]
    raw = advantages(name, alone, replace(OPTIONS, singleton="raw"))
    if name == "reinforce_plus_plus_baseline":  # whitened after that
        np.testing.assert_allclose(raw, [[-math.sqrt(3) / 2] * 2, [math.sqrt(3) / 2] * 2], rtol=1e-6)
    else:
        assert raw == [[0.25, 0.25], [0.75, 0.75]]


def batch_of(rewards, groups, group_size=None):
    ones = torch.ones(len(rewards), dtype=torch.int64)
    return ActionBatch.of_tokens(
        torch.tensor(rewards), ones, ones, torch.tensor(groups), ones.bool(), group_size
    )


def test_an_incomplete_group_is_refused():
    batch_of([1.0, 0.0, 1.0, 0.0], [5, 6, 5, 6], group_size=2)
    with pytest.raises(ValueError, match="group 6 has 1 of 2 trajectories"):
        batch_of([1.0, 0.0, 1.0], [5, 6, 5], group_size=2)


def test_pass_at_k_refuses_a_group_smaller_than_k():
    with pytest.raises(ValueError, match="group 5 has 2"):
        ESTIMATORS["pass_at_k"](batch_of([1.0, 0.0], [5, 5]), replace(OPTIONS, passk_k=3))


@pytest.mark.parametrize("name", GROUPED)
def test_outcomes_that_differ_by_rounding_are_equal(name):
    sums = [0.1 + 0.2, 0.3, 0.2 + 0.1, 0.3]
    assert len(set(sums)) == 2
    places = replace(batch_of([1.0] * 4, [0] * 4), anchors_K=torch.zeros(4, dtype=torch.int64))
    batch = places.with_rewards(torch.tensor(sums, dtype=torch.float64))
    assert (
        ESTIMATORS[name](batch, replace(OPTIONS, solved_reward=0.1 + 0.2)).advantages_A.tolist() == [0.0] * 4
    )
    one_better = places.with_rewards(torch.tensor([*sums[:3], 0.4], dtype=torch.float64))
    assert ESTIMATORS[name](one_better, replace(OPTIONS, solved_reward=0.35)).advantages_A[3] > 0


def test_max_rl_refuses_negative_outcomes():
    with pytest.raises(ValueError, match=r"outcomes of at least 0; one is -0\.5"):
        ESTIMATORS["max_rl"](batch_of([1.0, -0.5], [5, 5]), OPTIONS)


def test_pass_at_1_is_grpo_by_the_std_of_the_population():
    batch = batch_of([1.0, 0.0, 0.0, 1.0, 0.0], [0] * 5)
    expected = (batch.rewards_A - 0.4) / math.sqrt(0.24)
    torch.testing.assert_close(
        ESTIMATORS["pass_at_k"](batch, replace(OPTIONS, passk_k=1)).advantages_A, expected
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [("gae", "values_A"), ("gae_turn", "values_A"), ("remax", "greedy_rewards_N"), ("gigpo", "anchors_K")],
)
def test_what_an_estimator_lacks_is_named(name, field):
    with pytest.raises(ValueError, match=f"{name} needs {field}"):
        ESTIMATORS[name](replace(compact(make_batch(1)), **{field: None}), OPTIONS)


def test_values_behind_the_end_are_needed_for_truncated_attempts_alone():
    batch = replace(compact(make_batch(1)), values_after_N=None)
    ESTIMATORS["gae"](batch, replace(OPTIONS, bootstrap_truncated=False))
    with pytest.raises(ValueError, match="gae needs values_after_N"):
        ESTIMATORS["gae"](batch, OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values_A": torch.zeros(3)}, r"values_A has shape \[3\], but the batch needs \[2\]"),
        ({"group_N": torch.zeros(1, dtype=torch.int64)}, r"group_N has shape \[1\]"),
    ],
)
def test_a_malformed_batch_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(batch_of([1.0, 0.0], [0, 0]), **change)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0.0, 0.0, 0.0], r"rewards_A has shape \[3\], but the batch needs \[2\]"),
        ([1.0, math.nan], "rewards_A has a value of nan"),
        ([math.inf, -math.inf], "rewards_A has a value of inf"),
    ],
)
def test_malformed_rewards_are_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        batch_of([1.0, 0.0], [0, 0]).with_rewards(torch.tensor(rewards))


def test_finite_values_may_have_a_sum_that_is_not():
    huge = torch.tensor([1e308, 1e308], dtype=torch.float64)
    assert torch.equal(batch_of([1.0, 0.0], [0, 1]).with_rewards(huge).rewards_A, huge)
    with pytest.raises(ValueError, match="rewards_A has a value of inf"):
        batch_of([1.0, math.inf], [0, 1])


def test_outcomes_that_differ_by_more_than_rounding_are_compared():
    batch = batch_of([1.0, 1.0], [0, 0])
    rewards = torch.tensor([1.0, 1 + 1e-12], dtype=torch.float64)
    assert (ESTIMATORS["dr_grpo"](batch.with_rewards(rewards), OPTIONS).advantages_A != 0).all()


def test_turns_out_of_order_are_refused():
    three = torch.tensor([3])
    with pytest.raises(ValueError, match="not in the order in which they were sampled"):
        ActionBatch.of_tokens(torch.zeros(3), torch.tensor([0, 1, 0]), three, three, three.bool(), None)


# ------------------------------------------------------------------------------------------- whitening and KL


def test_whitening_has_mean_0_and_variance_1():
    values = torch.from_numpy(np.random.default_rng(0).normal(3, 5, 1000))
    assert whiten(values).mean().item() == pytest.approx(0, abs=1e-12)
    assert whiten(values).var().item() == pytest.approx(1, rel=1e-8)
    assert whiten(torch.full((3,), 0.1)).tolist() == [0.0] * 3
    assert whiten(torch.zeros(0)).tolist() == []


def test_kl_in_the_reward_is_paid_per_token():
    batch = compact(make_batch(2))
    kl = torch.linspace(-1, 1, len(batch.rewards_A))
    np.testing.assert_allclose(
        penalize(batch, kl, coefficient=0.3).rewards_A, batch.rewards_A - 0.3 * kl.double(), rtol=1e-12
    )
    before, after = (grpo(b, OPTIONS).advantages_A for b in (batch, penalize(batch, kl, coefficient=0.0)))
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("kl", "factor"), [(1.0, 1.0), (1.1, 1.001), (0.9, 0.999), (50.0, 1.002), (0.0, 0.998)]
)
def test_the_adaptive_coefficient_follows_its_target(kl, factor):
    assert adapt_coefficient(0.2, kl, target=1.0, num_sequences=100, horizon=10_000) == pytest.approx(
        0.2 * factor
    )


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10), (-1.0, 10), (1.0, 0), (1.0, -1)])
def test_an_adaptive_coefficient_needs_a_target_and_a_horizon(target, horizon):
    with pytest.raises(ValueError, match=f"target={target:g}, horizon={horizon}"):
        adapt_coefficient(0.2, 1.0, target=target, num_sequences=1, horizon=horizon)
    assert adapt_coefficient(0.5, 2.0, target=0.5, num_sequences=1, horizon=1) == pytest.approx(0.6)


# --------------------------------------------------------------------------------------------------- registry


def test_an_estimator_of_ones_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from agentrl.algorithms.compact import Credit\n"
        "def half(batch, options):\n    return Credit(batch.over_tokens(batch.outcomes_N / 2))\n"
        "def short(batch, options):\n    return Credit(batch.outcomes_N)\n"
        "def bare(batch, options):\n    return batch.rewards_A\n"
        "def broken(batch, options):\n    return Credit(batch.rewards_A / 0)\n"
        "number = 3\n"
    )
    batch = compact(make_batch(4))

    def run(name):
        return checked(find_estimator(f"{file}:{name}").function(batch, OPTIONS), batch)

    assert torch.equal(run("half").advantages_A, batch.over_tokens(batch.outcomes_N / 2))
    for name, message in (("short", "of shape"), ("bare", "got Tensor"), ("broken", "not finite")):
        with pytest.raises(ValueError, match=message):
            run(name)
    with pytest.raises(PluginError, match="is int, not a function"):
        run("number")
    with pytest.raises(
        PluginError,
        match=r"unknown advantage estimator 'none'; known: dr_grpo, .* an entry point of agentrl.advantages",
    ):
        find_estimator("none")


def test_an_installed_package_registers_an_estimator(tmp_path, monkeypatch):
    (tmp_path / "their_module.py").write_text("def theirs(batch, options):\n    return None\n")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[agentrl.advantages]\ntheirs = their_module:theirs\ngone = their_module:gone\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert find_estimator("theirs").function.__module__ == "their_module"
    assert AlgorithmConfig(advantage="theirs").advantage == "theirs"
    with pytest.raises(PluginError, match=r"'gone' \(their_module:gone\) cannot be imported"):
        find_estimator("gone")
