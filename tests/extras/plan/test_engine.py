"""The modelled server against a model of it in small time steps, and what pauses, updates and deaths keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ServerError
from agentrl.extras.plan.clock import run_virtually
from agentrl.extras.plan.engine import ServerSpeed, VirtualServer
from agentrl.types import Generation

DT = 0.002


@dataclass
class Request:
    """arrives: when. prompt, need: tokens."""

    arrives: float
    prompt: int
    need: int
    done: float = 0.0
    ended: float = field(default=math.nan)


def in_small_steps(requests: list[Request], speed: ServerSpeed) -> list[float]:
    """Return when each request ends, by stepping through time."""
    waiting, running, stall_s, now = sorted(requests, key=lambda r: r.arrives), [], 0.0, 0.0
    while waiting or running:
        while waiting and waiting[0].arrives <= now and len(running) < speed.max_running:
            running.append(waiting.pop(0))
            stall_s += running[-1].prompt * speed.prefill_s
        now += DT
        if stall_s > 0:
            stall_s -= DT
        elif running:
            context = sum(r.prompt + r.done for r in running)
            for request in running:
                request.done += DT / (speed.base_s(len(running)) + speed.kv_s * context)
            for request in [r for r in running if r.done >= r.need]:
                request.ended = now
                running.remove(request)
    return [request.ended for request in requests]


def by_engine(requests: list[Request], speed: ServerSpeed) -> list[float]:
    async def ask(engine: VirtualServer, index: int, request: Request) -> None:
        await trio.sleep(request.arrives)
        generation = await engine.generate(f"r{index}", request.prompt, request.need, 0, (f"{index}", "p"))
        assert len(generation.token_ids) == request.need
        ends[index] = trio.current_time()

    async def main() -> None:
        engine = VirtualServer(speed)
        engine.set_version(0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            async with trio.open_nursery() as asking:
                for index, request in enumerate(requests):
                    asking.start_soon(ask, engine, index, request)
            nursery.cancel_scope.cancel()

    ends: dict[int, float] = {}
    run_virtually(main, seed=0)
    return [ends[index] for index in range(len(requests))]


@settings(max_examples=15, deadline=None)
@given(
    drawn=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(1, 30)),
        min_size=1,
        max_size=5,
        unique_by=lambda request: request[0],
    ),
    most=st.sampled_from([1, 2, 64]),
    kv_s=st.sampled_from([0.0, 0.001]),
)
def test_requests_end_when_small_steps_say(drawn: list[tuple[int, int, int]], most: int, kv_s: float) -> None:
    speed = ServerSpeed(lambda n: 0.02 + 0.01 * n, kv_s=kv_s, prefill_s=0.001, max_running=most)
    requests = [Request(arrives / 10, prompt, need) for arrives, prompt, need in drawn]
    ends = by_engine(requests, speed)
    # one prompt is shared: with the cache of the first, the others' prefill is shorter
    np.testing.assert_allclose(ends, in_small_steps(requests, speed), atol=0.05 + 0.001 * 30 * len(drawn))


def test_a_full_cache_evicts_the_newest_and_loses_no_token() -> None:
    async def ask(engine: VirtualServer, name: str, need: int) -> None:
        done[name] = await engine.generate(name, 10, need, 0, (name, name))

    async def main() -> None:
        engine = VirtualServer(ServerSpeed(lambda n: 0.1, kv_tokens=100))
        engine.set_version(7)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            async with trio.open_nursery() as asking:
                for name in ("a", "b", "c"):
                    asking.start_soon(ask, engine, name, 50)
                    await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        assert engine.peak_kv_tokens <= 100 + 1e-6
        assert engine.num_retractions > 0

    done: dict[str, Generation] = {}
    run_virtually(main, seed=0)
    assert [len(done[name].token_ids) for name in ("a", "b", "c")] == [50, 50, 50]
    assert done["a"].num_retractions == 0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_update_in_the_middle(mode: str) -> None:
    """30 of 100 tokens are of the old version; an abort returns them, and other modes go on."""

    async def main() -> Generation:
        engine = VirtualServer(ServerSpeed(lambda n: 0.1, prefill_s=0.0))
        engine.set_version(1)
        found: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)

            async def ask() -> None:
                found.append(await engine.generate("r", 10, 100, 5, ("r", "p")))
                nursery.cancel_scope.cancel()

            nursery.start_soon(ask)
            await trio.sleep(3.05)
            engine.pause(mode)  # type: ignore[arg-type]
            await trio.sleep(60.0)
            if mode != "abort":
                assert not found, "a paused server samples nothing"
                engine.set_version(2)
                engine.resume()
        return found[0]

    generation = run_virtually(main, seed=0)
    versions = {"abort": [1] * 30, "retract": [1] * 30 + [2] * 70, "in_place": [1] * 30 + [2] * 70}[mode]
    assert generation.versions.tolist() == versions
    assert generation.finish_reason == ("abort" if mode == "abort" else "stop")
    assert generation.num_retractions == (mode == "retract")
    assert set(generation.token_ids.tolist()) == {5}


def test_a_server_that_dies_fails_its_requests_and_samples_again_after_an_update() -> None:
    async def main() -> None:
        engine = VirtualServer(ServerSpeed(lambda n: 0.1))
        engine.set_version(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)

            async def die() -> None:
                await trio.sleep(1.0)
                engine.die()

            nursery.start_soon(die)
            with pytest.raises(ServerError, match="closed the connection"):
                await engine.generate("r", 10, 100, 0, ("r", "p"))
            with pytest.raises(ServerError, match="refused"):
                await engine.generate("r", 10, 100, 0, ("r", "p"))
            engine.restart()
            assert not await engine.serves(1), "it lost its weights"
            engine.set_version(2)
            assert await engine.serves(2)
            assert len((await engine.generate("r", 10, 5, 0, ("r", "p"))).token_ids) == 5
            nursery.cancel_scope.cancel()

    run_virtually(main, seed=0)
