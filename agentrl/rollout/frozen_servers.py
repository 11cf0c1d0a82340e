"""Servers with one frozen model, such as an opponent's or a teacher's."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, NoReturn, Protocol, TypeVar

import trio

from agentrl.errors import RequestRefused, ServerError

T = TypeVar("T")

MAX_FAILURES = 3
"""Failures of servers during one request before it fails."""
FAILURE_PAUSE_S = 0.2
"""Pause before a retry, multiplied by the failures so far."""
MAX_PAUSE_S = 2.0

Keys = Mapping[str, str | None]
"""URL -> API key of servers with the same weights."""
StartedKeys = Mapping[str, Keys]
"""The servers that were started for frozen models, by the config key of each model."""


FOLLOW_INTERVAL_S = 0.5


async def follow(keys: Callable[[], StartedKeys], use: Callable[[StartedKeys], None]) -> NoReturn:
    """Consumes the servers of frozen models; unblocked by time; passes them on to `use`."""
    while True:
        use(keys())
        await trio.sleep(FOLLOW_INTERVAL_S)


class Closable(Protocol):
    async def aclose(self) -> None: ...


C = TypeVar("C", bound=Closable)


class FrozenServers(Generic[C]):
    """Clients of servers that have the same weights, asked in turn.

    Args:
        connect: (URL, API key) -> client.
        keys: the servers.
        patience_s: for so long a request is repeated after more than MAX_FAILURES failures, too: what a
            restart of a server takes; 0: nobody restarts them.
    """

    def __init__(
        self, connect: Callable[[str, str | None], C], keys: Keys, *, patience_s: float = 0.0
    ) -> None:
        self._connect = connect
        self._keys = dict(keys)
        self._patience_s = patience_s
        self._clients: dict[str, C] = {}  # opened by the first request; those of servers that left, too
        self._asked: dict[str, set[trio.CancelScope]] = {}  # requests in flight, by URL
        self._next = itertools.count(1)

    def set_servers(self, keys: Keys) -> None:
        """Ask these servers from now on. Requests to servers that left are made again elsewhere."""
        left = self._keys.keys() - keys.keys()
        self._keys = dict(keys)
        for url in left:
            for scope in self._asked.get(url, ()):
                scope.cancel()

    async def ask(self, request: Callable[[C], Awaitable[T]]) -> T:
        """Return the answer to a request.

        Raises:
            RequestRefused: a server calls the request invalid.
            ServerError: MAX_FAILURES servers in a row failed, and the patience is over.
        """
        failures, deadline = 0, trio.current_time() + self._patience_s
        while True:
            try:
                return await self._ask_one(request)
            except RequestRefused:
                raise
            except ServerError as error:
                failures += 1
                if failures >= MAX_FAILURES and trio.current_time() >= deadline:
                    raise ServerError(f"{failures} failures in a row, the last: {error}") from error
            await trio.sleep(min(failures * FAILURE_PAUSE_S, MAX_PAUSE_S))

    async def _ask_one(self, request: Callable[[C], Awaitable[T]]) -> T:
        if not self._keys:
            raise ServerError("no server with the frozen model is up")
        url = list(self._keys)[next(self._next) % len(self._keys)]
        if url not in self._clients:
            self._clients[url] = self._connect(url, self._keys[url])
        asked = self._asked.setdefault(url, set())
        with trio.CancelScope() as scope:
            asked.add(scope)
            try:
                return await request(self._clients[url])
            finally:
                asked.discard(scope)
        raise ServerError(f"the server {url} left")

    async def aclose(self) -> None:
        """Close all connections."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()
