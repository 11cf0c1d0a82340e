"""The curriculum: frequencies follow weights exactly, every task is visited, and an interrupted one draws
what it would have drawn.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.curriculum import Curriculum, learning_weight
from agentrl.config.curriculum import CurriculumConfig
from agentrl.errors import CheckpointError, DataError

SEEDS = st.integers(0, 2**31)
FEW = settings(deadline=None, max_examples=25)


def curriculum(sources: list[str], *, seed: int = 0, shuffle: bool = True, **options) -> Curriculum:
    return Curriculum(sources, CurriculumConfig(**options), seed=seed, shuffle=shuffle)


def rows(target: Curriculum, count: int) -> list[int]:
    return [target.draw() % target.num_tasks for _ in range(count)]


def taught(rates: list[float], count: int, **options) -> list[int]:
    """Rows drawn when each task passes at its rate, and its result is there before the next draw."""
    target = curriculum(["s"] * len(rates), by_pass_rate=True, **options)
    drawn = []
    for _ in range(count):
        position = target.draw()
        drawn.append(position % target.num_tasks)
        target.observe(position, [rates[drawn[-1]]] * 4)
    return drawn


# ---------------------------------------------------------------------------------------------------- weights


@FEW
@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=SEEDS, shuffle=st.booleans())
def test_shares_of_sources_follow_the_weights_in_every_round(weights, seed, shuffle):
    """Sources of 1, 2, 3, ... tasks: a round of sum(weights) draws has exactly `weight` of each."""
    names = [f"source{index}" for index in range(len(weights))]
    sources = [name for index, name in enumerate(names) for _ in range(index + 1)]
    target = curriculum(
        sources, source_weights=dict(zip(names, weights, strict=True)), seed=seed, shuffle=shuffle
    )
    for _ in range(6):
        drawn = Counter(sources[row] for row in rows(target, sum(weights)))
        assert [drawn[name] for name in names] == weights


@FEW
@given(weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=5), start=st.integers(0, 300), seed=SEEDS)
def test_any_stretch_of_draws_has_about_the_shares(weights, start, seed):
    names = [f"source{index}" for index in range(len(weights))]
    target = curriculum(names * 3, source_weights=dict(zip(names, weights, strict=True)), seed=seed)
    rows(target, start)
    drawn = Counter(names[row % len(names)] for row in rows(target, 200))
    for name, weight in zip(names, weights, strict=True):
        # Each source is at most half a group off at either end, and so is the sum of the others.
        assert abs(drawn[name] - 200 * weight / sum(weights)) <= 1 + len(names) / 2


@FEW
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=SEEDS)
def test_the_tasks_of_a_source_take_turns(sizes, seed):
    sources = [f"source{index}" for index, size in enumerate(sizes) for _ in range(size)]
    target = curriculum(
        sources,
        source_weights={name: 1 + index for index, name in enumerate(dict.fromkeys(sources))},
        seed=seed,
    )
    drawn = rows(target, 300)
    for name in set(sources):
        visits = Counter(row for row in drawn if sources[row] == name)
        assert (
            max(visits.values()) - min(visits[row] for row, source in enumerate(sources) if source == name)
            <= 1
        )


def test_a_source_comes_in_the_middle_of_its_share_of_the_draws():
    target = curriculum(["a", "b"], source_weights={"a": 3, "b": 1}, shuffle=False)
    assert "".join("ab"[row] for row in rows(target, 12)) == "aabaaabaaaba"


# ----------------------------------------------------------------------------------------------------- epochs


@FEW
@given(num_tasks=st.integers(1, 40), seed=SEEDS)
def test_where_all_weigh_the_same_each_epoch_holds_every_task_once(num_tasks, seed):
    """Also with results: those at the target weigh what those without any weigh."""
    drawn = taught([0.5] * num_tasks, 5 * num_tasks, seed=seed)
    epochs = [drawn[start : start + num_tasks] for start in range(0, len(drawn), num_tasks)]
    assert all(sorted(epoch) == list(range(num_tasks)) for epoch in epochs)
    assert num_tasks < 10 or len({tuple(epoch) for epoch in epochs}) == 5, "each in an order of its own"
    assert epochs[0] == np.random.default_rng([seed, 0]).permutation(num_tasks).tolist(), (
        "the first as without a curriculum"
    )


def test_the_visits_of_each_epoch_are_spread_evenly_over_it():
    num = 400
    target = curriculum(["a"] * num, by_pass_rate=True, seed=5)
    for epoch in range(3):
        rows(target, num)
        times = np.sort(target.state()["tasks"]["last"]) - epoch
        assert np.abs(times - (np.arange(num) + 0.5) / num).max() < (0.1 if epoch else 1e-12)


def test_without_shuffling_the_order_is_that_of_the_files():
    assert rows(curriculum(["a"] * 7, by_pass_rate=True, shuffle=False), 28) == list(range(7)) * 4


@FEW
@given(rates=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=20), seed=SEEDS)
def test_every_task_is_visited_once_before_any_is_again(rates, seed):
    assert sorted(taught(rates, len(rates), seed=seed)) == list(range(len(rates)))


@FEW
@given(num_tasks=st.integers(1, 9), draws=st.integers(1, 60), seed=SEEDS)
def test_a_position_is_never_drawn_twice(num_tasks, draws, seed):
    target = curriculum(["a"] * num_tasks, by_pass_rate=True, seed=seed)
    positions = []
    for _ in range(draws):
        positions.append(target.draw())
        target.observe(positions[-1], [float(positions[-1] % 2)])
    assert len(set(positions)) == draws
    visits = Counter(position % num_tasks for position in positions)
    assert set(positions) == {
        visit * num_tasks + row for row, count in visits.items() for visit in range(count)
    }


# ------------------------------------------------------------------------------------------------- pass rates


@given(rate=st.floats(0, 1), target=st.floats(0.05, 0.95))
def test_the_weight_is_largest_at_the_target_and_a_variance_at_one_half(rate, target):
    assert [learning_weight(end, target) for end in (target, 0.0, 1.0)] == pytest.approx([1.0, 0.0, 0.0])
    assert 0.0 <= learning_weight(rate, target) <= 1.0 + 1e-12
    assert learning_weight(rate, 0.5) == pytest.approx(4 * rate * (1 - rate))


@FEW
@given(
    rates=st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.875, 1.0]), min_size=2, max_size=12),
    target=st.sampled_from([0.3, 0.5, 0.8]),
    floor=st.sampled_from([0.05, 0.1, 1.0]),
    seed=SEEDS,
)
def test_visits_are_weights_times_epochs(rates, target, floor, seed):
    """Over time, each task is visited once per 1 / weight epochs, by no more than two visits more or
    fewer.
    """
    drawn = taught(rates, 300, target_pass_rate=target, floor=floor, seed=seed)
    visits = np.bincount(drawn, minlength=len(rates))
    weights = np.array([max(floor, learning_weight(rate, target)) for rate in rates])
    epochs = visits.sum() / weights.sum()
    # By its own phase a task is within one visit; the epochs are known only from all visits, each of them
    # within one.
    assert np.all(np.abs(visits - weights * epochs) <= 2 + weights * len(rates) / weights.sum() * 2)


@FEW
@given(
    rates=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=10),
    floor=st.floats(0.1, 1.0),
    seed=SEEDS,
)
def test_no_task_is_ever_given_up(rates, floor, seed):
    """No gap between two visits of a task is longer than 2 / floor epochs, in draws."""
    drawn = taught(rates, 300, floor=floor, seed=seed)
    longest = 2 * len(rates) / floor + 2 * len(rates)
    for row in range(len(rates)):
        places = [-1, *(place for place, other in enumerate(drawn) if other == row), 300]
        assert max(later - earlier for earlier, later in itertools.pairwise(places)) <= longest


def test_what_always_or_never_passes_is_drawn_less_but_never_never():
    visits = Counter(taught([0.0, 0.5, 1.0, 0.5], 2200, floor=0.1))
    # Of weights 0.1, 1, 0.1, 1: 1,000 epochs of 2.2 draws.
    assert [visits[row] for row in range(4)] == pytest.approx([100, 1000, 100, 1000], abs=10)


def test_a_task_that_begins_to_pass_comes_more_often_at_once():
    target = curriculum(["s"] * 10, by_pass_rate=True, shuffle=False, pass_rate_decay=0.0, floor=0.05)
    for _ in range(10):
        target.observe(target.draw(), [0.0, 0.0])
    counted = []
    for _ in range(400):
        position = target.draw()
        counted.append(position % 10)
        target.observe(position, [1.0, 0.0] if position % 10 == 3 else [0.0, 0.0])
    assert Counter(counted)[3] > 0.5 * 400, "one of weight 1 among nine of 0.05"


def test_a_late_result_is_not_made_up_for():
    """Of 41 tasks that never pass, one does, which is known only when it is nearly due again: its share is a
    third, and no burst.
    """
    target = curriculum(["s"] * 41, by_pass_rate=True, pass_rate_decay=0.0, floor=0.05)
    late = 0
    for draws in range(200):
        position = target.draw()
        if position % 41 == 0 and draws >= 41:
            late = position
            break
        target.observe(position, [0.0])
    for _ in range(20):
        target.observe(target.draw(), [0.0])
    target.observe(late, [0.0, 1.0])
    assert 3 <= Counter(rows(target, 15))[0] <= 7


def test_recent_attempts_count_more():
    """0 of 4, then 4 of 4: half of the earlier ones count, so that 4 of 6 passed."""
    target = curriculum(["s"], by_pass_rate=True, pass_rate_decay=0.5)
    target.observe(target.draw(), [0.0] * 4)
    target.observe(target.draw(), [1.0] * 4)
    assert target.metrics()["pass_rate/s"] == pytest.approx(4 / 6)
    assert target.state()["tasks"]["tried"] == [6.0]


@pytest.mark.parametrize(
    ("options", "accuracies"), [({"by_pass_rate": True}, []), ({"source_weights": {"s": 1}}, [1.0, 1.0])]
)
def test_a_group_of_which_nothing_counts_changes_nothing(options, accuracies):
    target = curriculum(["s", "s"], **options)
    for _ in range(3):
        target.observe(target.draw(), accuracies and [0.5, 0.0])
    before = json.dumps(target.state())
    for row in (0, 1):
        target.observe(row, accuracies)
    assert json.dumps(target.state()) == before


@given(results=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), max_size=8), decay=st.floats(0, 1))
def test_no_rounding_makes_more_attempts_pass_than_there_were(results, decay):
    target = curriculum(["s"], by_pass_rate=True, pass_rate_decay=decay)
    for accuracies in results:
        target.observe(target.draw(), accuracies)
        assert 0 <= target.metrics()["pass_rate/s"] <= 1


# ----------------------------------------------------------------------------------------------------- resume


def test_a_state_by_hand():
    """The second of four tasks weighs a quarter, so its next visit is four epochs away, not one."""
    target = curriculum(["s"] * 4, by_pass_rate=True, floor=0.25, shuffle=False)
    rows(target, 1)
    target.observe(target.draw(), [1.0, 1.0])
    assert target.state() == {
        "num_tasks": 4,
        "pools": {"": {"turn": 2.5, "now": 0.375}},
        "tasks": {
            "row": [0, 1],
            "due": [1.125, 4.375],
            "visits": [1, 1],
            "last": [0.125, 0.375],
            "passed": [0.0, 2.0],
            "tried": [0.0, 2.0],
        },
    }


MOVES = st.lists(
    st.tuples(st.sampled_from(["draw", "draw", "result", "save"]), st.integers(0, 1000)), max_size=120
)


@FEW
@given(
    moves=MOVES, weighs_sources=st.booleans(), by_pass_rate=st.booleans(), shuffle=st.booleans(), seed=SEEDS
)
def test_interrupted_at_any_moment_it_draws_what_it_would_have_drawn(
    moves, weighs_sources, by_pass_rate, shuffle, seed
):
    options = {"seed": seed, "shuffle": shuffle, "by_pass_rate": by_pass_rate or not weighs_sources}
    options["source_weights"] = {"a": 3, "b": 0.7} if weighs_sources else {}
    sources = list("ababbb")
    whole = resumed = curriculum(sources, **options)
    resumed = curriculum(sources, **options)
    waiting: list[int] = []
    for move, number in moves:
        if move == "draw":
            waiting.append(whole.draw())
            assert resumed.draw() == waiting[-1]
        elif move == "result" and waiting:
            position = waiting.pop(number % len(waiting))
            accuracies = [float(number >> bit & 1) for bit in range(3)]
            whole.observe(position, accuracies)
            resumed.observe(position, accuracies[::-1])
        elif move == "save":
            state = json.loads(json.dumps(resumed.state()))
            resumed = curriculum(sources, **options)
            resumed.restore(state)
    assert resumed.state() == whole.state()
    assert [resumed.draw() for _ in range(20)] == [whole.draw() for _ in range(20)]


def test_weights_may_change_on_resume_and_nothing_is_made_up_for():
    names = ["a", "b"]
    first = curriculum(names, source_weights={"a": 9, "b": 1})
    rows(first, 100)
    second = curriculum(names, source_weights={"a": 1, "b": 1})
    second.restore(first.state())
    assert abs(Counter(rows(second, 40))[0] - 20) <= 3


def test_other_tasks_or_pools_are_refused():
    state = curriculum(["a"] * 4, by_pass_rate=True).state()
    with pytest.raises(
        CheckpointError,
        match=r"is for 4 tasks in one pool, this run's of 5 tasks in one pool; resume with the same data",
    ):
        curriculum(["a"] * 5, by_pass_rate=True).restore(state)
    with pytest.raises(CheckpointError, match=r"this run's of 4 tasks in sources a, b"):
        curriculum(["a", "b"] * 2, source_weights={"a": 1, "b": 1}).restore(state)


# ---------------------------------------------------------------------------------------------------- account


def test_metrics_by_hand():
    target = curriculum(["a", "a", "b"], by_pass_rate=True, floor=0.1, shuffle=False)
    for accuracies in ([1.0, 0.0], [1.0, 1.0]):
        target.observe(target.draw(), accuracies)
    target.finish_step()
    metrics = target.metrics()
    # Weights 1, 0.1 and 1 (not visited).
    entropy = -sum(weight / 2.1 * np.log(weight / 2.1) for weight in (1, 0.1, 1))
    assert metrics == pytest.approx(
        {
            "effective_tasks": np.exp(entropy),
            "visited": 2 / 3,
            "share/a": 1.0,
            "share/b": 0.0,
            "pass_rate/a": 0.75,
            "num_attempts": 4.0,
            "never_passed": 0.0,
            "always_passed": 0.5,
        }
    )


def test_shares_are_of_the_last_step_and_chances_of_all_pools():
    target = curriculum(["a", "a", "b"], source_weights={"a": 1, "b": 3})
    assert target.metrics() == pytest.approx(
        {"effective_tasks": np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.125))), "visited": 0.0}
    )
    rows(target, 8)
    assert "share/a" not in target.metrics(), "the step is not over"
    target.finish_step()
    assert {name: value for name, value in target.metrics().items() if "/" in name} == {
        "share/a": 0.25,
        "share/b": 0.75,
    }
    target.finish_step()
    assert "share/a" not in target.metrics(), "nothing was drawn in that step"


def test_every_source_has_a_weight_and_every_weight_a_source():
    with pytest.raises(
        DataError,
        match=r"names aime, but no training row that is kept has this source; the data has gsm8k, math",
    ):
        curriculum(["math", "gsm8k"], source_weights={"gsm8k": 1, "aime": 2, "math": 1})
    with pytest.raises(DataError, match="has no weight for math; give every source"):
        curriculum(["math", "gsm8k"], source_weights={"gsm8k": 1})
