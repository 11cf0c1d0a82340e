"""A script that talks to a server through our client."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from agentrl.servers.client import SGLangClient

Result = TypeVar("Result")


def talk(script: Callable[[SGLangClient], Awaitable[Result]], url: str, *, timeout_s: float = 300) -> Result:
    """Run `script` with a client of the server; a server that it leaves paused is resumed."""

    async def main() -> Result:
        client = SGLangClient(url)
        with trio.fail_after(timeout_s):
            try:
                return await script(client)
            finally:
                await client.resume()
                await client.aclose()

    return trio.run(main)
