"""Sampling: tokens, log-probabilities, ends, batches, many at once."""

import numpy as np
import pytest
import trio

from agentrl.errors import RequestRefused
from agentrl.http.client import HttpClient
from agentrl.servers.streamed import StreamedTokens
from agentrl.types import SamplingParams

PROMPT = [5, 17, 42, 99, 7]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_softmax_of_logits_over_temperature(server, talk, logprobs_of, temperature):
    async def script(client):
        return await client.generate(
            PROMPT, SamplingParams(max_new_tokens=40, temperature=temperature), rid="a"
        )

    got = talk(script)
    expected = logprobs_of(server.model, PROMPT, got.token_ids.tolist(), temperature)
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-4)
    assert got.versions.tolist() == [0] * len(got.token_ids)


def test_greedy_takes_the_most_likely_token_and_reports_it_at_temperature_one(
    server, talk, logprobs_of, distributions_of
):
    async def script(client):
        return [
            await client.generate(PROMPT, SamplingParams(max_new_tokens=20, temperature=0.0), rid=f"g{i}")
            for i in range(2)
        ]

    first, second = talk(script)
    ids = first.token_ids.tolist()
    assert ids == second.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, logprobs_of(server.model, PROMPT, ids), atol=1e-4)
    assert distributions_of(server.model, PROMPT, ids).argmax(-1).tolist() == ids


def test_truncation_restricts_the_choice_but_not_the_logprob(server, talk, logprobs_of):
    async def script(client):
        params = SamplingParams(max_new_tokens=30, temperature=1.0, top_k=1)
        return await client.generate(PROMPT, params, rid="k"), await client.generate(
            PROMPT, SamplingParams(30, temperature=0.0), rid="g"
        )

    top_1, greedy = talk(script)
    assert top_1.token_ids.tolist() == greedy.token_ids.tolist()
    np.testing.assert_allclose(
        top_1.logprobs, logprobs_of(server.model, PROMPT, top_1.token_ids.tolist()), atol=1e-4
    )


def test_stop_token_ends_and_is_part_of_the_output(talk):
    async def script(client):
        free = await client.generate(PROMPT, SamplingParams(max_new_tokens=12, temperature=0.0), rid="free")
        stop = int(free.token_ids[5])
        return (
            free,
            stop,
            await client.generate(
                PROMPT, SamplingParams(12, temperature=0.0, stop_token_ids=(stop,)), rid="stopped"
            ),
        )

    free, stop, stopped = talk(script)
    end = free.token_ids.tolist().index(stop) + 1
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[:end]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.versions) == end


@pytest.mark.parametrize("length", [1, 2, 33])
def test_length_ends_exactly(talk, length):
    async def script(client):
        return await client.generate(PROMPT, SamplingParams(length, temperature=0.0), rid="n")

    got = talk(script)
    assert got.finish_reason == "length"
    assert len(got.token_ids) == length


def test_a_prompt_longer_than_one_forward_is_computed_in_chunks(server, talk, logprobs_of):
    long = [(7 * i) % 290 + 2 for i in range(350)]

    async def script(client):
        results = []

        async def one(prompt, rid):
            results.append((prompt, await client.generate(prompt, SamplingParams(10), rid=rid)))

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(one, long[i:], f"long{i}")
                nursery.start_soon(one, PROMPT[: i + 1], f"short{i}")
        return results

    for prompt, got in talk(script):
        np.testing.assert_allclose(
            got.logprobs, logprobs_of(server.model, prompt, got.token_ids.tolist()), atol=1e-4
        )


def test_two_hundred_at_once_are_all_answered_right(server, talk, logprobs_of):
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 300, size=random.integers(1, 30)).tolist() for _ in range(200)]

    async def script(client):
        results = {}

        async def one(i):
            results[i] = await client.generate(
                prompts[i], SamplingParams(5 + i % 20, temperature=0.5 + i % 3), rid=f"r{i}"
            )

        async with trio.open_nursery() as nursery:
            for i in range(len(prompts)):
                nursery.start_soon(one, i)
        return results

    results = talk(script)
    assert len(results) == 200
    for i, got in results.items():
        ids = got.token_ids.tolist()
        assert ids[-1] == 1 if got.finish_reason == "stop" else len(ids) == 5 + i % 20
        if i % 10 == 0:
            np.testing.assert_allclose(
                got.logprobs, logprobs_of(server.model, prompts[i], ids, 0.5 + i % 3), atol=1e-4
            )


