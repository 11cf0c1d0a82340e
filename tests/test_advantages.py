"""Laws of advantage estimators, over all that are registered: independent float64 loops, context that changes nothing, groups."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.advantages import ESTIMATORS, estimate, find_estimator
from agentrl.algorithms.advantages.groups import grpo
from agentrl.algorithms.advantages.reinforce import whiten
from agentrl.algorithms.advantages.scan import BLOCK, sums_to_go
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit
from agentrl.errors import PluginError

OPTIONS = AdvantageOptions(
    gamma=0.9, lam=0.8, bootstrap_truncated=True, singleton="zero", passk_k=2, solved_reward=0.5, step_weight=0.7
)
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "max_rl", "grpo_passk", "pass_at_k", "reinforce_plus_plus_baseline")
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


@st.composite
def attempts(draw, group: int | None = None):
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    turns = [[0.0] * length for length in lengths]
    for turn in turns:
        turn[-1] = draw(st.sampled_from(REWARDS))
    number = st.floats(-1, 1).map(lambda x: round(x, 3))
    return Attempt(
        group=draw(st.integers(0, 3)) if group is None else group,
        turns=turns,
        values=draw(st.lists(number, min_size=sum(lengths), max_size=sum(lengths))),
        after=draw(number),
        truncated=draw(st.booleans()),
        greedy=draw(st.sampled_from(REWARDS)),
        anchors=[draw(st.integers(0, 1)) for _ in turns],
    )


batches = st.lists(attempts(), min_size=1, max_size=10)


def compact(batch: list[Attempt]) -> ActionBatch:
    def f64(values):
        return torch.tensor(values, dtype=torch.float64)

    return ActionBatch(
        rewards_A=f64([r for a in batch for r in a.rewards]),
        turn_A=torch.tensor([k for a in batch for k, turn in enumerate(a.turns) for _ in turn], dtype=torch.int64),
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
    flat = iter(estimate(ESTIMATORS[name], compact(batch), options).advantages_A.tolist())
    return [[next(flat) for _ in a.rewards] for a in batch]


# ------------------------------------------------------------------------------------------ loops from the formulas


def normalised(value: float, members: list[float]) -> float:
    if len(set(members)) == 1:
        return 0.0
    return (value - np.mean(members)) / (np.std(members, ddof=1) + 1e-6)


def outcome_loop(formula: Callable[[float, list[float]], float]):
    """A loop over attempts for a formula of the own outcome and those of the group."""

    def loop(batch: list[Attempt]) -> list[list[float]]:
        result = []
        for a in batch:
            outcomes = [b.outcome for b in batch if b.group == a.group]
            result.append([0.0 if len(set(outcomes)) == 1 else formula(a.outcome, outcomes)] * len(a.rewards))
        return result

    return loop


def pass_at_k_formula(own: float, outcomes: list[float]) -> float:
    n, k, failed = len(outcomes), OPTIONS.passk_k, sum(r < OPTIONS.solved_reward for r in outcomes)
    mean = 1 - math.comb(failed, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    if std == 0:
        return 0.0
    if own >= OPTIONS.solved_reward:
        return (1 - mean) / std
    return (1 - mean - math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)) / std


def opo_loop(batch):
    def advantage(a):
        group = [b for b in batch if b.group == a.group]
        if len({b.outcome for b in group}) == 1:
            return 0.0
        return a.outcome - sum(len(b.rewards) * b.outcome for b in group) / sum(len(b.rewards) for b in group)

    return [[advantage(a)] * len(a.rewards) for a in batch]


def gpg_loop(batch):
    groups = {a.group for a in batch}
    unequal = [g for g in groups if len({a.outcome for a in batch if a.group == g}) > 1]
    return outcome_loop(lambda own, all_: (own - np.mean(all_)) * len(groups) / len(unequal))(batch)


def whitened_loop(rows):
    flat = np.array([x for row in rows for x in row])
    if len(set(flat)) == 1:
        return [[0.0] * len(row) for row in rows]
    return [[(x - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8) for x in row] for row in rows]


def to_go(rewards, decay):
    return [sum(decay ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def reinforce_loop(batch):
    return whitened_loop([to_go(a.rewards, OPTIONS.gamma) for a in batch])


def baseline_loop(batch):
    rows = whitened_loop(outcome_loop(lambda own, all_: own - np.mean(all_))(batch))
    constant = {a.group for a in batch if len({b.outcome for b in batch if b.group == a.group}) == 1}
    return [[0.0] * len(row) if a.group in constant else row for a, row in zip(batch, rows, strict=True)]


def turn_group_loop(batch):
    returns = [to_go([math.fsum(turn) for turn in a.turns], OPTIONS.gamma) for a in batch]

    def advantage(i, k):
        peers = [returns[j][k] for j, b in enumerate(batch) if b.group == batch[i].group and k < len(b.turns)]
        return normalised(returns[i][k], peers)

    return [[advantage(i, k) for k, turn in enumerate(a.turns) for _ in turn] for i, a in enumerate(batch)]


def gigpo_loop(batch):
    returns = [to_go([math.fsum(turn) for turn in a.turns], OPTIONS.gamma) for a in batch]

    def step(i, k):
        own = batch[i]
        places = [(j, m) for j, b in enumerate(batch) if b.group == own.group for m in range(len(b.turns))]
        return normalised(returns[i][k], [returns[j][m] for j, m in places if batch[j].anchors[m] == own.anchors[k]])

    episode = outcome_loop(normalised)(batch)
    return [
        [episode[i][0] + OPTIONS.step_weight * step(i, k) for k, turn in enumerate(a.turns) for _ in turn] for i, a in enumerate(batch)
    ]


def gae_over(rewards, values, last):
    result, following, advantage = [], last, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + OPTIONS.gamma * following - value + OPTIONS.gamma * OPTIONS.lam * advantage
        following = value
        result.insert(0, advantage)
    return result


def gae_loop(batch):
    return [gae_over(a.rewards, a.values, a.after if a.truncated else 0.0) for a in batch]


def gae_turn_loop(batch):
    rows = []
    for a in batch:
        starts = np.cumsum([0, *map(len, a.turns)])
        per_turn = gae_over([math.fsum(t) for t in a.turns], [a.values[s] for s in starts[:-1]], a.after if a.truncated else 0.0)
        rows.append([per_turn[k] for k, turn in enumerate(a.turns) for _ in turn])
    return rows


def second(outcomes):
    return sorted(outcomes)[-2]


LOOPS = {
    "grpo": outcome_loop(normalised),
    "dr_grpo": outcome_loop(lambda own, all_: own - np.mean(all_)),
    "rloo": outcome_loop(lambda own, all_: own - (math.fsum(all_) - own) / (len(all_) - 1)),
    "opo": opo_loop,
    "gpg": gpg_loop,
    "max_rl": outcome_loop(lambda own, all_: (own - np.mean(all_)) / (np.mean(all_) + 1e-6)),
    "grpo_passk": outcome_loop(lambda own, all_: own - second(all_) if own == max(all_) else 0.0),
    "pass_at_k": outcome_loop(pass_at_k_formula),
    "reinforce_plus_plus": reinforce_loop,
    "reinforce_plus_plus_baseline": baseline_loop,
    "remax": lambda batch: [[a.outcome - a.greedy] * len(a.rewards) for a in batch],
    "turn_group": turn_group_loop,
    "gigpo": gigpo_loop,
    "gae": gae_loop,
    "gae_turn": gae_turn_loop,
}


def test_every_estimator_has_a_loop():
    assert set(LOOPS) == set(ESTIMATORS)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=50)
@given(batch=batches)
def test_an_estimator_equals_its_loop(name, batch):
    for got, expected in zip(advantages(name, batch), LOOPS[name](batch), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
