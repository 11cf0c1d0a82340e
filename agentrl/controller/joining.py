"""The last look at servers that join a run, or come back to it: they must sample, and by the version that they were just given."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import trio

from agentrl.errors import ServerError
from agentrl.sglang.client import SGLangClient
from agentrl.types import SamplingParams

TIMEOUT_S = 60.0


async def find_unfit(clients: Sequence[SGLangClient], version: int) -> dict[str, str]:
    """Return {url: why} of the servers that do not sample a token of `version`; closes the clients."""
    unfit: dict[str, str] = {}

    async def look(client: SGLangClient) -> None:
        try:
            with trio.fail_after(TIMEOUT_S):
                sampled = await client.generate([0], SamplingParams(1), rid=f"join-{uuid.uuid4().hex}")
            if (got := sampled.versions.tolist()) != [version]:
                unfit[client.url] = f"it was given version {version} and sampled a token of {got}"
        except ServerError as error:
            unfit[client.url] = str(error)
        except trio.TooSlowError:
            unfit[client.url] = f"it sampled no token within {TIMEOUT_S:g} s"
        finally:
            await client.aclose()

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(look, client)
    return unfit
