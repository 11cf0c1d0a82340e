"""SGLang's router in front of a run's servers.

It load-balances generation; all other calls go to each server.

The router forwards only `/generate`. It lists servers as workers: GET and POST `/workers`,
DELETE `/workers/{id}` (sglang_router 0.3).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import trio

from agentrl.errors import ConfigError, ServerError
from agentrl.http.client import HttpClient, HttpReply
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import ModelInfo, ServerLoad

POLL_S = 0.2
REGISTER_TIMEOUT_S = 120.0
"""The router probes a server for some seconds before it reports it as healthy."""


class SGLangRouterClient(SGLangClient):
    """Generates through the router at `url`.

    Calls that the router does not forward go to the servers behind it.

    Args:
        behind: returns the servers' URLs. connect: opens a client for one of them.
        options: those of SGLangClient, for the router.
    """

    def __init__(
        self,
        url: str,
        *,
        behind: Callable[[], Sequence[str]],
        connect: Callable[[str], SGLangClient],
        **options: Any,
    ) -> None:
        super().__init__(url, **options)
        self._behind = behind
        self._connect = connect
        self._clients: dict[str, SGLangClient] = {}

    async def aclose(self) -> None:
        await super().aclose()
        for client in self._clients.values():
            await client.aclose()

    async def abort(self, rid: str | None) -> None:
        """End the request `rid` (None: all) on every server, since the router does not report where it runs.

        Raises:
            ServerError: at least one server did not answer; all were asked.
        """
        errors: list[ServerError] = []

        async def abort(server: SGLangClient) -> None:
            try:
                await server.abort(rid)
            except ServerError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for server in self._servers():
                nursery.start_soon(abort, server)
        if errors:
            raise errors[0]

    async def is_paused(self) -> bool:
        """Return whether any server is paused."""
        return any([await server.is_paused() for server in self._servers()])

    async def loads(self) -> ServerLoad:
        """Return the sum of the servers' loads."""
        loads = [await server.loads() for server in self._servers()]
        return ServerLoad(
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.num_used_tokens for load in loads),
            sum(load.max_tokens for load in loads),
        )

    async def model_info(self) -> ModelInfo:
        """Return the info of the server with the oldest weights; unpublished weights count as oldest."""
        infos = [await server.model_info() for server in self._servers()]
        if not infos:
            raise ServerError(f"{self.url} has none of this run's servers as workers")
        return min(infos, key=lambda info: -1 if info.version is None else info.version)

    def _servers(self) -> list[SGLangClient]:
        urls = self._behind()
        for url in urls:
            if url not in self._clients:
                self._clients[url] = self._connect(url)
        return [self._clients[url] for url in urls]


class SGLangRouter:
    """The driver's control of a run's router: which servers are behind it."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._own: set[str] = set()

    async def set_servers(self, keys: Mapping[str, str | None]) -> None:
        """Make these servers the only ones behind the router; return once it reports all of them as healthy.

        Args:
            keys: {URL of the server: its API key}.

        Raises:
            ConfigError: the router has a server that is not of this run; its weights would be unknown.
            ServerError: the router does not answer, or not all are healthy within REGISTER_TIMEOUT_S.
        """
        try:
            with trio.fail_after(REGISTER_TIMEOUT_S):
                await self._talk(
                    lambda http: self._set_servers(http, {url.rstrip("/"): key for url, key in keys.items()})
                )
        except trio.TooSlowError:
            raise ServerError(
                f"{self.url} did not report {', '.join(keys)} healthy within {REGISTER_TIMEOUT_S:g} s"
            ) from None

    async def remove_servers(self) -> None:
        """Remove this run's servers from the router; raise ServerError if it does not answer."""

        async def remove(http: HttpClient) -> None:
            for worker in await self._workers(http):
                if worker["url"] in self._own:
                    await self._ask(http, "DELETE", f"/workers/{worker['id']}")

        with trio.move_on_after(REGISTER_TIMEOUT_S):
            await self._talk(remove)

    async def _set_servers(self, http: HttpClient, urls: Mapping[str, str | None]) -> None:
        workers = await self._workers(http)
        foreign = [worker["url"] for worker in workers if worker["url"] not in {*urls, *self._own}]
        if foreign:
            raise ConfigError(
                f"rollout.front_url={self.url} has the worker {foreign[0]}, which is not a server of this "
                "run; remove it from the router"
            )
        for worker in workers:
            if worker["url"] not in urls:
                await self._ask(http, "DELETE", f"/workers/{worker['id']}")
        for url, key in urls.items():
            if url not in {worker["url"] for worker in workers}:
                await self._ask(http, "POST", "/workers", {"url": url} | ({"api_key": key} if key else {}))
        self._own |= set(urls)
        while {worker["url"] for worker in await self._workers(http) if worker["is_healthy"]} != set(urls):
            await trio.sleep(POLL_S)

    async def _workers(self, http: HttpClient) -> list[dict[str, Any]]:
        reply = (await self._ask(http, "GET", "/workers")).json()
        try:
            return [
                {"id": str(w["id"]), "url": str(w["url"]).rstrip("/"), "is_healthy": bool(w["is_healthy"])}
                for w in reply["workers"]
            ]
        except (TypeError, KeyError) as error:
            raise ServerError(f"{self.url}/workers lists no workers: is it SGLang's router?") from error

    async def _talk(self, script: Callable[[HttpClient], Awaitable[None]]) -> None:
        http = HttpClient(
            self.url, headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        )
        try:
            await script(http)
        finally:
            await http.aclose()

    async def _ask(
        self, http: HttpClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> HttpReply:
        reply = await http.request(method, path, json=body)
        if reply.status >= 300:
            raise ServerError(
                f"{self.url}{path} answered {reply.status}: {reply.body[:200].decode(errors='replace')}",
                status=reply.status,
            )
        return reply