def test_a_batch_is_answered_in_order(server, talk):
    async def script(client):
        async with HttpClient(server.url) as http:
            body = {
                "input_ids": [[3, 4], [5], [6, 7, 8]],
                "rid": ["x", "y", "z"],
                "sampling_params": [{"max_new_tokens": n, "temperature": 0} for n in (1, 2, 3)],
                "return_logprob": True,
            }
            return (await http.request("POST", "/generate", json=body)).json()

    answers = talk(script)
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y", "z"]
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [2, 1, 3]
    assert [len(a["output_ids"]) for a in answers] == [1, 2, 3]
    assert all([t[1] for t in a["meta_info"]["output_token_logprobs"]] == a["output_ids"] for a in answers)
    assert all(
        a["meta_info"]["finish_reason"] == {"type": "length", "length": len(a["output_ids"])} for a in answers
    )


def test_without_return_logprob_none_are_sent(server, talk):
    async def script(client):
        async with HttpClient(server.url) as http:
            body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 2}}
            return (await http.request("POST", "/generate", json=body)).json()

    answer = talk(script)
    assert "output_token_logprobs" not in answer["meta_info"]
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])


def test_questions_are_answered(server, talk):
    async def script(client):
        async with HttpClient(server.url) as http:
            models = (await http.request("GET", "/v1/models")).json()
            old_names = [
                (await http.request("GET", path)).status
                for path in ("/get_model_info", "/get_server_info", "/health")
            ]
        return await client.model_info(), await client.loads(), await client.server_info(), models, old_names

    info, load, settings, models, old_names = talk(script)
    assert info.model_path == str(server.model)
    assert info.version == 0
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.max_tokens == server.capabilities.cache_tokens
    assert settings["model_path"] == str(server.model)
    assert models["data"][0]["max_model_len"] == 512
    assert old_names == [200, 200, 200]


def test_a_stream_tells_what_the_reply_says(server, talk):
    """Tokens arrive in order, each once; what arrived so far is a generation of its own, with its facts."""
    told, partials = [], []

    class Heard(StreamedTokens):
        def arrived(self, ids, parse):
            super().arrived(ids, parse)
            partials.append(self.partial())

    async def script(client):
        params = SamplingParams(max_new_tokens=200, temperature=1.0, ignore_eos=True)
        return await client.stream(PROMPT, params, rid="s", into=Heard(told.extend))

    whole = talk(script)
    assert told == whole.token_ids.tolist()
    assert len(partials) >= 2, "the stream came in one piece"
    for partial in partials:
        size = len(partial.token_ids)
        np.testing.assert_array_equal(partial.token_ids, whole.token_ids[:size])
        np.testing.assert_array_equal(partial.logprobs, whole.logprobs[:size])
        assert partial.versions.tolist() == [0] * size
        assert partial.finish_reason == "abort"


def test_a_stream_that_is_cancelled_or_refused_ends(server, talk):
    async def script(client):
        with trio.CancelScope() as scope:

            def stop(ids):
                scope.cancel()

            params = SamplingParams(max_new_tokens=300, ignore_eos=True)
            await client.stream(PROMPT, params, rid="c", into=StreamedTokens(stop))
        assert scope.cancelled_caught
        with trio.fail_after(30):
            while (await client.loads()).num_running:
                await trio.sleep(0.01)
        with pytest.raises(RequestRefused):
            await client.stream(PROMPT, SamplingParams(10_000), rid="r", into=StreamedTokens(print))

    talk(script)


@pytest.mark.parametrize("first", [1, 5, 24])
def test_a_prompt_is_scored_without_sampling_and_sampling_goes_on_as_before(server, talk, logprobs_of, first):
    ids = [*PROMPT, *range(20, 40)]

    async def script(client):
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        before = await client.generate(PROMPT, params, rid="before")
        found = {}

        async def score(number):
            found[number] = await client.prompt_logprobs(ids, first=first, rid=f"s{number}")

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(score, number)
            during = await client.generate(PROMPT, params, rid="during")
        return before, during, await client.generate(PROMPT, params, rid="after"), found

    before, during, after, found = talk(script)
    expected = logprobs_of(server.model, ids[:first], ids[first:])
    for scores in found.values():
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    for other in (during, after):
        assert other.token_ids.tolist() == before.token_ids.tolist()
        np.testing.assert_allclose(other.logprobs, before.logprobs, atol=1e-5)
