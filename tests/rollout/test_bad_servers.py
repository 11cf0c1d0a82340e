"""Servers that fail in each way a server can, on real sockets: they are drained, their trajectories go on
elsewhere, they come back.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from agentrl.errors import RequestRefused, ServerError
from agentrl.servers.client import PROBE_RID, SGLangClient
from agentrl.servers.router import Router
from agentrl.types import SamplingParams
from parts.raw_http import read_request, reply

PIECE = 4
TOTAL = 8
NUM_IDS = 64
PROMPT = [11, 12]


class Speaker:
    """Speaks just enough of the protocol: token k of a sequence is k. With `fault` it fails at each
    generation that is no probe.

    What drips sends its answer byte by byte, and never the last one.

    An interrupting one answers PIECE tokens at a time, as if an update came each time.
    """

    def __init__(self, *, fault: str | None = None, version: int = 3, interrupts: bool = False) -> None:
        self.fault, self.version, self.interrupts = fault, version, interrupts
        self.is_paused = False
        self.works, self.num_used_tokens = False, 7  # one that does not work stands still
        self.generations: list[dict] = []
        self.aborted: list[str] = []

    async def handle(self, stream: trio.SocketStream) -> None:
        async with stream:
            while (request := await read_request(stream)) is not None:
                path, body = request
                try:
                    answer = await self.answer(path, body)
                    if self.fault == "drips" and path == "/generate":
                        await drip(stream, answer)
                    await stream.send_all(answer)
                except (trio.BrokenResourceError, Dropped):
                    return
                if self.fault == "half_a_body":
                    return

    async def answer(self, path: str, body: dict) -> bytes:
        if path == "/generate":
            return await self.generate(body)
        if path == "/abort_request":
            self.aborted.append(body["rid"])
            return reply({})
        if path == "/v1/loads" and self.works:
            self.num_used_tokens += 1
        load = {
            "num_running_reqs": 1,
            "num_waiting_reqs": 0,
            "num_used_tokens": self.num_used_tokens,
            "max_total_num_tokens": 99,
        }
        answers = {
            "/model_info": {"model_path": "m", "weight_version": str(self.version)},
            "/server_info": {"is_paused": self.is_paused},
            "/ready": {},
            "/v1/loads": {"loads": [load]},
        }
        return reply(answers[path])

    async def generate(self, body: dict) -> bytes:
        is_probe = body["rid"].startswith(PROBE_RID)
        if not is_probe:
            self.generations.append(body)
        while self.fault == "hangs":
            await trio.sleep(0.01)
        if self.fault not in (None, "drips") and not is_probe:
            return self.fail()
        start, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        count = min(limit, PIECE) if self.interrupts else limit
        ids = list(range(start, start + count))
        meta = {
            "finish_reason": {"type": "length" if count == limit else "abort"},
            "output_token_logprobs": [[-token / 100, token, None] for token in ids],
            "weight_versions": [{"version": str(self.version), "start": 0, "end": count}],
        }
        return reply({"output_ids": ids, "meta_info": meta})

    def fail(self) -> bytes:
        if self.fault == "drops":
            raise Dropped
        return {
            "401": reply({"error": "no key"}, status=401),
            "404": reply({"detail": "Not Found"}, status=404),
            "500": reply({"error": {"message": "out of memory"}}, status=500),
            "503": reply({}, status=503),
            "garbage": b"\x16\x03\x01 what?\r\n\r\n",
            "no_json": b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>",
            "half_a_body": sampled([1])[:-10],
            "a_list": reply([{"output_ids": [1]}]),
            "null": reply(None),
            "other_tokens": sampled([1, 2], logprobs=[[-1.0, 1, None], [-1.0, 3, None]]),
            "no_logprobs": sampled([1, 2], logprobs=None),
            "short_logprobs": sampled([1, 2], logprobs=[[-1.0, 1, None]]),
            "nan_logprobs": sampled([1], logprobs=[[math.nan, 1, None]]),
            "null_logprobs": sampled([1], logprobs=[[None, 1, None]]),
            "unknown_ids": sampled([NUM_IDS]),
            "huge_ids": sampled([2**40]),
            "negative_ids": sampled([-1]),
            "too_many": sampled(list(range(TOTAL + 1))),
            "no_tokens": sampled([]),
        }[self.fault]


class Dropped(Exception):
    """The connection is to be closed."""


def sampled(ids: list[int], *, logprobs: object = ()) -> bytes:
    """A finished generation; `logprobs` () are those of the ids."""
    triples = [[-1.0, token, None] for token in ids] if logprobs == () else logprobs
    spans = [{"version": "3", "start": 0, "end": len(ids)}]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": triples, "weight_versions": spans}
    return reply({"output_ids": ids, "meta_info": meta})


async def drip(stream: trio.SocketStream, answer: bytes) -> None:
    for position in range(len(answer) - 1):
        await stream.send_all(answer[position : position + 1])
        await trio.sleep(0.02)
    await trio.sleep_forever()


@asynccontextmanager
async def serving(speaker: Speaker):
    """Yield the URL of the speaker."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, speaker.handle, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def routed(*speakers: Speaker, **options):
    """Yield a router over the speakers and their URLs; all are up."""
    async with trio.open_nursery() as nursery:
        urls = []
        for speaker in speakers:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, speaker.handle, listeners)
            urls.append(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        router = Router(partial(SGLangClient, num_ids=NUM_IDS), **options)
        router.set_servers(urls, version=3)
        nursery.start_soon(router.watch)
        with trio.fail_after(60):
            await until(lambda: router.num_up == len(urls))
            yield router, urls
        nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await router.aclose()


async def until(condition) -> None:
    while not condition():
        await trio.sleep(0.005)


async def turn(router: Router, key: str = "t"):
    return await router.generate(PROMPT, SamplingParams(TOTAL), trajectory_key=key)


def check(generation) -> None:
    """Each token of the sequence is there once, with its own log-probability and version."""
    assert generation.token_ids.tolist() == list(range(len(PROMPT), len(PROMPT) + TOTAL))
    assert generation.logprobs.tolist() == pytest.approx([-token / 100 for token in generation.token_ids])
    assert set(generation.versions) == {3}


ANSWERS_NOTHING = ["401", "404", "500", "503", "garbage", "no_json", "half_a_body", "drops"]
CONTRADICTS = [
    *("a_list", "null", "other_tokens", "no_logprobs", "short_logprobs", "nan_logprobs", "null_logprobs"),
    *("unknown_ids", "huge_ids", "negative_ids", "too_many", "no_tokens"),
]


@pytest.mark.parametrize("fault", [*ANSWERS_NOTHING, *CONTRADICTS])
async def test_no_answer_of_a_broken_server_becomes_a_generation(fault):
    """It is the server's failure, not a refusal of the request, which nobody would try elsewhere."""

    async with serving(Speaker(fault=fault)) as url:
        client = SGLangClient(url, num_ids=NUM_IDS)
        with trio.fail_after(30), pytest.raises(ServerError) as caught:
            await client.generate(PROMPT, SamplingParams(TOTAL), rid="r")
        assert not isinstance(caught.value, RequestRefused)
        await client.aclose()


@pytest.mark.parametrize(
    "fault", ["404", "500", "garbage", "no_json", "half_a_body", "other_tokens", "drops"]
)
async def test_a_server_that_fails_is_drained_and_comes_back_when_it_generates(fault):
    bad, good = Speaker(interrupts=True), Speaker()

    async with routed(bad, good) as (router, _):
        bad.fault = fault
        first = await turn(router)
        check(first)
        assert first.num_interruptions == 0
        assert (router.num_server_failures, router.num_drained) == (1, 1)
        tried = len(bad.generations)  # twice on a kept connection that closed without an answer
        assert tried == (2 if fault == "drops" else 1)
        await turn(router)
        assert len(bad.generations) == tried  # it is left alone, and the trajectory has another home
        bad.version = 2
        bad.fault = None
        with trio.move_on_after(0.7):
            await until(lambda: router.num_up == 2)
        assert router.num_up == 1  # it generates, but with the weights of before
        bad.version = 3
        await until(lambda: router.num_up == 2)
    assert [len(body["input_ids"]) for body in good.generations] == [2, 2]


def test_what_was_sampled_before_the_failure_is_kept():
    bad, good = Speaker(interrupts=True), Speaker()

    async def main():
        async with routed(bad, good) as (router, _):
            answer = bad.generate

            async def fail_later(body):
                if len(body["input_ids"]) > len(PROMPT):
                    bad.fault = "drops"
                return await answer(body)

            bad.generate = fail_later
            whole = await turn(router)
            check(whole)
            assert whole.num_interruptions == 1
            assert (
                router.work.redone_tokens == len(PROMPT) + PIECE - 1
            )  # all that the first server had computed

    trio.run(main)
    assert [body["input_ids"] for body in good.generations] == [[*PROMPT, 2, 3, 4, 5]]
    assert good.generations[0]["sampling_params"]["max_new_tokens"] == TOTAL - PIECE


async def test_a_server_that_hangs_is_drained_unless_it_is_paused():
    bad, good = Speaker(), Speaker()

    async with routed(bad, good, max_silence_s=0.4) as (router, _):
        bad.fault, bad.is_paused = "hangs", True
        done = []

        async def play():
            done.append(await turn(router))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            await trio.sleep(3.0)  # many times the silence
            assert not done
            assert router.num_drained == 0
            bad.is_paused = False  # resumed, and its load still stands still
        check(done[0])
        assert router.num_drained == 1
        bad.fault = None
        await until(lambda: router.num_up == 2)
    assert bad.aborted  # it may yet wake up


def test_a_server_that_is_retired_gives_back_what_it_has():
    leaving, staying = Speaker(), Speaker()

    async def main():
        async with routed(leaving, staying) as (router, urls):

            async def slow(body):
                """Answers, once it is aborted, with what it has."""
                leaving.interrupts = True
                await until(lambda: body["rid"] in leaving.aborted)
                return await Speaker.generate(leaving, body)

            leaving.generate = slow
            done = []

            async def play():
                done.append(await turn(router))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(play)
                await until(lambda: router.outstanding_tokens()[urls[0]])
                await trio.sleep(0.1)
                router.set_servers(urls[1:], version=3)
            check(done[0])
            assert done[0].num_interruptions == 1

    trio.run(main)
    assert [body["input_ids"] for body in staying.generations] == [[*PROMPT, 2, 3, 4, 5]]


async def test_what_is_cancelled_during_a_pause_is_aborted_again_after_it():
    speaker = Speaker(fault="hangs")
    speaker.is_paused = True

    async with serving(speaker) as url:
        client = SGLangClient(url)
        with trio.move_on_after(0.1):
            await client.generate(PROMPT, SamplingParams(TOTAL), rid="r")
        await client.settle_aborts()
        assert speaker.aborted == ["r"]  # the server is paused: it may not know of the request yet
        speaker.is_paused = False
        for _ in range(2):
            await client.settle_aborts()
            assert speaker.aborted == ["r", "r"]
        await client.aclose()


async def test_a_server_that_answers_byte_by_byte_and_never_ends_is_drained():
    bad, good = Speaker(), Speaker()

    async with routed(bad, good, max_silence_s=0.4) as (router, _):
        bad.fault = "drips"
        check(await turn(router))
        assert router.num_drained == 1


async def test_a_server_is_asked_whether_it_lives_beside_all_the_generations_that_it_holds():
    """Each connection for generations waits for its answer: a server that works on them all is no silent
    one.
    """
    busy = Speaker(fault="hangs")
    busy.works = True

    async with serving(busy) as url:
        client = SGLangClient(url, max_connections=2)
        async with trio.open_nursery() as nursery:
            for rid in ("a", "b"):
                nursery.start_soon(partial(client.generate, PROMPT, SamplingParams(TOTAL), rid=rid))
            await until(lambda: len(busy.generations) == 2)
            with trio.fail_after(10):
                first, second = await client.pulse(), await client.pulse()
                await client.abort("a")
            nursery.cancel_scope.cancel()
        assert first.load != second.load
        await client.aclose()
    assert busy.aborted[0] == "a"
