"""What only the embedded server promises: seeds of single requests."""

import pytest
import trio

from agentrl.http.client import HttpClient

pytestmark = pytest.mark.parametrize("running_server", ["embedded"], indirect=True)


async def generate(server, prompt, **params):
    body = {"input_ids": prompt, "return_logprob": True, "sampling_params": {"ignore_eos": True, **params}}
    async with HttpClient(server.url) as http:
        return (await http.request("POST", "/generate", json=body)).json()


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}], ids=str)
def test_a_seed_repeats_a_request_alone_and_among_others(server, talk, truncation):
    seeded = {"max_new_tokens": 24, "sampling_seed": 7, **truncation}

    async def script(client):
        alone = await generate(server, [5, 6, 7], **seeded)
        among = []

        async def again():
            among.append(await generate(server, [5, 6, 7], **seeded))

        async with trio.open_nursery() as nursery:
            for i in range(12):
                nursery.start_soon(lambda i=i: generate(server, [9 + i] * (1 + i), max_new_tokens=5 + i))
            nursery.start_soon(again)
        others = [await generate(server, [5, 6, 7], max_new_tokens=24, sampling_seed=i) for i in (8, None)]
        return [alone, *among, *others]

    alone, among, *others = [answer["output_ids"] for answer in talk(script)]
    assert alone == among
    assert alone not in others
    assert others[0] != others[1]
