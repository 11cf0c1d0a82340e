"""TokenPace: its sums give back how the time of a token depends on the requests that run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.servers.pace import TokenPace
from agentrl.types import Generation

ROUNDS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 50)), min_size=2, max_size=8
)  # requests that run together, tokens of each


def answer(num_tokens: int) -> Generation:
    ids = np.zeros(num_tokens, np.int32)
    return Generation(ids, ids.astype(np.float32), ids, "stop")


def played(pace: TokenPace, rounds: Sequence[tuple[int, int]], *, alone_s: float, each_s: float) -> None:
    """Have a server answer rounds of equal requests, each token after `alone_s + each_s * running`."""

    async def ask(running: int, num_tokens: int) -> None:
        with pace.request("http://server") as answers:
            await trio.sleep(num_tokens * (alone_s + each_s * running))
            answers.append(answer(num_tokens))

    async def main() -> None:
        for running, num_tokens in rounds:
            async with trio.open_nursery() as nursery:
                for _ in range(running):
                    nursery.start_soon(ask, running, num_tokens)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@given(ROUNDS, st.floats(0.001, 1.0), st.floats(0.0, 0.1))
@settings(max_examples=60, deadline=None)
def test_the_line_through_the_sums_is_the_one_of_the_server(rounds, alone_s, each_s) -> None:
    pace = TokenPace()
    played(pace, rounds, alone_s=alone_s, each_s=each_s)
    sums = pace.sums()
    assert sums["tokens"] == sum(running * num for running, num in rounds)
    assert sums["running"] == pytest.approx(sum(running * running * num for running, num in rounds))
    if len({running for running, _ in rounds}) == 1:
        return
    moments = [[sums["tokens"], sums["running"]], [sums["running"], sums["running_squared"]]]
    found = np.linalg.solve(moments, [sums["seconds"], sums["running_seconds"]])
    assert found == pytest.approx([alone_s, each_s], rel=1e-6, abs=1e-9)


def test_requests_count_while_they_run_and_on_their_own_server() -> None:
    """One of ten seconds, beside which another runs for five, and a third on another server."""
    pace = TokenPace()

    async def ask(url: str, seconds: float) -> None:
        with pace.request(url) as answers:
            await trio.sleep(seconds)
            answers.append(answer(10))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for url, seconds in (("a", 10.0), ("a", 5.0), ("b", 10.0)):
                nursery.start_soon(ask, url, seconds)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert pace.sums() == pytest.approx(
        {
            "tokens": 30,
            "running": 10 * (1.5 + 2.0 + 1.0),
            "running_squared": 10 * (1.5**2 + 2.0**2 + 1.0),
            "seconds": 25.0,
            "running_seconds": 15.0 + 10.0 + 10.0,
        }
    )


@pytest.mark.parametrize("ends", ["without an answer", "by an error", "cancelled", "without a token"])
def test_a_request_that_samples_nothing_adds_nothing_and_runs_no_longer(ends) -> None:
    pace = TokenPace()

    async def fail() -> None:
        with trio.move_on_after(1 if ends == "cancelled" else 100), pace.request("a") as answers:
            await trio.sleep(3)
            if ends == "by an error":
                raise OSError("gone")
            if ends == "without a token":
                answers.append(answer(0))

    async def main() -> None:
        try:
            await fail()
        except OSError:
            assert ends == "by an error"
        with pace.request("a") as answers:
            await trio.sleep(2)
            answers.append(answer(4))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    expected = {"tokens": 4, "running": 4, "running_squared": 4, "seconds": 2, "running_seconds": 2}
    assert pace.sums() == pytest.approx(expected)
