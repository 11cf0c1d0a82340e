"""Abort, pause, resume, flush: what happens to requests under way, and to those that come meanwhile."""

import numpy as np
import pytest
import trio

from agentrl.errors import RequestRefused
from agentrl.http.client import HttpClient
from agentrl.types import SamplingParams

PROMPT = [5, 17, 42]
LONG = SamplingParams(300, temperature=1.0)


async def wait_running(client, number):
    while (await client.loads()).num_running < number:
        await trio.sleep(0.01)


async def raw(server, body):
    async with HttpClient(server.url) as http:
        return (await http.request("POST", "/generate", json=body)).json()


def endless(rid):
    """A request that only an abort, a pause or its length ends."""
    return {
        "rid": rid,
        "input_ids": PROMPT,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 300, "ignore_eos": True},
    }


def test_abort_answers_with_the_partial_output(server, talk, logprobs_of):
    async def script(client):
        answers = {}

        async def one(rid):
            answers[rid] = await raw(server, endless(rid))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "pre-1")
            nursery.start_soon(one, "pre-2")
            await wait_running(client, 2)
            await client.abort("pre")  # exact ids only: ends neither
            await client.abort("pre-1")
        return answers

    answers = talk(script)
    aborted, other = answers["pre-1"], answers["pre-2"]
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert other["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    ids = aborted["output_ids"]
    assert 0 < len(ids) < 300
    logprobs = [triple[0] for triple in aborted["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(logprobs, logprobs_of(server.model, PROMPT, ids), atol=1e-4)


def test_abort_of_an_unknown_rid_is_no_error(talk):
    async def script(client):
        await client.abort("nobody")
        return (await client.generate(PROMPT, SamplingParams(2, temperature=0.0), rid="somebody")).token_ids

    assert len(talk(script)) == 2


def test_abort_all_ends_every_request(server, talk):
    async def script(client):
        answers = []

        async def one(i):
            answers.append(await raw(server, endless(f"all-{i}")))

        async with trio.open_nursery() as nursery:
            for i in range(5):
                nursery.start_soon(one, i)
            await wait_running(client, 5)
            await client.abort(None)
        return answers

    assert [a["meta_info"]["finish_reason"]["type"] for a in talk(script)] == ["abort"] * 5


def test_a_cancelled_generation_is_aborted_on_the_server(talk):
    async def script(client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.generate(PROMPT, LONG, rid="gone"))
            await wait_running(client, 1)
            nursery.cancel_scope.cancel()
        while (await client.loads()).num_running:
            await trio.sleep(0.01)
        return await client.generate(PROMPT, SamplingParams(1), rid="gone")  # the id is free again

    assert len(talk(script).token_ids) == 1


def test_pause_ends_what_runs_and_holds_what_comes_until_resume(server, talk, until_held):
    async def script(client):
        answers, order = {}, []

        async def one(rid):
            answers[rid] = await raw(
                server,
                endless(rid) | ({} if rid == "running" else {"sampling_params": {"max_new_tokens": 2}}),
            )
            order.append(rid)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "running")
            await wait_running(client, 1)
            await client.pause("abort")
            nursery.start_soon(one, "later")
            await until_held(client)
            assert await client.is_ready() == server.capabilities.is_ready_while_paused
            assert (await client.model_info()).version == 0  # it lives
            order.append("resume")
            await client.resume()
        return answers, order

    answers, order = talk(script)
    assert answers["running"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers["later"]["meta_info"]["finish_reason"]["type"] == "length"
    assert order.index("resume") < order.index("later")


def test_a_held_request_is_aborted_by_servers_that_know_it(server, talk, until_held):
    async def script(client):
        answers = []

        async def one():
            answers.append(await raw(server, endless("waiting")))

        await client.pause("abort")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await until_held(client)
            await client.abort("waiting")
            if not server.capabilities.knows_held_requests:
                await client.resume()
        return answers[0]

    answer = talk(script)
    if server.capabilities.knows_held_requests:
        assert answer["output_ids"] == []
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 300}


@pytest.mark.parametrize("mode", ["retract", "in_place", "sometimes"])
def test_a_pause_mode_that_the_server_lacks_is_refused_by_name(server, talk, mode):
    async def script(client):
        await client.pause(mode)

    if mode in server.capabilities.pause_modes:
        talk(script)
    else:
        with pytest.raises(RequestRefused, match="abort") as caught:
            talk(script)
        assert caught.value.status == 400


def test_flush_is_refused_while_requests_run(server, talk):
    async def script(client):
        await client.flush_cache()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw, server, endless("f"))
            await wait_running(client, 1)
            with pytest.raises(RequestRefused, match="Flush cache failed"):
                await client.flush_cache()
            await client.abort("f")
        await client.flush_cache()

    talk(script)


def test_a_closed_connection_leaves_the_server_alive(server, talk):
    async def script(client):
        for _ in range(5):
            stream = await trio.open_tcp_stream("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
            await stream.send_all(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await stream.aclose()
        return await client.generate(PROMPT, SamplingParams(1), rid="after")

    assert len(talk(script).token_ids) == 1


@pytest.mark.parametrize(
    "running_server", ["embedded"], indirect=True
)  # the only one that says how many tokens it has put back
def test_a_pause_with_a_full_cache_holds_up_nobody_behind_it(server, talk):
    """Requests that ran are put back where the cache is full; all end at once, and the next ones are
    answered.
    """

    async def script(client):
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(raw, server, endless(f"full-{number}"))
            while (await client.loads()).num_used_tokens <= server.capabilities.cache_tokens:
                await trio.sleep(0.002)
            await client.pause("abort")
        await client.resume()
        return await client.generate(PROMPT, SamplingParams(2, temperature=0.0), rid="behind")

    assert len(talk(script).token_ids) == 2
