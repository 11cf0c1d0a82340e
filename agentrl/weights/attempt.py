"""One attempt to bring servers to a version: what all transports share.

A server that fails is an entry in the result, never an exception.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import trio

from agentrl.errors import ServerError
from agentrl.sglang.client import SGLangClient
from agentrl.types import SendTimes
from agentrl.weights.source import WeightSource

T = TypeVar("T")

PING_S = 10.0
"""A server that does not report its version within this time is dead or hangs; no update could reach it."""

Hold = Callable[[SGLangClient], AbstractAsyncContextManager[bool]]
"""Context manager that pauses a server; yields whether its cache may be flushed.

If the block succeeds, the weights are checked and the server resumes. After a failure the server stays
paused, because its weights may be a mix of old and new under the old version.
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """What one attempt sent to all servers together, and the servers it failed for (url -> reason)."""

    num_bytes: int
    failed: Mapping[str, str] = field(default_factory=dict)
    times: SendTimes | None = None


class Transport(Protocol):
    """One way to move weights from the learner to the servers."""

    async def prepare(self, version: int) -> None:
        """Do the work that needs no server, once per publish, while the servers keep sampling.

        Raises:
            InfrastructureError: it failed.
        """

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        """Bring all of `servers` to `version`.

        Raises:
            InfrastructureError: the learner's side failed.
        """

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Release what is kept between publishes, also on `servers`."""


async def for_each(
    servers: Sequence[SGLangClient], action: Callable[[SGLangClient], Awaitable[None]], *, timeout_s: float, limit: str
) -> dict[str, str]:
    """Run `action(server)` concurrently on all servers; return url -> reason for those that failed.

    An action fails if it raises ServerError or exceeds `timeout_s`, which messages name `limit`.
    """
    failed: dict[str, str] = {}

    async def one(server: SGLangClient) -> None:
        try:
            with trio.fail_after(timeout_s):
                await action(server)
        except ServerError as error:
            failed[server.url] = str(error)
        except trio.TooSlowError:
            failed[server.url] = f"{server.url} did not answer within {limit}={timeout_s:g} s"

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(one, server)
    return failed


async def find_silent(servers: Sequence[SGLangClient], *, timeout_s: float = PING_S) -> dict[str, str]:
    """Return url -> reason for the servers that do not answer: dead or hanging."""

    async def ask(server: SGLangClient) -> None:
        await server.model_info()

    return await for_each(servers, ask, timeout_s=timeout_s, limit="the time of a question")


class LearnerCalls:
    """The learner's blocking calls, in worker threads, one at a time since its ranks need a single order.

    A call that is cancelled (by the end of the run, or by a deadline around it) abandons its thread. The
    ranks still finish it before the next call.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self._lock = trio.Lock()

    async def call(self, function: Callable[..., T], *args: object) -> T:
        async with self._lock:
            # abandon_on_cancel: a blocked collective cannot be interrupted, so at the end of a run its thread
            # is abandoned.
            return await trio.to_thread.run_sync(partial(function, *args), abandon_on_cancel=True)
