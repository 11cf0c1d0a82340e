"""Wrong requests: 400 with a message, and the server lives on."""

import pytest
import trio

from agentrl.errors import RequestRefused
from agentrl.http.client import HttpClient
from agentrl.types import SamplingParams

GOOD = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}}


def sampling(**params):
    return {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2, **params}}


EVERYWHERE = {
    "empty prompt": {**GOOD, "input_ids": []},
    "no prompt": {"sampling_params": {}},
    "negative temperature": sampling(temperature=-1),
    "top_p out of range": sampling(top_p=1.5),
    "unknown sampling parameter": sampling(foo=1),
    "negative length": sampling(max_new_tokens=-1),
    "beyond the context": {"input_ids": [3] * 500, "sampling_params": {"max_new_tokens": 13}},
    "prompt beyond the context": {"input_ids": [3] * 600, "sampling_params": {"max_new_tokens": 1}},
}
EMBEDDED = {
    "prompt larger than the whole cache": {"input_ids": [3] * 400, "sampling_params": {"max_new_tokens": 1}},
    "output larger than the whole cache": {"input_ids": [3], "sampling_params": {"max_new_tokens": 400}},
    "id not in the vocabulary": {**GOOD, "input_ids": [3, 384]},
    "huge id": {**GOOD, "input_ids": [2**62]},
    "negative id": {**GOOD, "input_ids": [-1]},
    "ids that are no integers": {**GOOD, "input_ids": ["a", 1.5]},
    "a boolean id": {**GOOD, "input_ids": [True]},
    "text prompt": {"text": "hello", "sampling_params": {}},
    "a stream of a batch": {"input_ids": [[3], [4]], "stream": True},
    "a stream without tokens between events": {**sampling(stream_interval=0), "stream": True},
    "log-probabilities of a prompt that is sampled from": {
        **GOOD,
        "return_logprob": True,
        "logprob_start_len": 0,
    },
    "log-probabilities beyond the prompt": {
        **sampling(max_new_tokens=0),
        "return_logprob": True,
        "logprob_start_len": 9,
    },
    "log-probabilities of a prompt as a stream": {
        **sampling(max_new_tokens=0),
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": True,
    },
    "experts of a dense model": {**GOOD, "return_routed_experts": True},
    "stop strings": sampling(stop=["x"]),
    "several samples": sampling(n=2),
    "sampling parameters of another type": {**GOOD, "sampling_params": [1]},
    "temperature of another type": sampling(temperature="warm"),
    "not a JSON number": sampling(temperature=None, top_k=0),
    "a negative seed": sampling(sampling_seed=-1),
    "a seed that is no integer": sampling(sampling_seed=1.5),
    "a huge seed": sampling(sampling_seed=2**63),
    "stop ids of another type": sampling(stop_token_ids="1"),
    "rid of another type": {**GOOD, "rid": 5},
    "one rid for two prompts": {"input_ids": [[3], [4]], "rid": "a"},
    "the same rid twice": {"input_ids": [[3], [4]], "rid": ["a", "a"]},
    "an empty prompt in a batch": {"input_ids": [[3], []]},
    "a list as body": [1, 2],
}


def post(server, path, body):
    async def script(client):
        async with HttpClient(server.url) as http:
            reply = await http.request("POST", path, json=body)
        return reply.status, reply.json()

    return script


def assert_refused(status, answer):
    assert status == 400
    message = answer.get("error") or answer.get("message")
    assert (message["message"] if isinstance(message, dict) else message).strip()


@pytest.mark.parametrize("name", EVERYWHERE)
def test_wrong_requests_are_refused(server, talk, name):
    assert_refused(*talk(post(server, "/generate", EVERYWHERE[name])))


@pytest.mark.parametrize("name", EMBEDDED)
def test_requests_that_would_kill_or_be_misread_are_refused(server, talk, name):
    if server.capabilities.refuses_foreign_ids:
        assert_refused(*talk(post(server, "/generate", EMBEDDED[name])))


def test_the_unknown_sampling_parameter_is_named_with_those_that_exist(server, talk):
    _, answer = talk(post(server, "/generate", EVERYWHERE["unknown sampling parameter"]))
    assert answer["error"].startswith("unknown field `foo`, expected one of ")


def test_unknown_keys_at_the_top_are_ignored(server, talk):
    status, _ = talk(post(server, "/generate", {**GOOD, "some_new_key": 1}))
    assert status == 200


def test_a_duplicate_live_rid_is_refused_and_the_first_goes_on(talk, sample_on, until_held):
    async def script(client):
        results = []

        async def one():
            results.append(await sample_on([3], 10, rid="dup"))

        await client.pause("abort")  # so that the first one lives for as long as the test needs
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await until_held(client)
            with pytest.raises(RequestRefused, match="Duplicate request ID detected: dup"):
                await client.generate([3], SamplingParams(1), rid="dup")
            await client.resume()
        return results[0]

    assert talk(script).finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-5, 1e30])
def test_extreme_temperatures_are_sampled(server, talk, temperature):
    status, answer = talk(post(server, "/generate", sampling(temperature=temperature)))
    assert status == 200
    assert len(answer["output_ids"]) >= 1


def test_no_new_tokens_is_an_empty_output(server, talk):
    status, answer = talk(post(server, "/generate", sampling(max_new_tokens=0)))
    assert status == 200
    assert answer["output_ids"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", []),
        ("/pause_generation", {"mode": "later"}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVAA=="]}),
        ("/weights_checker", {"action": "guess"}),
        ("/destroy_weights_update_group", {"group_name": "never made"}),
        ("/init_weights_update_group", {"master_port": "x"}),
        ("/update_weight_version", {}),
    ],
)
def test_wrong_control_calls_are_refused(server, talk, path, body):
    assert_refused(*talk(post(server, path, body)))


def test_a_body_that_is_not_json_is_refused(server, talk):
    async def script(client):
        stream = await trio.open_tcp_stream("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        head = (
            f"POST /generate HTTP/1.1\r\nHost: {server.url[7:]}\r\nContent-Type: "
            "application/json\r\nConnection: close\r\n"
        )
        await stream.send_all(f"{head}Content-Length: 4\r\n\r\n{{oh!".encode())
        return b"".join([chunk async for chunk in stream])

    assert talk(script).startswith(b"HTTP/1.1 400 ")


def test_an_unknown_path_is_not_found(server, talk):
    async def script(client):
        async with HttpClient(server.url) as http:
            return (await http.request("GET", "/nothing")).status

    assert talk(script) == 404
