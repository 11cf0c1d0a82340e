"""Which ready groups make a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.ledger import MAX_LEASES_IN_ORDER, Ledger, LedgerRules
from agentrl.config.buffer import BufferConfig
from agentrl.config.curriculum import CurriculumConfig
from agentrl.config.data import DataConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config


def ledger(sampler: str, *, per_step: int = 2, staleness: int = 2, **options) -> Ledger:
    made = Ledger(
        LedgerRules(
            groups_per_step=per_step, max_staleness=staleness, group_size=1, sampler=sampler, **options
        )
    )
    made.advance(0)
    return made


def finish(target: Ledger, group_id: int, version: int = 0) -> None:
    target.add_member("a", group_id, 0, version)


def taken(target: Ledger) -> list[int] | None:
    batch = target.take(2)
    return None if batch is None else [group.group_id for group in batch]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [("fifo", [1, 2]), ("freshest", [3, 1]), ("windowed", [4, 3]), ("in_order", None)],
)
def test_each_sampler_takes_its_own(sampler, expected):
    target = ledger(sampler)
    for _ in range(5):
        target.lease("a")
    target.drop("a", 5, "any")
    target.advance(1)
    finish(target, 4, 0)
    finish(target, 3, 1)
    finish(target, 2, 0)
    finish(target, 1, 0)  # group 0 is still played
    assert taken(target) == expected


@given(order=st.permutations(range(6)), seed=st.integers(0, 100))
def test_in_order_makes_the_same_batches_whatever_finishes_first(order, seed):
    target = ledger("in_order")
    batches = []
    for _ in range(6):
        target.lease("a")
    for version, group_id in enumerate(order):
        if (seed >> version) & 1 and target.drop(
            "a", group_id, "tool_error"
        ):  # it fails, and is played again
            assert target.lease("a") == group_id
        finish(target, group_id)
        while (batch := taken(target)) is not None:
            batches.append(batch)
            target.advance(len(batches))
    assert batches == [[0, 1], [2, 3], [4, 5]]


def test_in_order_gives_up_a_group_that_always_fails():
    target = ledger("in_order", per_step=1)
    for _ in range(MAX_LEASES_IN_ORDER):
        assert target.lease("a") == 0
        assert target.drop("a", 0, "tool_error")
    assert target.lease("a") == 1
    assert target.groups.counts().dropped == {"tool_error": 1}
    assert target.groups.counts().is_balanced


def test_windowed_keeps_more_in_flight_and_drops_what_is_left_over():
    target = ledger("windowed", staleness=0, oversample=1.5)
    assert [target.lease("a") for _ in range(3)] == [0, 1, 2]
    assert not target.can_lease()
    for group_id in (2, 0, 1):
        finish(target, group_id)
    assert taken(target) == [2, 0]
    target.advance(1)
    assert target.drop_stale() == [1]
    assert target.groups.counts().is_balanced


def test_in_order_needs_an_order_that_does_not_depend_on_results():
    with pytest.raises(ValueError, match="by_pass_rate"):
        Config(
            data=DataConfig(train_files=("x",), curriculum=CurriculumConfig(by_pass_rate=True)),
            buffer=BufferConfig(sampler="in_order"),
            model=ModelConfig(path="x"),
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"oversample": 2}, "sampler=windowed"),
        ({"sampler": "windowed"}, "stragglers=drop"),
        ({"sampler": "in_order", "stragglers": "drop"}, "drops some"),
        ({"sampler": "in_order", "drop_constant_groups": True}, "drops some"),
    ],
)
def test_samplers_that_cannot_do_what_else_is_asked_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        BufferConfig(**options)
