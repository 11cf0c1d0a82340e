"""A prompt is sent as the same bytes, whatever kind of sequence holds its ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import trio

from agentrl.http.client import HttpClient
from agentrl.servers.protocol import generate_body
from agentrl.types import SamplingParams
from parts.raw_http import read_request, reply

IDS = [7, 0, 151_935, 12, 3]


async def sent(prompt: Sequence[int]) -> dict:
    """Return the body that a server receives."""
    found = []

    async def serve(stream: trio.SocketStream) -> None:
        request = await read_request(stream)
        assert request is not None
        found.append(request[1])
        await stream.send_all(reply({}))

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        async with HttpClient(f"http://127.0.0.1:{port}") as client:
            body = generate_body(prompt, SamplingParams(4), rid="r")
            await client.request("POST", "/generate", json=body)
        nursery.cancel_scope.cancel()
    return found[0]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        np.array(IDS, np.int32),
        np.array(IDS, np.int64),
        np.array([[i, -1] for i in IDS], np.int32)[:, 0],
        np.array(IDS, np.int32)[::-1][::-1],
    ],
    ids=["list", "tuple", "int32", "int64", "a column", "reversed twice"],
)
def test_ids_are_sent_as_numbers(prompt):
    body = trio.run(sent, prompt)
    assert body["input_ids"] == IDS
    assert body["rid"] == "r"


def test_a_sequence_that_is_no_list_is_sent_as_one():
    assert trio.run(sent, range(5))["input_ids"] == [0, 1, 2, 3, 4]
