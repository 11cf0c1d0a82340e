"""Servers on the learner's GPUs (`rollout.colocated`): while it learns they are paused and give their memory back.

pause            running requests answer with what they have; the router waits, for it knows no server then
release          the servers give up weights and KV cache
learn
resume           the servers take their memory again, and stay paused: their weights are those of before, or nothing
publish          ends the pause, with weights that were sent after the memory was there; the router goes on
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from agentrl.controller.calls import in_trio
from agentrl.controller.rollouts import RolloutFleet
from agentrl.controller.servers import ServerFleet
from agentrl.errors import LearnerError
from agentrl.sglang.client import SGLangClient
from agentrl.weights.attempt import for_each

TIMEOUT_S = 60.0
"""A server that does not give its memory, or take it again, by then is restarted."""


class Colocation:
    """The turns that learner and servers take on the same memory."""

    def __init__(self, servers: ServerFleet, rollouts: RolloutFleet, *, say: Callable[[str], None]) -> None:
        self._servers = servers
        self._rollouts = rollouts
        self._say = say

    @contextmanager
    def lend(self, *, version: int) -> Iterator[None]:
        """Have the servers' memory free within the block. A publish must follow: it is what lets them sample again."""
        lending = self._each(self._servers.urls, _pause)
        self._rollouts.set_servers([], version=version)
        lending = self._each(lending, SGLangClient.release_memory)
        try:
            yield
        except LearnerError:  # its ranks start again, and publish
            self._each(lending, SGLangClient.resume_memory)
            raise
        self._each(lending, SGLangClient.resume_memory)

    def _each(self, urls: Sequence[str], verb: Callable[[SGLangClient], Awaitable[None]]) -> list[str]:
        """Let all do it side by side; restart those that fail, and return the others."""
        failed: dict[str, str] = in_trio(_try_each, self._servers.clients(urls), verb)
        for url, why in failed.items():
            self._say(f"server {url} does not share its memory: {why}; it is restarted")
            self._servers.restart(url)
        return [url for url in urls if url not in failed]


async def _pause(client: SGLangClient) -> None:
    await client.pause("abort")


async def _try_each(clients: Sequence[SGLangClient], verb: Callable[[SGLangClient], Awaitable[None]]) -> dict[str, str]:
    try:
        return await for_each(clients, verb, timeout_s=TIMEOUT_S, limit="the time to share memory")
    finally:
        for client in clients:
            await client.aclose()
