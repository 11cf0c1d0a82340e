"""The server pool of a router: servers join, are drained, recover and leave.

While `watch` runs, one task tends each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from agentrl.errors import ServerError
from agentrl.servers.server import QUESTION_TIMEOUT_S, Client, Server

TEND_INTERVAL_S = 0.5
"""Seconds between two checks of a server."""
COMPLAIN_AFTER_S = 10.0
"""Seconds out of use before a warning is logged.

A server that starts or loads weights is briefly out of use.
"""

log = logging.getLogger(__name__)


class Complaint:
    """Logs why a server has been out of use for COMPLAIN_AFTER_S, once per reason."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._down_since: float | None = None
        self._said: str | None = None

    def consider(self) -> None:
        """Log if it is time to. Call it after every probe."""
        if self._server.is_up:
            self._down_since = self._said = None
            return
        now = trio.current_time()
        self._down_since = now if self._down_since is None else self._down_since
        if now - self._down_since >= COMPLAIN_AFTER_S and self._said != self._server.why_down:
            self._said = self._server.why_down
            log.warning(
                "server %s has not been used for %.0f s: %s",
                self._server.url,
                now - self._down_since,
                self._said,
            )


class ServerPool:
    """Servers by URL, each checked every `tend_s` seconds.

    `connect` creates the client of a URL; for `silence_s` and `max_pause_s` see Server.
    """

    def __init__(
        self,
        connect: Callable[[str], Client],
        *,
        silence_s: float,
        max_pause_s: float,
        tend_s: float = TEND_INTERVAL_S,
    ) -> None:
        self._connect = connect
        self._tend_s = tend_s
        self._silence_s = silence_s
        self._max_pause_s = max_pause_s
        self._servers: dict[str, Server] = {}
        self._left: list[Server] = []  # retired servers whose requests have not moved yet
        self._tending: dict[Server, trio.CancelScope] = {}
        self._changed = trio.Event()
        self._watch_lock = trio.Lock()
        self._num_drained_left = 0
        self.version = 0

    @property
    def up(self) -> list[Server]:
        """The servers that can receive requests."""
        return [server for server in list(self._servers.values()) if server.is_up]

    @property
    def num_drained(self) -> int:
        """Number of times a server was drained since the start."""
        return self._num_drained_left + sum(
            server.breaker.num_openings for server in list(self._servers.values())
        )

    def outstanding_tokens(self) -> dict[str, int]:
        """Return the estimated number of tokens still to be computed, by URL."""
        return {url: server.outstanding_tokens for url, server in list(self._servers.items())}

    def places(self) -> dict[str, str]:
        """Return the server of each running request: request id -> URL. Thread-safe."""
        return {rid: url for url, server in list(self._servers.items()) for rid in server.running}

    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        """Use the servers at `urls`; of equally loaded ones, the first in this order is asked.

        A server that joins or recovers must sample with `version` or a later one.
        """
        self.version = version
        wanted = [url.rstrip("/") for url in urls]
        for url in [url for url in self._servers if url not in wanted]:
            self._retire(self._servers.pop(url))
        kept = self._servers
        self._servers = {
            url: kept.get(url)
            or Server(url, self._connect(url), silence_s=self._silence_s, max_pause_s=self._max_pause_s)
            for url in wanted
        }
        self._notify()

    async def until_changed(self) -> None:
        """Wait until a server joins, leaves or recovers."""
        await self._changed.wait()

    async def watch(self) -> None:
        """Tend all servers until cancelled. Each server that comes up unblocks `until_changed`."""
        async with (
            self._watch_lock,
            trio.open_nursery() as nursery,
        ):  # a second watcher waits for the first to end
            tended: set[Server] = set()
            while True:
                existing = [*self._servers.values(), *self._left]
                for server in existing:
                    if server not in tended:
                        nursery.start_soon(self._tend, server)
                tended = set(existing)
                await self._changed.wait()

    async def aclose(self) -> None:
        """Close all connections. Call it when no generation is running any more."""
        for url in list(self._servers):
            self._retire(self._servers.pop(url))
        for server in list(self._left):
            await self._close(server)

    async def _tend(self, server: Server) -> None:
        """Consumes one server's signs of life; unblocked by a timer; drains and restores the server until it
        is retired.
        """
        complaint = Complaint(server)
        with trio.CancelScope() as self._tending[server]:
            while not server.is_retired:
                if not server.is_up:
                    if await server.probe(self.version):
                        self._notify()
                    complaint.consider()
                elif await server.hangs():
                    server.drain()
                    await server.leave()
                await self._settle_aborts(server)
                await trio.sleep(self._tend_s)
        del self._tending[server]
        await server.leave()
        await self._close(server)

    async def _settle_aborts(self, server: Server) -> None:
        with trio.move_on_after(QUESTION_TIMEOUT_S):
            try:
                await server.client.settle_aborts()
            except ServerError:
                return  # a server that is gone has nothing to abort

    def _retire(self, server: Server) -> None:
        server.is_retired = True
        self._num_drained_left += server.breaker.num_openings
        self._left.append(server)
        if server in self._tending:
            self._tending[server].cancel()

    async def _close(self, server: Server) -> None:
        self._left.remove(server)
        await server.client.aclose()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
