"""Colocated servers: memory is given back while the server is paused, and nothing is sampled until it is
there again.
"""

import pytest
import trio

from agentrl.errors import ServerError
from agentrl.types import SamplingParams


def test_a_request_that_comes_while_memory_is_released_is_answered_after_the_publish(
    server, talk, until_held
):
    """The order of a colocated step: pause, release, resume, publish, continue; what came meanwhile has the
    version of after.
    """

    async def script(client):
        await client.pause("abort")
        await client.release_memory()
        answers = []

        async def ask():
            answers.append(await client.generate([3, 4, 5], SamplingParams(4), rid="meanwhile"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until_held(client)
            assert answers == []
            await client.resume_memory()
            await client.update_weights_from_disk(str(server.other), version=7, flush_cache=True)
            assert answers == []
            await client.resume()
        return answers[0]

    assert set(talk(script).versions.tolist()) == {7}


@pytest.mark.parametrize(
    "running_server", ["embedded"], indirect=True
)  # the scheduler of a real server ends by an assertion
def test_released_memory_takes_neither_requests_nor_weights(server, talk):
    async def script(client):
        await client.pause("abort")
        await client.release_memory()
        for verb in (
            client.release_memory(),
            client.update_weights_from_disk(str(server.other), version=8, flush_cache=True),
        ):
            with pytest.raises(ServerError, match="memory"):
                await verb
        await client.resume()  # alone it lets nothing through: there is no memory to sample with
        with trio.move_on_after(0.3) as scope:
            await client.generate([3], SamplingParams(1), rid="early")
        await client.resume_memory()
        with pytest.raises(ServerError, match="without release_memory_occupation"):
            await client.resume_memory()
        return scope.cancelled_caught

    assert talk(script)
