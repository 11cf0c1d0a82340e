"""Which server is asked, what happens when it fails or is interrupted, and what is never sent."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from agentrl.errors import RequestRefused, ServerError
from agentrl.servers.protocol import Pulse, ServerLoad
from agentrl.servers.router import MAX_SERVER_FAILURES, Router
from agentrl.types import Generation, SamplingParams

EOS = 9


class Server:
    """Samples 1, 2, 3, ... then EOS; `chunks` are the sizes of the pieces before it is interrupted, `errors`
    come first.
    """

    def __init__(
        self,
        *,
        version: int | None = 0,
        length: int = 5,
        latency_s: float = 1.0,
        chunks=(),
        errors=(),
        restarts=False,
    ) -> None:
        self.restarts = restarts  # an error means that it died and came back with the weights of its files
        self.version, self.length, self.latency_s = version, length, latency_s
        self.chunks, self.errors = list(chunks), list(errors)
        self.requests: list[tuple[list[int], int, str]] = []
        self.num_prompt: int | None = None
        self.probes = self.pulses = 0
        self.is_paused, self.is_working = False, True
        self.is_closed = False

    async def generate(self, input_ids, params, *, rid):
        self.requests.append((list(input_ids), params.max_new_tokens, rid))
        self.num_prompt = len(input_ids) if self.num_prompt is None else self.num_prompt
        await trio.sleep(self.latency_s)
        if self.errors:
            self.version = None if self.restarts else self.version
            raise self.errors.pop(0)
        done = len(input_ids) - self.num_prompt
        whole = [*range(1, self.length), EOS][done:]
        size = min(params.max_new_tokens, self.chunks.pop(0) if self.chunks else len(whole))
        ids = np.array(whole[:size], np.int32)
        is_interrupted = bool(size < params.max_new_tokens and size < len(whole)) or size == 0
        reason = "abort" if is_interrupted else "stop" if len(ids) == len(whole) else "length"
        assert self.version is not None
        return Generation(ids, -ids / np.float32(10), np.full(len(ids), self.version, np.int32), reason)

    async def abort(self, rid):
        return

    async def settle_aborts(self):
        return

    async def serves(self, version):
        self.probes += 1
        return self.version is not None and self.version >= version

    async def pulse(self):
        self.pulses += 1
        return Pulse(self.is_paused, ServerLoad(1, 0, self.pulses if self.is_working else 0, 100))

    async def aclose(self):
        self.is_closed = True


def params(max_new_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens, stop_token_ids=(EOS,))


def run(main, servers: dict[str, Server], *, version: int = 0, **options) -> Router:
    async def wrapped():
        router = Router(lambda url: servers[url], vocab_size=10, **options)
        router.set_servers(list(servers), version=version)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.watch)
            await main(router)
            nursery.cancel_scope.cancel()
        assert set(router.outstanding_tokens().values()) <= {0}
        return router

    return trio.run(wrapped, clock=MockClock(autojump_threshold=0))


# ---------------------------------------------------------------------------------------------- interruptions


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(1, 8))
def test_an_interrupted_generation_equals_an_uninterrupted_one(chunks, max_new_tokens):
    async def main(router):
        found.append(await router.generate([7], params(max_new_tokens), trajectory_key="t"))

    found: list[Generation] = []
    run(main, {"a": Server()})
    run(main, {"a": Server(chunks=chunks)})
    whole, joined = found
    np.testing.assert_array_equal(joined.token_ids, whole.token_ids)
    np.testing.assert_array_equal(joined.logprobs, whole.logprobs)
    assert joined.finish_reason == whole.finish_reason
    assert joined.token_ids.dtype == joined.versions.dtype == np.int32
    assert (joined.num_interruptions == 0) == (not chunks or chunks[0] >= len(whole.token_ids))


def test_each_piece_keeps_its_version_and_asks_for_the_rest():
    server = Server(version=3, chunks=[2, 1])

    async def main(router):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bump)
            generation = await router.generate([7, 8], params(8), trajectory_key="t")
        assert generation.versions.tolist() == [3, 3, 4, 4, 4]
        assert generation.num_interruptions == 2 == router.num_interruptions

    async def bump():
        await trio.sleep(1.5)
        server.version = 4

    run(main, {"a": server})
    assert [(ids, limit) for ids, limit, _ in server.requests] == [
        ([7, 8], 8),
        ([7, 8, 1, 2], 6),
        ([7, 8, 1, 2, 3], 5),
    ]
    assert len({rid for _, _, rid in server.requests}) == 3


def test_sampled_tokens_are_counted_at_each_interruption():
    async def main(router):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: router.generate([7], params(), trajectory_key="t"))
            await trio.sleep(1.5)
            assert router.work.sampled_tokens == 2, "the turn has not ended yet"
        assert router.work.sampled_tokens == 5

    run(main, {"a": Server(chunks=[2])})


def test_an_abort_right_behind_the_last_token_ends_the_turn():
    class Late(Server):
        async def generate(self, input_ids, params, *, rid):
            self.requests.append((list(input_ids), params.max_new_tokens, rid))
            return Generation(
                np.array([1, EOS], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "abort"
            )

    async def main(router):
        assert (await router.generate([7], params(8), trajectory_key="t")).finish_reason == "stop"
        assert (await router.generate([7], SamplingParams(2), trajectory_key="t")).finish_reason == "length"

    run(main, {"a": Late()})


# --------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [ServerError("gone"), ServerError("broken", status=500)])
def test_a_failed_server_is_left_and_comes_back_only_with_the_weights(error):
    bad, good = Server(errors=[error], restarts=True), Server()

    async def main(router):
        first = await router.generate([7], params(), trajectory_key="t")
        assert first.token_ids.tolist() == [1, 2, 3, 4, EOS]
        assert first.num_interruptions == 0
        await trio.sleep(5)
        assert router.num_up == 1
        good.version = 1
        router.set_servers(["a", "b"], version=1)
        bad.version = 0  # older than what was published
        await trio.sleep(5)
        await router.generate([7], params(), trajectory_key="u")
        assert router.num_up == 1
        bad.version = 1  # published to
        await trio.sleep(1)
        assert router.num_up == 2

    run(main, {"a": bad, "b": good})
    assert (len(bad.requests), len(good.requests)) == (1, 2)


def test_a_server_that_answers_probes_and_no_generation_draws_less_and_less():
    bad, good = (
        Server(latency_s=0.0, errors=[ServerError("broken", status=500)] * 1000),
        Server(latency_s=0.5),
    )

    async def main(router):
        await trio.sleep(1)
        with trio.move_on_after(120):
            while True:
                await router.generate([7], params(), trajectory_key="t")
                router.forget("t")
        assert router.num_drained == len(bad.requests)

    run(main, {"a": bad, "b": good})
    assert len(good.requests) > 100
    assert 6 <= len(bad.requests) <= 10  # after 0.5, 1, 2, ... 30 s


def test_a_request_under_which_servers_fail_again_and_again_is_given_up():
    server = Server(errors=[ServerError(f"crash {i}", status=500) for i in range(9)])

    async def main(router):
        with pytest.raises(
            ServerError, match=f"{MAX_SERVER_FAILURES} consecutive server failures, the last: crash 2"
        ):
            await router.generate([7], params(), trajectory_key="t")

    run(main, {"a": server})
    assert len(server.requests) == MAX_SERVER_FAILURES


def test_a_refused_request_is_not_tried_again_and_blames_no_server():
    server = Server(errors=[RequestRefused("bad temperature", status=400)])

    async def main(router):
        with pytest.raises(RequestRefused, match="bad temperature"):
            await router.generate([7], params(), trajectory_key="t")
        assert router.num_up == 1

    run(main, {"a": server})
    assert len(server.requests) == 1


def test_a_generation_waits_for_a_server_and_can_be_cancelled():
    server = Server(version=None)

    async def main(router):
        with trio.move_on_after(30) as scope:
            await router.generate([7], params(), trajectory_key="t")
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: router.generate([7], params(), trajectory_key="t"))
            await trio.sleep(30)
            server.version = 0
        assert len(server.requests) == 1

    run(main, {"a": server})


def test_why_a_server_stays_out_of_use_is_said_once_per_reason(caplog):
    class Broken(Server):
        async def serves(self, version):
            if trio.current_time() - started < 30:
                raise ServerError("http://a sent a load that cannot be read")
            return trio.current_time() - started > 60

    async def main(router: Router) -> None:
        nonlocal started
        started = trio.current_time()
        await trio.sleep(5)
        assert not caplog.records  # a server that starts is given time
        await router.generate([1], params(), trajectory_key="t")

    started = 0.0
    run(main, {"http://a": Broken()})
    texts = [record.getMessage() for record in caplog.records]
    assert [text.rpartition(": ")[2] for text in texts] == [
        "http://a sent a load that cannot be read",
        "it does not serve version 0 yet",
    ]
    assert texts[0].startswith("server http://a has not been used for 10 s")


async def test_a_retired_server_loses_its_requests_to_another(mock_clock):
    old, new = Server(latency_s=float("inf")), Server()

    servers = {"a": old, "b": new}
    router = Router(lambda url: servers[url], vocab_size=10)
    router.set_servers(["a"], version=0)
    async with trio.open_nursery() as watching:
        watching.start_soon(router.watch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: router.generate([7], params(), trajectory_key="t"))
            await trio.sleep(1)
            assert router.outstanding_tokens() == {"a": 9}
            router.set_servers(["b"], version=0)
        await trio.sleep(0)
        assert old.is_closed
        watching.cancel_scope.cancel()
    assert len(new.requests) == 1


# ---------------------------------------------------------------------------------------------------- choices


def test_a_trajectory_stays_where_its_prefix_is_and_new_ones_go_where_least_is_to_do():
    servers = {"a": Server(), "b": Server()}

    async def main(router):
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            for key in "stuv":
                nursery.start_soon(lambda key=key: router.generate([7], params(), trajectory_key=key))
                await trio.sleep(0)
        homes = {
            rid.partition("-")[0]: url for url, server in servers.items() for _, _, rid in server.requests
        }
        assert sorted(homes.values()) == ["a", "a", "b", "b"]
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for key in "vuts":
                    nursery.start_soon(lambda key=key: router.generate([7, 1], params(), trajectory_key=key))
        for url, server in servers.items():
            assert {homes[rid.partition("-")[0]] for _, _, rid in server.requests} == {url}
        router.forget("s")
        assert len(router._affinity) == 3

    run(main, servers)


def test_idle_is_the_time_without_a_request():
    async def main(router):
        await trio.sleep(3)
        assert router.idle.seconds() == 0  # nothing was asked yet
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: router.generate([7], params(), trajectory_key="t"))
            await trio.sleep(0.5)
            nursery.start_soon(lambda: router.generate([7], params(), trajectory_key="u"))
        await trio.sleep(4)
        assert router.idle.seconds() == pytest.approx(4)
        await router.generate([7], params(), trajectory_key="t")
        assert router.idle.seconds() == pytest.approx(4)

    run(main, {"a": Server()})


def test_cancelled_generations_leave_nothing_outstanding():
    async def main(router):
        await trio.sleep(1)
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                for key in range(20):
                    nursery.start_soon(
                        lambda key=key: router.generate([7], params(), trajectory_key=str(key))
                    )
        assert set(router.outstanding_tokens().values()) == {0}

    run(main, {"a": Server(), "b": Server()})


@pytest.mark.parametrize(
    ("ids", "max_new_tokens", "problem"),
    [
        ([], 1, "ids in 0..9"),
        ([10], 1, "ids in 0..9"),
        ([-1], 1, "ids in 0..9"),
        ([-1, 3], 1, "ids in 0..9"),
        ([3, 10], 1, "ids in 0..9"),
        ([1], 0, "at least 1"),
        ([1] * 10, 7, "context of 16"),
    ],
)
def test_what_could_kill_a_server_is_not_sent(ids, max_new_tokens, problem):
    server = Server()

    async def main(router):
        with pytest.raises(RequestRefused, match=problem):
            await router.generate(ids, params(max_new_tokens), trajectory_key="t")

    run(main, {"a": server}, context_tokens=16)
    assert not server.requests


def test_the_first_and_the_last_id_are_sent():
    server = Server()
    run(lambda router: router.generate([0, 9], params(), trajectory_key="t"), {"a": server})
    assert len(server.requests) == 1
