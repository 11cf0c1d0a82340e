"""Servers with one frozen model, such as an opponent's or a teacher's."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import trio

from agentrl.errors import RequestRefused, ServerError

T = TypeVar("T")

MAX_FAILURES = 3
"""Failures of servers during one request before it fails."""
FAILURE_PAUSE_S = 0.2
"""Pause before a retry, multiplied by the failures so far."""


class Closable(Protocol):
    async def aclose(self) -> None: ...


C = TypeVar("C", bound=Closable)


class FrozenServers(Generic[C]):
    """Clients of servers that have the same weights, asked in turn."""

    def __init__(self, clients: Sequence[C]) -> None:
        self._clients = clients
        self._first = itertools.count()

    async def ask(self, request: Callable[[C], Awaitable[T]]) -> T:
        """Return the answer to a request.

        Raises:
            RequestRefused: a server calls the request invalid.
            ServerError: MAX_FAILURES servers in a row failed.
        """
        first = next(self._first)
        for failures in range(1, MAX_FAILURES + 1):
            try:
                return await request(self._clients[(first + failures) % len(self._clients)])
            except RequestRefused:
                raise
            except ServerError as error:
                if failures == MAX_FAILURES:
                    raise ServerError(f"{failures} failures in a row, the last: {error}") from error
            await trio.sleep(failures * FAILURE_PAUSE_S)
        raise AssertionError("the last failure is raised")

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()
