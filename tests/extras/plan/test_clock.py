"""The virtual clock: it costs no time, and a seed decides the order of tasks."""

from __future__ import annotations

import gc

import pytest
import trio

from agentrl.extras.plan.clock import run_virtually


def order_of(seed: int) -> list[int]:
    """Let many tasks wake at the same moments, and return the order in which they ran."""
    order: list[int] = []

    async def work(number: int) -> None:
        for _ in range(3):
            await trio.sleep(1000.0)
            order.append(number)

    async def main() -> float:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(work, number)
        return trio.current_time()

    assert run_virtually(main, seed=seed) == 3000.0
    return order


def test_a_seed_decides_the_order_of_tasks() -> None:
    assert order_of(1) == order_of(1)
    assert sorted(order_of(1)) == sorted(order_of(2))
    assert len({tuple(order_of(seed)) for seed in range(5)}) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_wait_without_end_is_an_error() -> None:
    with pytest.raises(trio.TrioInternalError) as caught:
        run_virtually(trio.sleep_forever, seed=0)
    assert "none has a deadline" in str(caught.value.__cause__)
    del caught
    gc.collect()  # trio's broken run complains here, not in a later test


def test_other_runs_are_not_changed() -> None:
    """What is set for one run is reset after it, also if it fails."""
    from trio._core import _run

    before = _run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING

    async def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        run_virtually(fail, seed=3)
    assert (_run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING) == before
