"""`ElasticServers`: servers that join and leave during a run, on request by `agentrl servers`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import trio

from agentrl.config.schema import Config
from agentrl.errors import ServerError
from agentrl.fleet.adapter import why_no_adapter
from agentrl.fleet.control import ControlDesk, ControlRequest
from agentrl.fleet.rollouts import RolloutFleet
from agentrl.fleet.servers import ServerFleet
from agentrl.rollout.trio_run import in_trio
from agentrl.sglang.client import SGLangClient

DRAIN_TIMEOUT_S = 10.0
"""Time for a leaving server to return the partial output of its requests; then it is removed anyway."""


class ElasticServers:
    """Serves the requests of the control desk.

    A joining server takes traffic once it has the weights and is verified.
    """

    def __init__(self, config: Config, servers: ServerFleet, rollouts: RolloutFleet, *, run_dir: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._servers = servers
        self._rollouts = rollouts
        self._say = say
        self._desk = ControlDesk(run_dir)
        self._able: set[str] = set()

    def attend(self, *, version: int) -> None:
        """Poll the servers, answer pending requests, and write the table of servers.

        Raises:
            InfrastructureError: a server that is no guest is lost for good, or none is left.
        """
        self._servers.poll()
        self._desk.serve(lambda request: self._act(request, version))
        if self._config.rollout.weights.adapter == "alone":
            for url in self._servers.guests_needing_weights:
                self._ask_for_adapters(url)
        self._desk.show(self._servers.lines, version=version, outstanding_tokens=self._rollouts.outstanding_tokens)

    def _act(self, request: ControlRequest, version: int) -> str:
        if request.verb == "drain":
            return self._drain(request.server, version)
        joining = self._servers.attach(request.server) if request.verb == "attach" else self._servers.start_another()
        self._say(f"server {joining} joins")
        return f"{joining} joins: once it generates it gets the weights, is checked, and serves"

    def _drain(self, server: str, version: int) -> str:
        """Drain a server: its requests return partial output, and the router continues them elsewhere."""
        leaving = self._servers.leaving(server)
        in_trio(self._tell, leaving, lambda client: client.pause("abort"))
        self._rollouts.set_servers([url for url in self._servers.urls if url != leaving], version=version)
        in_trio(self._tell, leaving, lambda client: client.resume())  # others may use it, too
        self._servers.remove(leaving)
        self._say(f"server {leaving} left")
        return f"{leaving} left: its trajectories go on elsewhere"

    async def _tell(self, url: str, verb: Callable[[SGLangClient], Awaitable[None]]) -> None:
        (client,) = self._servers.clients([url])
        with trio.move_on_after(DRAIN_TIMEOUT_S), suppress(ServerError):
            await verb(client)
        await client.aclose()

    def _ask_for_adapters(self, url: str) -> None:
        """Remove a guest that cannot load the LoRA adapter that all other servers sample with."""
        if url in self._able:
            return
        why = in_trio(why_no_adapter, self._servers.clients([url]), self._config)
        if why is None:
            self._able.add(url)
        else:
            self._say(f"server {url} cannot join: {why}")
            self._servers.remove(url)
