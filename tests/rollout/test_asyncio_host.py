"""Calls cross from trio to asyncio and back: results, errors, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import threading

import pytest
import trio

from agentrl.plugins.blame import running_plugin
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.types import PluginId


def test_thousands_of_calls_run_side_by_side():
    async def main():
        everyone = asyncio.Barrier(1000)
        results: list[int] = []

        async def meet(number: int) -> int:
            await everyone.wait()  # passes only when all are inside at once
            return number

        async def call(number: int) -> None:
            results.append(await host.run(meet, number))

        with AsyncioHost() as host:
            async with trio.open_nursery() as nursery:
                for number in range(1000):
                    nursery.start_soon(call, number)
        assert sorted(results) == list(range(1000))

    trio.run(main)


async def test_asyncio_works_inside_and_errors_come_back():
    async def fail() -> None:
        await asyncio.wait_for(asyncio.sleep(0), 1)
        await asyncio.get_running_loop().run_in_executor(None, int, "7")
        raise LookupError("mine")

    async def leave() -> None:
        raise SystemExit(3)

    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with AsyncioHost() as host:
        with pytest.raises(LookupError, match="mine"):
            await host.run(fail)
        with pytest.raises(RuntimeError, match=r"sys\.exit\(3\)"):
            await host.run(leave)
        with pytest.raises(RuntimeError, match="cancelled from within"):
            await host.run(cancel_itself)
        with pytest.raises(LookupError):  # the loop is still there
            await host.run(fail)


async def test_a_cancelled_call_has_cleaned_up_before_its_caller_goes_on():
    steps: list[str] = []

    async def work(begun: threading.Event) -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    with AsyncioHost() as host:
        begun = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run, work, begun)
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
        steps.append("caller goes on")
    assert steps == ["cleaned up", "caller goes on"]


async def test_a_call_that_refuses_to_end_is_left_behind_by_the_name_of_its_plugin(caplog):
    async def stubborn(begun: threading.Event) -> None:
        begun.set()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if released.is_set():
                    return

    released = threading.Event()
    running_plugin.set(PluginId("tool", "stubborn"))
    with AsyncioHost(grace_s=0.05) as host:
        begun = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run, stubborn, begun)
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
        assert nursery.cancel_scope.cancelled_caught
        released.set()
    (told,) = caplog.messages
    assert told == "tool 'stubborn' was cancelled, did not end within 0.05 s and was left behind"


async def test_tasks_that_a_plugin_left_running_end_with_the_host():
    ended = threading.Event()

    async def forget() -> None:
        async def orphan() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        kept.append(asyncio.create_task(orphan()))
        await asyncio.sleep(0)

    kept: list[asyncio.Task] = []

    with AsyncioHost() as host:
        await host.run(forget)
    assert ended.is_set()
