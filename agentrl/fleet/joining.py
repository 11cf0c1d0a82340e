"""Final check of servers that join or rejoin a run: they must sample with the version just published."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from agentrl.errors import ServerError
from agentrl.sglang.client import SGLangClient
from agentrl.types import SamplingParams
from agentrl.weights.attempt import for_each

TIMEOUT_S = 60.0


async def find_unfit(clients: Sequence[SGLangClient], version: int) -> dict[str, str]:
    """Return {url: why} of the servers that do not sample a token with `version`. Closes the clients."""

    async def look(client: SGLangClient) -> None:
        sampled = await client.generate([0], SamplingParams(1), rid=f"join-{uuid.uuid4().hex}")
        if (got := sampled.versions.tolist()) != [version]:
            raise ServerError(f"it was given version {version} and sampled a token of {got}")

    try:
        return await for_each(clients, look, timeout_s=TIMEOUT_S, limit="the time of a first token")
    finally:
        for client in clients:
            await client.aclose()
