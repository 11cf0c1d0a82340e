"""Servers on the learner's GPUs (`rollout.colocated`): they free their memory while the learner trains.

pause            requests in flight return their partial output; the router has no servers, so it waits
release          the servers free weights and KV cache
learn
give back        the ranks free what they keep for later steps
resume           the servers allocate their memory again but stay paused: their weights are old or undefined
publish          sends weights into the new memory and ends the pause; the router continues
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.servers import ServerFleet
from agentrl.errors import LearnerError
from agentrl.servers.client import SGLangClient, for_each

TIMEOUT_S = 60.0
"""A server that has not freed or allocated its memory by then is restarted."""


class Colocation:
    """Passes GPU memory back and forth between learner and servers."""

    def __init__(self, servers: ServerFleet, rollouts: RolloutFleet, *, say: Callable[[str], None]) -> None:
        self._servers = servers
        self._rollouts = rollouts
        self._say = say

    @contextmanager
    def lend(self, *, version: int, give_back: Callable[[], None]) -> Iterator[None]:
        """Free the servers' memory within the block. `give_back` is called at its end, before they need it.

        A publish must follow: only it lets them sample again.
        """
        lending = self._each(self._servers.urls, lambda client: client.pause("abort"))
        self._rollouts.set_servers([], version=version)
        lending = self._each(lending, SGLangClient.release_memory)
        try:
            yield
            give_back()
        except LearnerError:  # the ranks restart and publish, for which the servers need their memory
            self._each(lending, SGLangClient.resume_memory)
            raise
        self._each(lending, SGLangClient.resume_memory)

    def _each(self, urls: Sequence[str], verb: Callable[[SGLangClient], Awaitable[None]]) -> list[str]:
        """Call `verb` on all servers concurrently.

        Restart those that fail, and return the URLs of the others.
        """
        failed = self._servers.talk(
            urls,
            partial(for_each, action=verb, timeout_s=TIMEOUT_S, limit="the time limit for releasing memory"),
        )
        for url, why in failed.items():
            self._say(f"server {url} does not release its memory: {why}; restarting it")
            self._servers.restart(url)
        return [url for url in urls if url not in failed]
