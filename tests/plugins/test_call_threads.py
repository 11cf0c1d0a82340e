"""Calls in threads that outlive their deadlines: counted, bounded, told once, and in nobody's way."""

from __future__ import annotations

import logging
import threading

import pytest
import trio
import trio.testing

from agentrl.plugins import function_tool
from agentrl.plugins.call_threads import CallThreads, StuckThreads
from agentrl.plugins.functions import MAX_THREADS


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


async def hang(threads: CallThreads, release: threading.Event) -> None:
    """Make a call whose caller leaves while it runs."""
    begun = threading.Event()

    def work() -> None:
        begun.set()
        release.wait(60.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run, work)
        await trio.to_thread.run_sync(begun.wait, 60.0)
        nursery.cancel_scope.cancel()


async def until_none_is_stuck(threads: CallThreads) -> None:
    with trio.fail_after(60.0):
        while threads.num_stuck:
            await trio.sleep(0.001)


def test_calls_that_hang_are_counted_bounded_and_told_once(release, caplog):
    before = CallThreads.num_stuck_here()

    async def main() -> None:
        threads = CallThreads("tool 'slow'", num=1, max_stuck=3)
        for number in range(1, 4):
            await hang(threads, release)
            assert (threads.num_stuck, CallThreads.num_stuck_here()) == (number, before + number)
            if number < 3:
                assert await threads.run(lambda: "ok") == "ok", "the only place is free again"
        with pytest.raises(StuckThreads, match=r"^3 calls of tool 'slow' still run in threads"):
            await threads.run(lambda: "ok")
        release.set()
        await until_none_is_stuck(threads)
        assert CallThreads.num_stuck_here() == before
        assert await threads.run(lambda: "ok") == "ok"

    with caplog.at_level(logging.WARNING):
        trio.run(main)
    (record,) = caplog.records
    assert "a call of tool 'slow'" in record.message
    assert "rollout/stuck_threads" in record.message


def test_no_more_calls_at_once_than_places(release):
    async def main() -> None:
        threads = CallThreads("tool 'slow'", num=2)
        running: list[int] = []

        def work(index: int) -> None:
            running.append(index)
            release.wait(60.0)

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(threads.run, work, index)
            with trio.fail_after(60.0):
                while len(running) < 2:
                    await trio.sleep(0.001)
            await trio.testing.wait_all_tasks_blocked()
            assert len(running) == 2
            release.set()
        assert len(running) == 3
        assert threads.num_stuck == 0

    trio.run(main)


def test_a_function_that_hangs_leaves_other_attempts_their_threads(release):
    """More calls time out than a function may have at once, and the next one is answered."""

    running: list[str] = []

    def lookup(word: str) -> str:
        """Look a word up."""
        running.append(word)
        if word == "hang":
            release.wait(60.0)
        return word

    tool = function_tool(lookup)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_THREADS):
                nursery.start_soon(tool().call, {"word": "hang"})
            with trio.fail_after(60.0):
                while len(running) < MAX_THREADS:
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        with trio.fail_after(60.0):
            assert (await tool().call({"word": "tea"})).text == "tea"
        release.set()
        await until_none_is_stuck(tool.threads)

    trio.run(main)
